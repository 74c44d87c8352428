# SPDX-License-Identifier: Apache-2.0
"""Shuffles the records, packs them into rows and groups the rows into global batches.

A row contains the sequences of one or several samples. The shuffled stream of samples is divided into packing windows,
and the samples of a window are packed together. All results are functions of the seed and the position in the stream,
so resuming needs to pack only one window. The end of a window is part of the position: a window at the end of a
finite stream has fewer samples, and the next one begins there if the run continues with more epochs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import permute, purpose_key
from bionemo.data.clusters import Clusters

SampleIds = tuple[NDArray[np.int64], NDArray[np.int64]]  # epochs [k] and records [k] of some samples


@dataclass(frozen=True)
class DataPosition:
    """Position in the stream of samples at which the next global batch starts, as saved in checkpoints."""

    window_start: int = 0  # first sample of the packing window
    row: int = 0  # number of rows of the window that were used
    window_end: int = 0  # sample after the window, if rows of it were used; 0: the sampler decides
    stream_samples: int = 0  # samples used so far; after a change of the stream, as many as the epochs so far have now
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
    purpose: str = "order"  # of the random numbers of the permutations

    def limit(self, position: int) -> int:
        """Return a position in the stream, or its end if that is smaller."""
        return position if self.epochs is None else min(position, len(self.records) * self.epochs)

    def read(self, start: int, end: int) -> SampleIds:
        """Return samples [start, end); fewer, or none, at the end of the stream."""
        n = len(self.records)
        epochs, index = np.divmod(np.arange(start, self.limit(end)), n)
        if self.shuffle:
            for epoch in np.unique(epochs):
                in_epoch = epochs == epoch
                index[in_epoch] = permute(index[in_epoch], n, purpose_key(self.seed, f"{self.purpose} {epoch}"))
        chosen = self.records[index]
        return epochs, self.clusters.sample(epochs, chosen) if self.clusters else chosen


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Divides the stream of samples into global batches."""

    stream: SampleStream
    lengths: NDArray[np.integer[Any]]  # [n] tokens of each record
    # assigns the sequences of a window to rows; `packing.pack` or `packing.pad`
    pack: Callable[[NDArray[np.integer[Any]], int, int], list[NDArray[np.int64]]]
    max_length: int  # maximum number of tokens in a row
    global_batch_size: int  # number of rows in a global batch
    packing_window: int  # number of sequences that are packed together
    drop_last: bool = False  # omit an incomplete last batch
    # [n] tokens by which each record increases `consumed_tokens`; None: `lengths`
    token_counts: NDArray[np.integer[Any]] | None = None

    def batches(self, start: DataPosition) -> Iterator[GlobalBatch]:
        """Yield the global batches from a stream position on."""
        batch: list[SampleIds] = []
        position, row, window = start, start.row, self._window(start.window_start, start.window_end)
        while packed_rows := self._pack(*window):
            while row < len(packed_rows):
                taken = packed_rows[row : row + self.global_batch_size - len(batch)]
                batch, row = batch + taken, row + len(taken)
                if len(batch) == self.global_batch_size:
                    position = self._advance(batch, position, window, row)
                    yield GlobalBatch(batch, position)
                    batch = []
            window, row = self._window(window[1]), 0
        if batch and not self.drop_last:
            yield GlobalBatch(batch, self._advance(batch, position, window, row))

    def count_rows(self) -> int:
        """Return the number of rows in a finite stream."""
        starts = count(0, self.packing_window)
        return sum(map(len, takewhile(len, (self._pack(*self._window(start)) for start in starts))))

    def _window(self, start: int, end: int = 0) -> tuple[int, int]:
        """Return the first sample of the window that begins at `start`, and the one after it."""
        return start, end or self.stream.limit(start + self.packing_window)

    def _advance(
        self, batch: list[SampleIds], before: DataPosition, window: tuple[int, int], row: int
    ) -> DataPosition:
        start, end = window
        records = np.concatenate([records for _, records in batch])
        counts = self.lengths if self.token_counts is None else self.token_counts
        return DataPosition(
            window_start=start,
            row=row,
            window_end=end if row else 0,
            stream_samples=before.stream_samples + len(records),
            consumed_samples=before.consumed_samples + len(records),
            consumed_tokens=before.consumed_tokens + int(counts[records].sum()),
        )

    def _pack(self, start: int, end: int) -> list[SampleIds]:
        epochs, records = self.stream.read(start, end)
        key = purpose_key(self.stream.seed, f"rows {start // self.packing_window}")
        rows = self.pack(self.lengths[records], self.max_length, key)
        if not rows:
            return []
        permutation = np.concatenate(rows)
        epochs, records = epochs[permutation], records[permutation]
        bounds = accumulate(map(len, rows), initial=0)
        return [(epochs[begin:end], records[begin:end]) for begin, end in pairwise(bounds)]
