# SPDX-License-Identifier: Apache-2.0
"""Interface between a kind of data and the rest of the data package.

A dataset holds the numbered records of one split and tokenizes them on demand. Implementations: `proteins.masking`
(masked language modelling), `proteins.spans` (span corruption), `molecules` (SMILES translation), `text` (causal
language modelling) and `finetuning.dataset` (labelled sequences). Each model class names its dataset factory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.common.random_stream import RandomBits
from bionemo.data.batch import PackedBatch
from bionemo.data.clusters import Clusters
from bionemo.data.files import SplitName
from bionemo.data.mixture import Mixture


def _empty() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


class MaxLengths(NamedTuple):
    """Maximum number of tokens in a row, and therefore in each of the sequences packed into it; see `sampler`."""

    inputs: int
    source: int | None = None  # the encoder's, for an encoder-decoder


@dataclass(frozen=True)
class TokenSequences:
    """N concatenated token sequences, followed by padding in a micro-batch."""

    # [n] the smallest integer type that holds the vocabulary, because batches are sent between processes
    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int64]  # [N], number of tokens in each sequence
    max_length: int = 1  # upper bound of the length of a sequence; longer padding is divided into such segments
    dropout_keys: RandomBits | None = None  # [N] uint64, random key of each sequence for dropout; None: zeros
    # [N] int64, position id of each sequence's first token; None: zeros
    first_positions: NDArray[np.int64] | None = None

    @property
    def padding_segments(self) -> int:
        """Number of padding segments."""
        return -(-(len(self.ids) - int(self.lengths.sum())) // self.max_length)


@dataclass(frozen=True)
class TokenizedBatch:
    """Tokenized samples with their targets. N is the number of sequences."""

    inputs: TokenSequences  # model input; for an encoder-decoder, the decoder's input
    # [m], ascending indices into `inputs.ids` at which the loss is computed
    target_positions: NDArray[np.int64] = field(default_factory=_empty)
    target_ids: NDArray[np.integer[Any]] = field(default_factory=_empty)  # [m] expected tokens at the target positions
    unknown_counts: NDArray[np.int64] = field(
        default_factory=_empty
    )  # [N], number of tokens outside the vocabulary in each sequence
    source: TokenSequences | None = None  # encoder input of an encoder-decoder, with N sequences
    sequences_per_sample: NDArray[np.int64] | None = None  # [samples]; None if each sample is one sequence

    def unpack(self) -> PackedBatch:
        """Convert to tensors; add position ids, segment ids and cumulative lengths, ten times as many bytes."""
        padding_segments = max(side.padding_segments for side in (self.inputs, self.source) if side is not None)
        source = None if self.source is None else TokenizedBatch(self.source)._unpack(padding_segments, None)
        return self._unpack(padding_segments, source)

    def pin_memory(self) -> PackedBatch:
        """Convert to tensors in page-locked memory; called by the data loader's pin-memory thread."""
        return self.unpack().pin_memory()

    def _unpack(self, padding_segments: int, source: PackedBatch | None) -> PackedBatch:
        ids, lengths, max_length = self.inputs.ids, self.inputs.lengths, self.inputs.max_length
        number, used, total = len(lengths), int(lengths.sum()), len(ids)
        padding = np.clip(total - used - max_length * np.arange(padding_segments), 0, max_length)
        sizes = np.concatenate([lengths, padding]).astype(np.int32)
        cu_seqlens = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=cu_seqlens[1:])
        segments = np.minimum(np.arange(len(sizes), dtype=np.int32), number)
        starts = cu_seqlens[:-1].copy()
        if self.inputs.first_positions is not None:
            starts[:number] -= self.inputs.first_positions.astype(np.int32)
        position_ids = np.arange(total, dtype=np.int32) - np.repeat(starts, sizes)
        position_ids[used:] = 0
        dropout_keys = np.zeros(number + 1, np.uint64)
        if self.inputs.dropout_keys is not None:
            dropout_keys[:number] = self.inputs.dropout_keys
        return PackedBatch(
            tokens=torch.from_numpy(ids.astype(np.int32)),
            position_ids=torch.from_numpy(position_ids),
            segment_ids=torch.from_numpy(np.repeat(segments, sizes)),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            target_positions=torch.from_numpy(self.target_positions),
            target_ids=torch.from_numpy(self.target_ids.astype(np.int64)),
            dropout_keys=torch.from_numpy(dropout_keys.view(np.int64)),
            lengths=tuple(lengths.tolist()),
            max_length=max_length,
            unknown_tokens=int(self.unknown_counts.sum()),
            source=source,
        )


class Dataset(Protocol):
    """The samples of one split.

    Attributes:
        records: [k] int64, numbers of the records in use; with `clusters`, numbers of clusters.
        lengths: [n] integer, maximum number of tokens that each record takes in a row; used for packing.
        token_counts: [n] integer, number of tokens of each record in throughput figures, exact or estimated.
        max_lengths: maximum length of a row.
        clusters: selects a record from each cluster; None if a sample is a record.
        mixture: the sources of a mixture, whose records `records` contains; None for a single data set.
        notes: messages about the data for the user, one line each.
        fingerprint: everything that determines the tokens of each record, except order and maximum length.
    """

    @property
    def records(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def lengths(self) -> NDArray[np.integer[Any]]: ...  # noqa: D102
    @property
    def token_counts(self) -> NDArray[np.integer[Any]]: ...  # noqa: D102
    @property
    def max_lengths(self) -> MaxLengths: ...  # noqa: D102
    @property
    def clusters(self) -> Clusters | None: ...  # noqa: D102
    @property
    def mixture(self) -> Mixture | None: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def fingerprint(self) -> dict[str, Any]: ...  # noqa: D102

    def tokenize(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> TokenizedBatch:
        """Tokenize samples [k]. The result for a sample depends only on its epoch and record.

        An unusable record becomes a sequence of length 0 in `inputs` and in `source`.
        """


class DatasetFactory(Protocol):
    """Opens the splits of one kind of data; usually the dataset class itself."""

    def open(self, config: Any, vocabulary: Any, name: SplitName) -> Dataset:
        """Open a split of the data named in a model configuration.

        Raises:
            UserError: if the data is missing, unreadable or unsuitable for the model.
        """

    def reference_losses(self, train: Any, val: Any, batches: Iterable[PackedBatch]) -> dict[str, float]:
        """Return baseline losses in nats per target token, by name, for comparison with the run's losses.

        `batches` are those of the validation dataset.
        """


def concatenate_sequences(parts: Iterable[NDArray[np.integer[Any]]], dtype: type[np.integer[Any]]) -> TokenSequences:
    """Concatenate token sequences; there may be none."""
    sequences = list(parts)
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return TokenSequences(np.concatenate([np.zeros(0, dtype), *sequences]).astype(dtype, copy=False), lengths)
