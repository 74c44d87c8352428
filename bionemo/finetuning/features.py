# SPDX-License-Identifier: Apache-2.0
"""What a model that does not change says of the sequences of a task, computed once.

N sequences, D hidden size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.finetuning.task import NOT_ASKED, Kind, Split
from bionemo.inference.batching import Ids, Limits, room, token_ids
from bionemo.inference.model import TrainedModel
from bionemo.tokenizers import Vocabulary

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Features:
    """Vectors and targets.

    Attributes:
        vectors: [rows, D] fp32; a row for each sequence, or for each token of each.
        targets: [rows] int64 of classes, or fp32.
        lengths: [N] int64, rows of each sequence.
    """

    vectors: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def rows_of(self, sequences: np.ndarray) -> np.ndarray:
        """Numbers of the rows of sequences, in their order."""
        ends = self.lengths.cumsum()[sequences]
        lengths = self.lengths[sequences]
        first = np.repeat(ends - lengths, lengths)
        within = np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)
        return first + within


def token_ids_of(split: Split, kind: Kind, vocabulary: Vocabulary) -> list[Ids]:
    """Tokens of N sequences, without begin and end.

    Raises:
        UserError: for a sequence that is none, or whose letters, which have labels, are not its tokens.
    """
    found = [token_ids(vocabulary, text, f"sequence {number:,}") for number, text in enumerate(split.texts)]
    if kind == "token-level-classification":
        for number, (text, ids) in enumerate(zip(split.texts, found, strict=True)):
            if len(text) != len(ids):
                raise UserError(
                    f"sequence {number:,} has {len(text):,} letters and {len(ids):,} tokens: remove spaces"
                )
    return found


def compute(
    model: TrainedModel, split: Split, kind: Kind, limits: Limits, file: Path | None = None,
    advance: Advance = lambda count: None,
) -> tuple[Features, int]:  # fmt: skip
    """Compute them; the end of a sequence that the model cannot read has no label.

    Args:
        model: in evaluation mode.
        split: sequences and targets.
        kind: of the task.
        limits: of what is computed together.
        file: takes the vectors, which may be too many for memory; None: memory does.
        advance: told how many sequences are done.

    Returns:
        The features, and how many sequences were cut.

    Raises:
        UserError: for a sequence that is none, or whose letters are not its tokens.
        OSError: when the file cannot be written.
    """
    tokens, most = kind == "token-level-classification", room(model.network)
    whole = token_ids_of(split, kind, model.network.vocabulary)
    ids = [each[:most] for each in whole]
    lengths = np.array([len(each) for each in ids] if tokens else [1] * len(ids), np.int64)
    targets = np.concatenate([target[:most] for target in split.targets]) if tokens else np.stack(split.targets)
    shape = int(lengths.sum()), model.hidden_size
    name = "hiddens" if tokens else "embeddings"
    computed = (columns[name] for columns in model.compute(ids, [name], limits, advance))
    vectors = _in_file(file, shape, computed) if file else _in_memory(shape, computed)
    return Features(vectors, targets, lengths), sum(len(each) > most for each in whole)


def _in_memory(shape: tuple[int, ...], computed: Iterable[np.ndarray]) -> np.ndarray:
    vectors, begin = np.empty(shape, np.float32), 0
    for each in computed:
        vectors[begin : begin + len(each)] = each
        begin += len(each)
    return vectors


def _in_file(file: Path, shape: tuple[int, ...], computed: Iterable[np.ndarray]) -> np.ndarray:
    """Write a .npy file and map it into memory.

    A map that is written to would be a sparse file: where the disk is full, that ends the process without a message.
    """
    with replacing(file) as new, new.open("xb") as opened:
        npy.write_array_header_2_0(opened, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for each in computed:
            opened.write(np.ascontiguousarray(each, "<f4").data)
    return npy.open_memmap(file, "r")


class Batch(NamedTuple):
    """Some of them."""

    sequences: np.ndarray  # [n] their numbers
    vectors: np.ndarray  # [rows, D]
    targets: np.ndarray  # [rows]
    lengths: np.ndarray  # [n]


def batches(features: Features, size: int, order: np.ndarray) -> Iterator[Batch]:
    """`size` sequences at a time, in an order."""
    for begin in range(0, len(order), size):
        chosen = order[begin : begin + size]
        rows = features.rows_of(chosen)
        yield Batch(chosen, features.vectors[rows], features.targets[rows], features.lengths[chosen])


def asked(features: Features) -> int:
    """Rows that have a label."""
    return int((features.targets != NOT_ASKED).sum()) if features.targets.dtype == np.int64 else len(features.targets)
