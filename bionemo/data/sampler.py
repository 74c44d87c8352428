# SPDX-License-Identifier: Apache-2.0
"""Shuffles the records, packs them into rows and groups the rows into global batches.

A row contains the sequences of one or several samples. The shuffled stream of samples is divided into windows, and the
samples of a window are packed together. All results are functions of the seed and the position in the stream, so
resuming needs to pack only one window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import permute, purpose_key
from bionemo.data.clusters import Clusters
from bionemo.data.packing import Groups

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
class SampleOrder:
    """Maps the numbers of samples in the stream to records; each epoch is a different permutation."""

    records: NDArray[np.int64]  # [n] numbers of the records in use; with `clusters`, numbers of clusters
    seed: int  # seed of the permutations
    shuffle: bool = True  # False: every epoch has the order of `records`
    epochs: int | None = None  # number of passes through the records; None: endless
    clusters: Clusters | None = None  # selects a record from each cluster; None: a sample is a record

    def window(self, number: int, size: int) -> SampleIds:
        """Return samples [number * size, (number + 1) * size) of the stream; fewer, or none, at its end."""
        n = len(self.records)
        end = (number + 1) * size if self.epochs is None else min((number + 1) * size, n * self.epochs)
        epochs, index = np.divmod(np.arange(number * size, max(end, number * size)), n)
        if self.shuffle:
            for epoch in np.unique(epochs):
                in_epoch = epochs == epoch
                index[in_epoch] = permute(index[in_epoch], n, purpose_key(self.seed, f"order {epoch}"))
        chosen = self.records[index]
        return epochs, self.clusters.sample(epochs, chosen) if self.clusters else chosen


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Divides the stream of samples into global batches."""

    order: SampleOrder
    lengths: NDArray[np.integer[Any]]  # [n] tokens of each record
    # groups the sequences of a window; `packing.pack` or `packing.pad`
    pack: Callable[[NDArray[np.integer[Any]], int, int], Groups]
    max_length: int  # maximum number of tokens in a row
    global_batch_size: int  # number of rows in a global batch
    window: int  # number of sequences that are packed together
    drop_last: bool = False  # omit an incomplete last batch
    # [n] tokens by which each record increases `consumed_tokens`; None: `lengths`
    token_counts: NDArray[np.integer[Any]] | None = None

    def batches(self, start: DataPosition) -> Iterator[GlobalBatch]:
        """Yield the global batches from a stream position on."""
        batch: list[SampleIds] = []
        position, number, first = start, start.window, start.row
        while window := self._pack_window(number):
            while first < len(window):
                taken = window[first : first + self.global_batch_size - len(batch)]
                batch, first = batch + taken, first + len(taken)
                if len(batch) == self.global_batch_size:
                    position = self._advance(batch, position, number, first)
                    yield GlobalBatch(batch, position)
                    batch = []
            number, first = number + 1, 0
        if batch and not self.drop_last:
            yield GlobalBatch(batch, self._advance(batch, position, number, first))

    def count_rows(self) -> int:
        """Return the number of rows in a finite stream."""
        total, number = 0, 0
        while window := self._pack_window(number):
            total, number = total + len(window), number + 1
        return total

    def _advance(self, batch: list[SampleIds], before: DataPosition, window: int, row: int) -> DataPosition:
        records = np.concatenate([records for _, records in batch])
        counts = self.lengths if self.token_counts is None else self.token_counts
        samples, tokens = len(records), int(counts[records].sum())
        return DataPosition(window, row, before.consumed_samples + samples, before.consumed_tokens + tokens)

    def _pack_window(self, number: int) -> list[SampleIds]:
        epochs, records = self.order.window(number, self.window)
        groups = self.pack(self.lengths[records], self.max_length, purpose_key(self.order.seed, f"rows {number}"))
        if not groups:
            return []
        order = np.concatenate(groups)
        epochs, records = epochs[order], records[order]
        bounds = accumulate(map(len, groups), initial=0)
        return [(epochs[begin:end], records[begin:end]) for begin, end in pairwise(bounds)]
