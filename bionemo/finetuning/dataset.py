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
from bionemo.config.schema.data import TaskType
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import MaxLengths, TokenizedBatch, concatenate_sequences
from bionemo.data.files import SplitName
from bionemo.finetuning.features import tokenize_split
from bionemo.finetuning.labels import Split, is_labelled
from bionemo.finetuning.task_data import describe_truncation
from bionemo.inference.batching import Ids
from bionemo.models.language_model import LanguageModel

_NO_POSITIONS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class LabelledDataset:
    """The sequences of one split, with a target at each labelled position; see `Dataset`.

    A class is stored as its number, a number as the bits of its fp32 value, which `bits_to_numbers` converts.
    """

    ids: Sequence[Ids]  # token ids of N sequences, with begin and end tokens if the model has them
    # Labelled positions of each sequence; for each label of the whole sequence, its first token.
    target_positions: list[NDArray[np.int64]]
    target_ids: list[NDArray[np.integer[Any]]]  # targets at these positions
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
    outputs: int = 1  # of the head

    def open(self, config: Any, vocabulary: Any, name: SplitName) -> LabelledDataset:
        """Tokenize a split; see `DatasetFactory`. Errors as in `tokenize_split`."""
        split, has_bos_eos = self.splits[name], self.model.has_bos_eos
        max_length = config.max_position_embeddings - 2 * has_bos_eos
        sequences = tokenize_split(split, self.task_type, vocabulary)
        begin, end = ([vocabulary.bos_id], [vocabulary.eos_id]) if has_bos_eos else ([], [])
        ids = [np.concatenate([begin, tokens[:max_length], end]).astype(np.int32) for tokens in sequences]
        target_positions, target_ids = [], []
        for target in split.targets:
            if self.task_type.startswith("token-level"):
                labelled = np.flatnonzero(is_labelled(target[:max_length]))
                values, positions = target[labelled], labelled + has_bos_eos
            else:  # a view, because there may be thousands of labels
                values, positions = target.reshape(-1), np.broadcast_to(np.int64(0), target.size)
            target_positions.append(positions)
            target_ids.append(values.view(np.uint32) if values.dtype == np.float32 else values)
        cut = sum(len(tokens) > max_length for tokens in sequences)
        note = describe_truncation(name, cut, len(sequences), max_length)
        seed = getattr(config.data, name).seed
        return LabelledDataset(
            ids, target_positions, target_ids, max_length + 2 * has_bos_eos, seed, (note,) if cut else ()
        )

    def reference_losses(
        self, train: LabelledDataset, val: LabelledDataset, batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """Return the loss of a prediction that ignores the sequences: class frequencies, or the mean.

        {} for several labels or targets.
        """
        known, targets = (
            get_targets(
                torch.from_numpy(np.concatenate(each.target_ids).astype(np.int64)), self.task_type, self.outputs
            )
            for each in (train, val)
        )
        if "classification" in self.task_type:
            counts = torch.bincount(known, minlength=int(targets.max()) + 1).double()
            return {"label frequencies alone": float(-(counts / counts.sum()).log()[targets].mean())}
        return {"the mean alone": float((targets - known.mean()).square().mean())} if self.outputs == 1 else {}


def bits_to_numbers(target_ids: Tensor) -> Tensor:
    """Convert int64 bits to fp32 numbers."""
    return target_ids.to(torch.int32).view(torch.float32)


def get_targets(target_ids: Tensor, task_type: TaskType, outputs: int) -> Tensor:
    """Return the targets of a batch: [R] of classes or residues, else [R, C] with C outputs of a head."""
    targets = bits_to_numbers(target_ids) if "regression" in task_type else target_ids
    return targets.reshape(-1, outputs) if task_type in ("regression", "multi-label") else targets
