# SPDX-License-Identifier: Apache-2.0
"""Shuffles the records, packs them into rows and groups the rows into global batches.

A row contains the sequences of one or several samples. The shuffled stream of samples is divided into packing windows,
and the samples of a window are packed together. All results are functions of the seed and the position in the stream,
so resuming needs to pack only one window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import permute, purpose_key
from bionemo.data.clusters import Clusters
from bionemo.data.packing import PackedRows

SampleIds = tuple[NDArray[np.int64], NDArray[np.int64]]  # epochs [k] and records [k] of some samples


@dataclass(frozen=True)
class DataPosition:
    """Position in the stream of samples at which the next global batch starts, as saved in checkpoints."""

    window: int = 0  # number of the packing window
    row: int = 0  # number of rows of the window that were used
    consumed_samples: int = 0  # samples used so far
    consumed_tokens: int = 0  # tokens used so far


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of each row of one step, for all ranks, and the stream position after them."""

    rows: list[SampleIds]
    next_position: DataPosition


@dataclass(frozen=True)
class SampleStream:
    """Stream of samples: maps positions in it to records; each epoch is a different permutation of the records."""

    records: NDArray[np.int64]  # [n] numbers of the records in use; with `clusters`, numbers of clusters
    seed: int  # seed of the permutations
    shuffle: bool = True  # False: every epoch has the order of `records`
    epochs: int | None = None  # number of passes through the records; None: endless
    clusters: Clusters | None = None  # selects a record from each cluster; None: a sample is a record

    def read_window(self, window: int, size: int) -> SampleIds:
        """Return samples [window * size, (window + 1) * size); fewer, or none, at the end of the stream."""
        n = len(self.records)
        start, end = window * size, (window + 1) * size
        end = end if self.epochs is None else max(start, min(end, n * self.epochs))
        epochs, index = np.divmod(np.arange(start, end), n)
        if self.shuffle:
            for epoch in np.unique(epochs):
                in_epoch = epochs == epoch
                index[in_epoch] = permute(index[in_epoch], n, purpose_key(self.seed, f"order {epoch}"))
        chosen = self.records[index]
        return epochs, self.clusters.sample(epochs, chosen) if self.clusters else chosen


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Divides the stream of samples into global batches."""

    stream: SampleStream
    lengths: NDArray[np.integer[Any]]  # [n] tokens of each record
    # assigns the sequences of a window to rows; `packing.pack` or `packing.pad`
    pack: Callable[[NDArray[np.integer[Any]], int, int], PackedRows]
    max_length: int  # maximum number of tokens in a row
    global_batch_size: int  # number of rows in a global batch
    packing_window: int  # number of sequences that are packed together
    drop_last: bool = False  # omit an incomplete last batch
    # [n] tokens by which each record increases `consumed_tokens`; None: `lengths`
    token_counts: NDArray[np.integer[Any]] | None = None

    def batches(self, start: DataPosition) -> Iterator[GlobalBatch]:
        """Yield the global batches from a stream position on."""
        batch: list[SampleIds] = []
        position, window, row = start, start.window, start.row
        while packed_rows := self._pack_window(window):
            while row < len(packed_rows):
                taken = packed_rows[row : row + self.global_batch_size - len(batch)]
                batch, row = batch + taken, row + len(taken)
                if len(batch) == self.global_batch_size:
                    position = self._advance(batch, position, window, row)
                    yield GlobalBatch(batch, position)
                    batch = []
            window, row = window + 1, 0
        if batch and not self.drop_last:
            yield GlobalBatch(batch, self._advance(batch, position, window, row))

    def count_rows(self) -> int:
        """Return the number of rows in a finite stream."""
        return sum(map(len, takewhile(len, map(self._pack_window, count()))))

    def _advance(self, batch: list[SampleIds], before: DataPosition, window: int, row: int) -> DataPosition:
        records = np.concatenate([records for _, records in batch])
        counts = self.lengths if self.token_counts is None else self.token_counts
        tokens = before.consumed_tokens + int(counts[records].sum())
        return DataPosition(window, row, before.consumed_samples + len(records), tokens)

    def _pack_window(self, window: int) -> list[SampleIds]:
        epochs, records = self.stream.read_window(window, self.packing_window)
        rows = self.pack(self.lengths[records], self.max_length, purpose_key(self.stream.seed, f"rows {window}"))
        if not rows:
            return []
        permutation = np.concatenate(rows)
        epochs, records = epochs[permutation], records[permutation]
        bounds = accumulate(map(len, rows), initial=0)
        return [(epochs[begin:end], records[begin:end]) for begin, end in pairwise(bounds)]
