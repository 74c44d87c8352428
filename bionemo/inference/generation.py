# SPDX-License-Identifier: Apache-2.0
"""Molecules that an encoder-decoder writes: those it has read, or others near them.

What is near is found by noise on the vectors of what was read. The noise, and tokens that are drawn, are functions of
counters (seed, text, perturbation, place); so what is written for a text does not depend on what is beside it.
Shapes: n tokens of a text, D hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import Words, draw_runs, normal, purpose_key, sample_keys
from bionemo.config.schema import SamplingConfig, TaskConfig
from bionemo.config.schema.infer import SamplingMethod
from bionemo.inference.batching import ROWS, USUAL, Ids, Limits
from bionemo.inference.outputs import Floats, Outputs, see_that_it_writes
from bionemo.inference.progress import silent
from bionemo.megatron.attention import Segments
from bionemo.megatron.layer_spec import Memory
from bionemo.models.decoding import Choose, beam_search, greedy, sampled, write
from bionemo.models.encoder_decoder import EncoderDecoder

METHODS: tuple[str, ...] = get_args(SamplingMethod)
_TYPICAL = 32  # tokens of a SMILES, about; by it, limits of tokens become numbers of texts that are written


@dataclass(frozen=True)
class Way:
    """How texts are written for one that was read.

    Attributes:
        perturbations: of its vectors; each is written from by itself.
        radius: standard deviation of the noise.
        beams: of a search; 0: token by token.
        kept: texts of each perturbation, the best first.
        alpha: length penalty of a search.
        seed: of what is drawn.
        chosen: from the keys of perturbations, which token comes next where there are no beams.
    """

    perturbations: int = 1
    radius: float = 0.0
    beams: int = 0
    kept: int = 1
    alpha: float = 0.0
    seed: int = 0
    chosen: Callable[[Words], Choose] = lambda keys: greedy


def ways(task: TaskConfig) -> dict[str, Way]:
    """How those outputs of a task are written that are text.

    Raises:
        UserError: naming a value that cannot be.
    """
    found, where = {}, "model.downstream_task."
    if "reconstruction" in task.outputs:
        key = f"{where}reconstruction_beam_size"
        found["reconstruction"] = way_to_reconstruct(task.reconstruction_beam_size, key)
    if "samples" in task.outputs:
        found["samples"] = way_to_sample(task.sampling, f"{where}sampling.")
    return found


def way_to_reconstruct(beam_size: int, key: str = "beam_size") -> Way:
    """How the very text that was read is written again: greedily, or by a search.

    Args:
        beam_size: 1: greedily.
        key: what it is called in messages.

    Raises:
        UserError: when there are no beams.
    """
    if beam_size < 1:
        raise UserError(f"{key} is {beam_size}, expected at least 1 (greedy)")
    return Way(beams=beam_size if beam_size > 1 else 0)


def way_to_sample(config: SamplingConfig, prefix: str = "") -> Way:
    """How a method of v1 writes.

    Args:
        config: what is asked for.
        prefix: of its keys, in messages.

    Raises:
        UserError: naming the first value that cannot be.
    """
    _check(config, prefix)
    number, radius, seed, alpha = config.num_samples, config.scaled_radius, config.seed, config.beam_alpha

    def drawn(keys: Words) -> Choose:
        top_k, top_p = config.top_k or None, config.top_p or None
        return sampled(keys, temperature=config.temperature, top_k=top_k, top_p=top_p)

    search = partial(Way, radius=radius, alpha=alpha, seed=seed)
    return {
        "greedy-perturbate": Way(number, radius, seed=seed),
        "topkp-perturbate": Way(number, radius, seed=seed, chosen=drawn),
        "beam-search-perturbate": search(number, beams=config.beam_size),
        "beam-search-single-sample": search(1, beams=number, kept=number),
        "beam-search-perturbate-sample": search(number, beams=config.beam_size, kept=config.beam_size),
    }[config.sampling_method]


def _check(config: SamplingConfig, prefix: str) -> None:
    method = config.sampling_method
    if method not in METHODS:
        raise UserError(f"{prefix}sampling_method is {method!r}, expected one of {', '.join(METHODS)}")
    for key, right, wanted in (
        ("num_samples", config.num_samples >= 1, "at least 1"),
        ("scaled_radius", 0 <= config.scaled_radius < np.inf, "0 or more"),
        ("top_k", config.top_k >= 0, "0 (all tokens) or more"),
        ("top_p", 0 <= config.top_p <= 1, "a probability, or 0 (all tokens)"),
        ("temperature", 0 < config.temperature < np.inf, "more than 0"),
        ("beam_size", config.beam_size >= 1, "at least 1"),
        ("beam_alpha", 0 <= config.beam_alpha < np.inf, "0 or more"),
    ):
        if not right:
            raise UserError(f"{prefix}{key} is {getattr(config, key)}, expected {wanted}")


def written(
    model: Outputs,
    sequences: Sequence[Ids],
    way: Way,
    numbers: NDArray[np.int64] | None = None,
    limits: Limits = USUAL,
    advance: Callable[[int], object] = silent,
) -> list[list[str]]:
    """Write texts for each that is read.

    Args:
        model: an encoder-decoder of molecules.
        sequences: tokens of each text.
        way: how; see `way_to_sample`.
        numbers: [N] int64 number of each text, for what is drawn; None: their places in the list.
        limits: of what is computed together.
        advance: told how many texts are done.

    Returns:
        For each text `way.perturbations` times `way.kept` others, those of a perturbation together.

    Raises:
        UserError: when the model does not write what it has read.
    """
    see_that_it_writes(model.network, "text of its own")
    owners = np.repeat(np.arange(len(sequences)), way.perturbations)
    turns = np.tile(np.arange(way.perturbations), len(sequences))
    records = owners if numbers is None else np.asarray(numbers, np.int64)[owners]
    noise, tokens = (sample_keys(purpose_key(way.seed, purpose), turns, records) for purpose in ("perturb", "write"))
    width = max(way.beams, 1)
    together = max(min(limits.tokens // _TYPICAL, limits.sequences or limits.tokens), ROWS)
    size, least = max(together // width, 1), -(-ROWS // width)
    found: list[list[str]] = [[] for _ in sequences]
    for begin in range(0, len(owners), size):
        part = slice(begin, begin + size)
        ours = owners[part]
        read = _vectors(model, sequences[ours[0] : ours[-1] + 1], limits)
        near = [
            _perturbed(read[owner - ours[0]], way.radius, key) for owner, key in zip(ours, noise[part], strict=True)
        ]
        fill = max(least - len(near), 0)
        keys = np.pad(tokens[part], (0, fill), "edge")
        texts = _texts(model, _memory([*near, *near[-1:] * fill], model.device), way, keys)
        for owner, more in zip(ours, texts, strict=False):
            found[owner] += more
        advance(int((turns[part] == way.perturbations - 1).sum()))
    return found


def _vectors(model: Outputs, sequences: Sequence[Ids], limits: Limits) -> list[Floats]:
    """What the encoder makes of each text, [n, D]."""
    ends = np.cumsum([len(ids) for ids in sequences])
    columns = [part["hiddens"] for part in model.compute(sequences, ["hiddens"], limits)]
    return np.split(np.concatenate(columns), ends[:-1])


def _perturbed(hidden_nD: Floats, radius: float, key: np.uint64) -> Floats:
    """Add normal noise that is drawn under a key."""
    if radius == 0:
        return hidden_nD
    words = draw_runs(np.array([key], np.uint64), np.array([-(-hidden_nD.size // 2)]))
    noise = normal(words)[: hidden_nD.size].reshape(hidden_nD.shape)
    return hidden_nD + (radius * noise).astype(np.float32)


def _memory(hiddens: list[Floats], device: torch.device) -> Memory:
    """Vectors as a decoder attends to them."""
    lengths = tuple(map(len, hiddens))
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    hidden_S1D = torch.from_numpy(np.concatenate(hiddens)).to(device)[:, None]
    return Memory(hidden_S1D, Segments(lengths, boundaries, max(lengths)))


@torch.no_grad()
def _texts(model: Outputs, memory: Memory, way: Way, keys: Words) -> list[list[str]]:
    """What is written for each that the memory holds, the best first."""
    network = model.network
    assert isinstance(network, EncoderDecoder)
    with model.autocast():
        if way.beams:
            found = beam_search(network, memory, way.beams, alpha=way.alpha)
        else:
            found = [[each] for each in write(network, memory, way.chosen(keys), least=ROWS)]
    return [[network.vocabulary.decode(each.tokens) for each in beams[: way.kept]] for beams in found]
