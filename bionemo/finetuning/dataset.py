# SPDX-License-Identifier: Apache-2.0
"""Labelled sequences as training data (data/samples.py), for a model that changes while it learns the task."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bionemo.common.random_stream import purpose_key, sample_keys
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import RowSize, Tokens, end_to_end
from bionemo.data.files import SplitName
from bionemo.finetuning.features import token_ids_of
from bionemo.finetuning.task import NOT_ASKED, Kind, Split
from bionemo.inference.batching import Ids
from bionemo.models.language_model import LanguageModel


@dataclass(frozen=True)
class LabelledSamples:
    """The sequences of one split, each a sample, and asked where it has a label.

    A class is asked as its number, a number as the bits of its fp32 value: `values_of` reads them.

    Attributes:
        ids: N sequences of tokens, with begin and end where the model has them.
        places: for each, the tokens at which it is asked; of a whole sequence its first.
        answers: for each, as many int64.
        most: tokens that the model reads of one.
        seed: of dropout.
        notices: what the user should know.
    """

    ids: Sequence[Ids]
    places: list[NDArray[np.int64]]
    answers: list[NDArray[np.int64]]
    most: int
    seed: int
    notices: tuple[str, ...] = ()
    clusters: None = None

    @property
    def records(self) -> NDArray[np.int64]:
        """See Samples."""
        return np.arange(len(self.ids))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See Samples."""
        return np.fromiter(map(len, self.ids), np.int64, len(self.ids))

    counted = lengths

    @property
    def row(self) -> RowSize:
        """See Samples."""
        return RowSize(self.most)

    @property
    def identity(self) -> dict[str, Any]:
        """See Samples."""
        return {"the labels": zlib.crc32(np.concatenate(self.answers).tobytes())}

    def build(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Tokens:
        """Put together; see Samples."""
        inputs = end_to_end((self.ids[record] for record in records), np.int32)
        begins = inputs.lengths.cumsum() - inputs.lengths
        none = np.zeros(0, np.int64)
        places = [self.places[record] + begin for record, begin in zip(records, begins, strict=True)]
        return Tokens(
            inputs,
            np.concatenate([none, *places]),
            np.concatenate([none, *(self.answers[record] for record in records)]),
            sample_keys(purpose_key(self.seed, "dropout"), epochs, records),
            np.zeros(len(records), np.int64),
        )


@dataclass(frozen=True)
class LabelledData:
    """All splits of a task, which `SequenceData` opens like any other kind of data.

    Attributes:
        splits: sequences and targets.
        kind: of the task.
        model: that reads them.
    """

    splits: Mapping[str, Split]
    kind: Kind
    model: type[LanguageModel]

    def open(self, config: Any, vocabulary: Any, name: SplitName) -> LabelledSamples:
        """Tokenise a split; see Samples.

        Raises:
            UserError: for a sequence that is none, or whose letters are not its tokens.
        """
        split, ends = self.splits[name], self.model.ends
        most = config.max_position_embeddings - 2 * ends
        read = token_ids_of(split, self.kind, vocabulary)
        border = [[vocabulary.bos_id], [vocabulary.eos_id]] if ends else [[], []]
        ids = [np.concatenate([border[0], each[:most], border[1]]).astype(np.int32) for each in read]
        places, answers = [], []
        for target in split.targets:
            asked = np.flatnonzero(target[:most] != NOT_ASKED) if target.ndim else np.zeros(1, np.int64)
            places.append(asked + (ends if target.ndim else 0))
            answers.append(target[asked] if target.ndim else _bits(target))
        cut = sum(len(each) > most for each in read)
        notice = f"{name}: {cut:,} of {len(read):,} sequences are longer than {most:,} tokens, and cut"
        seed = getattr(config.data, name).seed
        return LabelledSamples(ids, places, answers, most + 2 * ends, seed, (notice,) if cut else ())

    def reference_losses(
        self, train: LabelledSamples, val: LabelledSamples, batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """What can be said without reading a sequence: the classes' frequencies, or the mean."""
        known, asked = (torch.from_numpy(np.concatenate(samples.answers)) for samples in (train, val))
        if self.kind == "regression":
            return {"the mean alone": float((values_of(asked) - values_of(known).mean()).square().mean())}
        counts = torch.bincount(known, minlength=int(asked.max()) + 1).double()
        return {"label frequencies alone": float(-(counts / counts.sum()).log()[asked].mean())}


def _bits(target: np.ndarray) -> NDArray[np.int64]:
    """A class as its number, a number as its bits."""
    found: NDArray[np.int64] = (target.view(np.uint32) if target.dtype == np.float32 else target).astype(np.int64)
    return found[None]


def values_of(answers: Tensor) -> Tensor:
    """Numbers from their bits: fp32 of int64."""
    return answers.to(torch.int32).view(torch.float32)


def targets_of(batch: PackedBatch, kind: Kind) -> Tensor:
    """What should be answered, [R]: int64 classes or fp32 numbers."""
    return values_of(batch.target_ids) if kind == "regression" else batch.target_ids
