# SPDX-License-Identifier: Apache-2.0
"""Mixtures of data sets: the sources of a split, and the stream that draws from them in proportion to weights.

The source of a draw is a function of the position in the stream, so the stream depends neither on ranks nor on
workers, and resuming needs no state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bionemo.data.sampler import SampleIds, SampleStream

PERIOD = 10_000  # draws after which the order of the sources repeats; shares are multiples of 1 / PERIOD
Segment = tuple[int, dict[str, int]]  # position in the stream, and draws of each source in a period from there on


@dataclass(frozen=True)
class Mixture:
    """The sources of a split, in alphabetical order."""

    records: dict[str, NDArray[np.int64]]  # numbers of the records in use of each source
    quotas: dict[str, int]  # draws of each source in a period


@dataclass(frozen=True, kw_only=True)
class MixtureStream(SampleStream):
    """Stream of samples of several sources. An epoch has as many samples as all sources have records in use.

    Each source has a stream of its own, in which every record is used once before one is used again. The epoch of a
    sample is the number of earlier passes through its source.
    """

    sources: Mapping[str, NDArray[np.int64]]  # numbers of the records in use of each source
    segments: Sequence[Segment]  # ascending; the first one begins at 0

    def read(self, start: int, end: int) -> SampleIds:
        """Return samples [start, end); fewer, or none, at the end of the stream."""
        end = self.limit(end)
        epochs, records = np.empty((2, max(end - start, 0)), np.int64)
        before = np.zeros(len(self.sources), np.int64)  # draws of each source before the segment
        for (begin, quotas), stop in zip(
            self.segments, [*(first for first, _ in self.segments[1:]), end], strict=True
        ):
            order = schedule(tuple(quotas[name] for name in self.sources))
            first, last = max(start, begin), min(end, stop)
            chosen = order[np.arange(first - begin, last - begin) % PERIOD]
            drawn = before + _count(order, first - begin)
            for number, (name, numbers) in enumerate(self.sources.items()):
                here = np.flatnonzero(chosen == number)
                stream = SampleStream(numbers, self.seed, self.shuffle, purpose=f"order of {name}")
                samples = stream.read(int(drawn[number]), int(drawn[number]) + len(here))
                epochs[here + first - start], records[here + first - start] = samples
            before += _count(order, stop - begin)
        return epochs, records


def round_shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the draws of each source in a period: shares by the largest remainder method, but at least one each."""
    shares = {name: PERIOD * (weight / sum(weights.values())) for name, weight in weights.items()}
    quotas = {name: max(1, int(share)) for name, share in shares.items()}
    while missing := PERIOD - sum(quotas.values()):
        step = 1 if missing > 0 else -1
        candidates = [name for name in quotas if quotas[name] + step]
        quotas[max(candidates, key=lambda name: step * (shares[name] - quotas[name]))] += step
    return quotas


@lru_cache(maxsize=16)
def schedule(quotas: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the number of the source of each draw in a period, int64 [10,000].

    After any number of draws, the count of each source differs from its share by less than one (Tijdeman 1980, "The
    chairman assignment problem", Discrete Mathematics 32). With k sources and D = 2k - 2, a source may be drawn when
    its share exceeds its count by 1 / D, and the one whose excess reaches 1 - 1 / D first is drawn.
    """
    quota, bound = np.array(quotas), max(2 * len(quotas) - 2, 1)
    counts, order = np.zeros_like(quota), np.empty(PERIOD, np.int64)
    for draw in range(PERIOD):
        excess = bound * ((draw + 1) * quota - PERIOD * counts)  # times D x PERIOD
        order[draw] = np.where(excess >= PERIOD, ((bound - 1) * PERIOD - excess) / quota, np.inf).argmin()
        counts[order[draw]] += 1
    return order


def change_shares(segments: Sequence[Segment], quotas: dict[str, int], position: int, epoch: int) -> list[Segment]:
    """Return segments that have new quotas from the first epoch on that begins at `position` or later.

    `epoch` is the number of samples of an epoch.
    """
    start = -(-position // epoch) * epoch
    kept = [segment for segment in segments if segment[0] < start]
    return kept if kept and kept[-1][1] == quotas else [*kept, (start, quotas)]


def _count(order: NDArray[np.int64], draws: int) -> NDArray[np.int64]:
    """Return how often each source is among the first draws of a segment, int64 [k]."""
    whole = np.bincount(order)
    return draws // PERIOD * whole + np.bincount(order[: draws % PERIOD], minlength=len(whole))
