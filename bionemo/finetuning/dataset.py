# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences as training data for models that are fine-tuned as a whole."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import MaxLengths, TokenizedBatch, concatenate_sequences
from bionemo.data.files import SplitName
from bionemo.finetuning.features import tokenize_split
from bionemo.finetuning.task_data import Split, TaskType, describe_truncation
from bionemo.inference.batching import Ids
from bionemo.models.language_model import LanguageModel

_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class LabelledDataset:
    """The sequences of one split, with a target at each labelled position; see `Dataset`.

    A class is stored as its number, a number as the bits of its fp32 value, which `bits_to_numbers` converts.
    """

    ids: Sequence[Ids]  # token ids of N sequences, with begin and end tokens if the model has them
    # Labelled positions of each sequence; the first token for a label of the whole sequence.
    target_positions: list[NDArray[np.int64]]
    target_ids: list[NDArray[np.int64]]  # int64 targets at these positions
    max_length: int  # maximum number of tokens of a sequence
    seed: int  # seed of dropout
    notes: tuple[str, ...] = ()
    clusters: None = None
    mixture: None = None

    @property
    def records(self) -> NDArray[np.int64]:
        """See `Dataset`."""
        return np.arange(len(self.ids))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `Dataset`."""
        return np.fromiter(map(len, self.ids), np.int64, len(self.ids))

    token_counts = lengths

    @property
    def max_lengths(self) -> MaxLengths:
        """See `Dataset`."""
        return MaxLengths(self.max_length)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset`."""
        return {"the labels": zlib.crc32(np.concatenate(self.target_ids).tobytes())}

    def tokenize(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> TokenizedBatch:
        """See `Dataset`."""
        inputs = concatenate_sequences((self.ids[record] for record in records), np.int32)
        keys = sample_keys(purpose_key(self.seed, "dropout"), epochs, records)
        begins = inputs.lengths.cumsum() - inputs.lengths
        positions = [self.target_positions[record] + begin for record, begin in zip(records, begins, strict=True)]
        return TokenizedBatch(
            replace(inputs, dropout_keys=keys),
            np.concatenate([_NO_POSITIONS, *positions]),
            np.concatenate([_NO_POSITIONS, *(self.target_ids[record] for record in records)]),
            np.zeros(len(records), np.int64),
        )


@dataclass(frozen=True)
class LabelledData:
    """Dataset factory for the splits of a task; `model` is the class of the model."""

    splits: Mapping[str, Split]
    task_type: TaskType
    model: type[LanguageModel]

    def open(self, config: Any, vocabulary: Any, name: SplitName) -> LabelledDataset:
        """Tokenize a split; see `DatasetFactory`. Errors as in `tokenize_split`."""
        split, has_bos_eos = self.splits[name], self.model.has_bos_eos
        max_length = config.max_position_embeddings - 2 * has_bos_eos
        sequences = tokenize_split(split, self.task_type, vocabulary)
        begin, end = ([vocabulary.bos_id], [vocabulary.eos_id]) if has_bos_eos else ([], [])
        ids = [np.concatenate([begin, tokens[:max_length], end]).astype(np.int32) for tokens in sequences]
        target_positions, target_ids = [], []
        for target, labelled in zip(split.targets, split.labelled_positions(max_length), strict=True):
            target_positions.append(labelled + (has_bos_eos if target.ndim else 0))
            target_ids.append(target[labelled] if target.ndim else _target_bits(target))
        cut = sum(len(tokens) > max_length for tokens in sequences)
        note = describe_truncation(name, cut, len(sequences), max_length)
        seed = getattr(config.data, name).seed
        return LabelledDataset(
            ids, target_positions, target_ids, max_length + 2 * has_bos_eos, seed, (note,) if cut else ()
        )

    def reference_losses(
        self, train: LabelledDataset, val: LabelledDataset, batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """Return the loss of a prediction that ignores the sequences: class frequencies, or the mean."""
        known, targets = (torch.from_numpy(np.concatenate(dataset.target_ids)) for dataset in (train, val))
        if self.task_type == "regression":
            errors = bits_to_numbers(targets) - bits_to_numbers(known).mean()
            return {"the mean alone": float(errors.square().mean())}
        counts = torch.bincount(known, minlength=int(targets.max()) + 1).double()
        return {"label frequencies alone": float(-(counts / counts.sum()).log()[targets].mean())}


def _target_bits(target: np.ndarray) -> NDArray[np.int64]:
    """Return a class as its number, a number as its bits, [1]."""
    found: NDArray[np.int64] = (target.view(np.uint32) if target.dtype == np.float32 else target).astype(np.int64)
    return found[None]


def bits_to_numbers(target_ids: Tensor) -> Tensor:
    """Convert int64 bits to fp32 numbers."""
    return target_ids.to(torch.int32).view(torch.float32)


def get_targets(batch: PackedBatch, task_type: TaskType) -> Tensor:
    """Return the targets of a batch, [R]: int64 classes or fp32 numbers."""
    return bits_to_numbers(batch.target_ids) if task_type == "regression" else batch.target_ids
