# SPDX-License-Identifier: Apache-2.0
"""Windows of proteins that are longer than the model, as in ProteinGym.

Notin et al. 2023, "ProteinGym: Large-Scale Benchmarks for Protein Fitness Prediction and Design", appendix. Positions
and windows count tokens, so a protein begins with its begin token and ends with its end token; a window in the middle
has neither. Shapes: T tokens of the protein, W of a window, k positions, P pairs of a position and a window, V
vocabulary.
"""

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bionemo.inference.batching import Ids, add_special_tokens
from bionemo.inference.outputs import Floats, InferenceModel
from bionemo.inference.progress import Advance, no_progress
from bionemo.models.encoder import MaskedLanguageModel

WindowType = Literal["optimal", "overlapping"]
WINDOW_TYPES: tuple[WindowType, ...] = get_args(WindowType)
_EDGE = 256  # tokens at each end of a window of 1,024 whose predictions count less
_STEEPNESS = 16  # tokens
Positions = NDArray[np.int64]


class WindowPairs(NamedTuple):
    """Windows that predict each of k positions. Predictions of a position are averaged with the weights."""

    position: Positions  # [P] index into the positions
    start: Positions  # [P] first token of the window
    weight: NDArray[np.float64]  # [P]


def make_windows(positions: NDArray[np.integer[Any]], tokens: int, size: int, kind: WindowType) -> WindowPairs:
    """Choose windows of `size` tokens; a protein of at most that many tokens is a window of its own.

    `optimal`: each position has one window, of which it is the center, moved inwards at the ends of the protein.
    `overlapping`: windows start every size / 2 - 1 tokens, counted from both ends, with one more in the middle if the
    two series would share less than this. The weight of a token is 1, and falls towards the ends of the window.

    Args:
        positions: [k] tokens to predict, counted from 0.
        tokens: T, number of tokens of the protein.
        size: W, maximum number of tokens of the model.
        kind: one of WINDOW_TYPES.
    """
    k = len(positions)
    if tokens <= size:
        return WindowPairs(np.arange(k), np.zeros(k, np.int64), np.ones(k))
    if kind == "optimal":
        return WindowPairs(np.arange(k), np.clip(positions - size // 2, 0, tokens - size), np.ones(k))
    starts = _overlapping_starts(tokens, size)
    offset = positions[:, None] - starts[None]
    position, window = np.nonzero((offset >= 0) & (offset < size))
    return WindowPairs(position, starts[window], _weights(size)[offset[position, window]])


def _overlapping_starts(tokens: int, size: int) -> Positions:
    step, last = size // 2 - 1, tokens - size
    left, right = [0], [last]
    while left[-1] + size - 1 <= right[-1]:
        left.append(left[-1] + step)
        right.append(right[-1] - step)
    middle = [tokens // 2 - size // 2] if left[-1] + size - right[-1] < step else []
    return np.array(left + right + middle)


def _weights(size: int) -> NDArray[np.float64]:
    """Return the weights [W] of the tokens of a window: logistic functions of the distance from its ends."""
    edge = min(_EDGE, size // 4)
    distance = np.arange(edge + 1)
    rising = 1 / (1 + np.exp(-(distance - edge / 2) / (_STEEPNESS * edge / _EDGE)))
    weights = np.ones(size)
    weights[1 : edge + 1] = rising[1:]
    weights[size - 2 - edge : size - 1] = rising[::-1]  # one token more than at the beginning, as in ProteinGym
    return weights


def predict_residues(
    model: InferenceModel, ids: Ids, residues: NDArray[np.integer[Any]], masked: bool, kind: WindowType,
    advance: Advance = no_progress,
) -> Floats:  # fmt: skip
    """Compute a masked language model's predictions of some residues, in windows if the protein exceeds the model.

    Args:
        model: masked language model.
        ids: [n] token ids of the protein, without begin and end tokens.
        residues: [k] indices of the residues.
        masked: mask each residue in a copy of its window; otherwise compute every window once, without a mask.
        kind: how windows are chosen.
        advance: called with the number of finished residues.

    Returns:
        Log-probabilities [k, V]. With overlapping windows, weighted means of log-probabilities.
    """
    assert isinstance(model.network, MaskedLanguageModel)
    whole, k = add_special_tokens(model.network, ids), len(residues)
    size = min(len(whole), model.network.config.max_position_embeddings)
    token = residues + model.network.has_bos_eos
    pairs = make_windows(token, len(whole), size, kind)
    starts, window = pairs.start, np.arange(len(pairs.start))
    if not masked:
        starts, window = np.unique(pairs.start, return_inverse=True)
    order = np.argsort(window, kind="stable")  # [P]
    sums = np.zeros((k, model.network.vocabulary.vocab_size))
    count, done = model.sequences_per_batch(size), 0
    for begin in range(0, len(starts), count):
        windows = whole[starts[begin : begin + count, None] + np.arange(size)]
        first, last = np.searchsorted(window[order], [begin, begin + count])
        part = order[first:last]
        row, position = window[part] - begin, pairs.position[part]
        inner = token[position] - pairs.start[part]
        if masked:
            windows[row, inner] = model.network.vocabulary.mask_id
        found_PV = model.token_log_probabilities(windows, row, inner).double().cpu().numpy()
        np.add.at(sums, position, pairs.weight[part, None] * found_PV)
        advance(k * int(last) // len(order) - done)
        done = k * int(last) // len(order)
    totals = np.bincount(pairs.position, pairs.weight, k)
    means: Floats = (sums / totals[:, None]).astype(np.float32)
    return means
