# SPDX-License-Identifier: Apache-2.0
"""What a kind of training data offers: numbered samples of known size, made into tokens when they are asked for.

The kinds: `proteins.masking` (residues to guess), `proteins.spans` (residues behind sentinels), `molecules` (SMILES
written anew), `text` (documents to go on with). A model names its kind; all else about data does not know which it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import Words
from bionemo.data.batch import PackedBatch
from bionemo.data.clusters import Clusters
from bionemo.data.files import SplitName


class RowSize(NamedTuple):
    """Tokens that a row has room for, and so the longest sequence."""

    inputs: int
    source: int | None = None  # of the encoder's row, where there is one


@dataclass(frozen=True)
class Sequences:
    """Token sequences end to end.

    Attributes:
        ids: [n] any integer type that holds the vocabulary; the smallest one, as it travels between processes.
        lengths: [N] int64, tokens of each sequence.
    """

    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """Samples as tokens.

    Attributes:
        inputs: what the model reads; of an encoder-decoder, what its decoder reads.
        target_index: [m] int64 ascending, at which tokens of `inputs` the model is asked.
        target_ids: [m] what it should say there.
        keys: [N] uint64, a random key of each sequence, for dropout.
        unknown: [N] int64, tokens outside the vocabulary in each sequence.
        source: what the encoder of an encoder-decoder reads, as many sequences as `inputs` has.
        counts: [samples] int64, how many sequences each sample has; None: one each.
        offsets: [N] int64, position of each sequence's first token; None: 0.
    """

    inputs: Sequences
    target_index: NDArray[np.int64]
    target_ids: NDArray[np.integer[Any]]
    keys: Words
    unknown: NDArray[np.int64]
    source: Sequences | None = None
    counts: NDArray[np.int64] | None = None
    offsets: NDArray[np.int64] | None = None


class Samples(Protocol):
    """The samples of one split.

    Attributes:
        records: [k] int64, the numbers of those that take part; with clusters, numbers of clusters.
        lengths: [n] integer, for every record the tokens that it takes of a row, at most; what rows are planned with.
        counted: [n] integer, the tokens that every record is said to have when tokens a second are told: those that
            are read of it, or an estimate.
        row: tokens of a row.
        clusters: draws a record from each cluster; None: a sample is a record.
        notices: what the user should know of the data, a line each.
        identity: everything beside order and row length that decides which tokens a record stands for.
    """

    @property
    def records(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def lengths(self) -> NDArray[np.integer[Any]]: ...  # noqa: D102
    @property
    def counted(self) -> NDArray[np.integer[Any]]: ...  # noqa: D102
    @property
    def row(self) -> RowSize: ...  # noqa: D102
    @property
    def clusters(self) -> Clusters | None: ...  # noqa: D102
    @property
    def notices(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def identity(self) -> dict[str, Any]: ...  # noqa: D102

    def build(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Tokens:
        """Make samples [k] into tokens; what comes out for one depends on its epoch and record alone.

        Of a record that cannot be used nothing may be left: a sequence of length 0 stands for it, in `inputs` and in
        `source`.
        """


class KindOfSamples(Protocol):
    """What opens the splits of a kind of data: most often the class of its samples."""

    def open(self, config: Any, vocabulary: Any, name: SplitName) -> Samples:
        """Open a split of the data that a model's configuration names.

        Raises:
            UserError: for data that is missing, cannot be read, or is not what the model needs.
        """

    def reference_losses(self, train: Any, val: Any, batches: Iterable[PackedBatch]) -> dict[str, float]:
        """Losses to hold a run's own against, in nats per asked token.

        Args:
            train: the samples that are trained on.
            val: those that are validated with.
            batches: the same as tokens.
        """


def end_to_end(parts: Iterable[NDArray[np.integer[Any]]], dtype: type[np.integer[Any]]) -> Sequences:
    """Put sequences end to end."""
    sequences = list(parts)
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return Sequences(np.concatenate([np.zeros(0, dtype), *sequences]).astype(dtype, copy=False), lengths)
