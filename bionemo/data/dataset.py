# SPDX-License-Identifier: Apache-2.0
"""Interface between a kind of data and the rest of the data package.

A dataset holds the numbered records of one split and tokenizes them on demand. Implementations: `proteins.masking`
(masked language modelling), `proteins.spans` (span corruption), `molecules` (SMILES translation), `text` (causal
language modelling) and `finetuning.dataset` (labelled sequences). Each model class names its dataset factory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import RandomBits
from bionemo.data.batch import PackedBatch
from bionemo.data.clusters import Clusters
from bionemo.data.files import SplitName


class MaxLengths(NamedTuple):
    """Maximum number of tokens in a row, and therefore in each of the sequences packed into it; see `sampler`."""

    inputs: int
    source: int | None = None  # the encoder's, for an encoder-decoder


@dataclass(frozen=True)
class TokenSequences:
    """Concatenated token sequences."""

    # [n] the smallest integer type that holds the vocabulary, because batches are sent between processes
    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int64]  # [N], number of tokens in each sequence


@dataclass(frozen=True)
class TokenizedBatch:
    """Tokenized samples with their targets. N is the number of sequences."""

    inputs: TokenSequences  # model input; for an encoder-decoder, the decoder's input
    target_positions: NDArray[np.int64]  # [m], ascending indices into `inputs.ids` at which the loss is computed
    target_ids: NDArray[np.integer[Any]]  # [m] expected tokens at the target positions
    dropout_keys: RandomBits  # [N] uint64, random key of each sequence for dropout
    unknown_counts: NDArray[np.int64]  # [N], number of tokens outside the vocabulary in each sequence
    source: TokenSequences | None = None  # encoder input of an encoder-decoder, with N sequences
    sequences_per_sample: NDArray[np.int64] | None = None  # [samples]; None if each sample is one sequence
    # [N] int64, position id of each sequence's first token; None if all are 0
    first_positions: NDArray[np.int64] | None = None


class Dataset(Protocol):
    """The samples of one split.

    Attributes:
        records: [k] int64, numbers of the records in use; with `clusters`, numbers of clusters.
        lengths: [n] integer, maximum number of tokens that each record takes in a row; used for packing.
        token_counts: [n] integer, number of tokens of each record in throughput figures, exact or estimated.
        max_lengths: maximum length of a row.
        clusters: selects a record from each cluster; None if a sample is a record.
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
