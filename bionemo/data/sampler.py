# SPDX-License-Identifier: Apache-2.0
"""The order of samples: an endless, shuffled stream cut into windows, each planned into rows, rows dealt out in steps.

Everything is a function of (seed, position). The position is all the state there is: resuming at step 1,000,000 plans
one window, whatever came before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import permute, purpose_key
from bionemo.data.clusters import Clusters
from bionemo.data.packing import Rows

Row = tuple[NDArray[np.int64], NDArray[np.int64]]  # epochs [k] and records [k]


@dataclass(frozen=True)
class Position:
    """Where the next step begins, and how much was consumed on the way there."""

    window: int = 0
    row: int = 0  # in the window
    consumed_samples: int = 0
    consumed_tokens: int = 0


@dataclass(frozen=True)
class Step:
    """One global batch, before it is dealt to ranks: rows of (epoch, record) pairs."""

    rows: list[Row]
    after: Position


@dataclass(frozen=True)
class SampleOrder:
    """Which record is sample s of the stream: each epoch is a permutation of its own.

    Attributes:
        records: [n] the records taking part, by their number in the source; with clusters, the clusters.
        seed: of the shuffle.
        shuffle: False gives every epoch in the order of the source.
        epochs: how often the records are gone through, None for ever.
        clusters: draws a record from each cluster; None: a sample is a record.
    """

    records: NDArray[np.int64]
    seed: int
    shuffle: bool = True
    epochs: int | None = None
    clusters: Clusters | None = None

    def window(self, number: int, size: int) -> Row:
        """Samples [number * size, (number + 1) * size) of the stream; fewer, or none, where it ends."""
        n = len(self.records)
        end = (number + 1) * size if self.epochs is None else min((number + 1) * size, n * self.epochs)
        stream = np.arange(number * size, max(end, number * size))
        epochs, index = np.divmod(stream, n)
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                index[here] = permute(index[here], n, purpose_key(self.seed, f"order {epoch}"))
        chosen = self.records[index]
        return epochs, self.clusters.sample(epochs, chosen) if self.clusters else chosen


@dataclass(frozen=True)
class StepSampler:
    """Cuts the stream into steps of `rows_per_step` rows, from any position on.

    Attributes:
        order: the stream of samples.
        lengths: [records of the source] tokens of each record as it will be packed.
        plan: `packing.pack` or `packing.pad`.
        capacity: tokens of a row.
        rows_per_step: the global batch size.
        window: sequences planned together.
        drop_last: leave out a final step that is not full.
        counted: [records of the source] tokens that each record counts for; None: as many as are packed.
    """

    order: SampleOrder
    lengths: NDArray[np.integer[Any]]
    plan: Callable[[NDArray[np.integer[Any]], int, int], Rows]
    capacity: int
    rows_per_step: int
    window: int
    drop_last: bool = False
    counted: NDArray[np.integer[Any]] | None = None

    def steps(self, start: Position) -> Iterator[Step]:
        """Yield the steps from `start` on."""
        rows: list[Row] = []
        at, number, first = start, start.window, start.row
        while window := self._rows(number):
            while first < len(window):
                taken = window[first : first + self.rows_per_step - len(rows)]
                rows, first = rows + taken, first + len(taken)
                if len(rows) == self.rows_per_step:
                    at = self._behind(rows, at, number, first)
                    yield Step(rows, at)
                    rows = []
            number, first = number + 1, 0
        if rows and not self.drop_last:
            yield Step(rows, self._behind(rows, at, number, first))

    def count_rows(self) -> int:
        """Rows until a finite stream ends."""
        rows, number = 0, 0
        while window := self._rows(number):
            rows, number = rows + len(window), number + 1
        return rows

    def count_steps(self) -> int:
        """Steps until a finite stream ends."""
        rows = self.count_rows()
        return rows // self.rows_per_step if self.drop_last else -(-rows // self.rows_per_step)

    def _behind(self, rows: list[Row], before: Position, window: int, row: int) -> Position:
        """Where the data stands when these rows are consumed."""
        records = np.concatenate([records for _, records in rows])
        counted = self.lengths if self.counted is None else self.counted
        samples, tokens = len(records), int(counted[records].sum())
        return Position(window, row, before.consumed_samples + samples, before.consumed_tokens + tokens)

    def _rows(self, number: int) -> list[Row]:
        """Plan a window."""
        epochs, records = self.order.window(number, self.window)
        plan = self.plan(self.lengths[records], self.capacity, purpose_key(self.order.seed, f"rows {number}"))
        if not plan:
            return []
        order = np.concatenate(plan)
        epochs, records = epochs[order], records[order]
        bounds = accumulate(map(len, plan), initial=0)
        return [(epochs[begin:end], records[begin:end]) for begin, end in pairwise(bounds)]
