# SPDX-License-Identifier: Apache-2.0
"""Features of a task: the vectors that a frozen model computes once for all sequences.

N sequences, D hidden size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.config.schema.data import TaskType
from bionemo.data.letters import note_letters
from bionemo.finetuning.labels import Split, is_labelled
from bionemo.finetuning.variants import compute_variant_vectors
from bionemo.inference.batching import BatchLimits, Ids, max_tokens, tokenize
from bionemo.inference.model import TrainedModel
from bionemo.inference.progress import Advance, no_progress
from bionemo.tokenizers import Vocabulary


@dataclass(frozen=True)
class Features:
    """Vectors and targets."""

    vectors: np.ndarray  # [rows, D] fp32 (variants: [rows, L + D]), a row for each sequence, or for each token
    targets: np.ndarray  # [rows] int64 classes or fp32 numbers, or [rows, C] several of a sequence; see `is_labelled`
    lengths: np.ndarray  # [N] int64, number of rows of each sequence

    def __len__(self) -> int:
        return len(self.lengths)

    def rows_of(self, sequences: np.ndarray) -> np.ndarray:
        """Return the row numbers of sequences, in order."""
        ends = self.lengths.cumsum()[sequences]
        lengths = self.lengths[sequences]
        first = np.repeat(ends - lengths, lengths)
        offset = np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)
        return first + offset

    def count_labels(self) -> int:
        """Return the number of labels."""
        return int(is_labelled(self.targets).sum())


def tokenize_split(split: Split, task_type: TaskType, vocabulary: Vocabulary) -> list[Ids]:
    """Tokenize the N sequences of a split, without begin and end tokens; letters that are unknown are logged.

    Raises:
        UserError: for an invalid sequence, or one whose letters have labels but are not single tokens.
    """
    named = list(zip(split.texts, split.locations, strict=True))
    found = [tokenize(vocabulary, text, f"{location}: the sequence") for text, location in named]
    note_letters(vocabulary, named)
    if task_type.startswith("token-level"):
        for target, location, ids in zip(split.targets, split.locations, found, strict=True):
            if len(target) != len(ids):
                raise UserError(f"{location}: the sequence has {len(target):,} labels and {len(ids):,} tokens")
    return found


def compute_features(
    model: TrainedModel, split: Split, task_type: TaskType, limits: BatchLimits, file: Path | None = None,
    advance: Advance = no_progress, wild_type: str | None = None,
) -> tuple[Features, int]:  # fmt: skip
    """Compute the features of a split. Sequences above the model's maximum length are truncated.

    The vectors, which may exceed the memory, are written to the .npy `file`; None: they are kept in memory. If
    `wild_type` is given, the sequences are variants of it; see `compute_variant_vectors`.

    Returns:
        The features, and the number of truncated sequences.

    Raises:
        UserError: see `tokenize_split` and `compute_variant_vectors`.
        OSError: if the file cannot be written.
    """
    per_token, max_length = task_type.startswith("token-level"), max_tokens(model.network)
    whole = tokenize_split(split, task_type, model.network.vocabulary)
    sequences = [ids[:max_length] for ids in whole]
    lengths = np.array([len(ids) for ids in sequences] if per_token else [1] * len(sequences), np.int64)
    targets = np.concatenate([t[:max_length] for t in split.targets]) if per_token else np.stack(split.targets)
    computed: Iterable[np.ndarray]
    if wild_type is None:
        shape, name = (int(lengths.sum()), model.hidden_size), "hiddens" if per_token else "embeddings"
        computed = (columns[name] for columns in model.compute(sequences, [name], limits, advance))
    else:
        shape = len(sequences), len(wild_type) + model.hidden_size
        computed = compute_variant_vectors(model, wild_type, sequences, split.locations, limits, advance)
    vectors = _write_file(file, shape, computed) if file else np.concatenate([*computed])
    return Features(vectors, targets, lengths), sum(len(ids) > max_length for ids in whole)


def _write_file(file: Path, shape: tuple[int, ...], computed: Iterable[np.ndarray]) -> np.ndarray:
    """Write a .npy file and map it into memory.

    Writing to a memory map would create a sparse file: a full disk then kills the process without a message.
    """
    with replacing(file) as new, new.open("xb") as opened:
        npy.write_array_header_2_0(opened, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for part in computed:
            opened.write(np.ascontiguousarray(part, "<f4").data)
    return npy.open_memmap(file, "r")


def iterate_batches(features: Features, size: int, order: np.ndarray) -> Iterator[tuple[np.ndarray, Features]]:
    """Yield numbers and features of `size` sequences at a time, in the given order."""
    for begin in range(0, len(order), size):
        chosen = order[begin : begin + size]
        rows = features.rows_of(chosen)
        yield chosen, Features(features.vectors[rows], features.targets[rows], features.lengths[chosen])
