# SPDX-License-Identifier: Apache-2.0
"""Blend several corpora by weight. The corpus and sample of each record are computed, not stored in a table."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError

_GOLDEN_RATIO = 0.6180339887498949  # its multiples modulo 1 are spread evenly over [0, 1)


@dataclass(frozen=True)
class Blend:
    """A weighted mixture of corpora.

    The number of records in an epoch is the number of samples in all corpora; each corpus provides its share of them.

    Without weights an epoch contains every sample once. With weights, an epoch continues in each corpus where the
    previous one stopped, so one epoch can be several passes through a small corpus or a part of a large one.
    """

    sizes: tuple[int, ...]  # number of samples of each corpus, at least 1
    weights: tuple[float, ...] | None = None  # share of each corpus, with any sum; None: by size

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def records_per_corpus(self) -> tuple[int, ...]:
        """Records of each corpus in an epoch, rounded by the largest remainder method.

        Raises:
            UserError: if a corpus has no record.
        """
        if self.weights is None:
            return self.sizes
        shares = [len(self) * weight / sum(self.weights) for weight in self.weights]
        counts = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda corpus: counts[corpus] - shares[corpus])
        for corpus in by_remainder[: len(self) - sum(counts)]:
            counts[corpus] += 1
        if 0 in counts:
            corpus = counts.index(0)
            raise UserError(
                f"weight {self.weights[corpus]} of model.data.data_prefix is less than one of {len(self):,} samples: "
                "raise it, or remove the corpus"
            )
        return tuple(counts)

    def locate(
        self, epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return corpus, pass through the corpus, and sample of each record [k] of each epoch [k].

        Corpora are interleaved evenly: any range of records contains about the share of each.
        """
        if len(self.sizes) == 1:
            return np.zeros_like(records), epochs, records
        spread = records * self._strides[0] % len(self)
        bounds = np.cumsum((0, *self.records_per_corpus))
        corpora = np.searchsorted(bounds, spread, side="right") - 1
        numbers = epochs * np.array(self.records_per_corpus)[corpora] + spread - bounds[corpora]
        sizes = np.array(self.sizes)[corpora]
        passes, samples = np.divmod(numbers, sizes)
        # the samples of an epoch are spread over the whole corpus
        return corpora, passes, samples * np.array(self._strides[1:])[corpora] % sizes

    @cached_property
    def _strides(self) -> list[int]:
        """Strides of the records and of the samples of each corpus."""
        return [_stride(size) for size in (len(self), *self.sizes)]


def _stride(size: int) -> int:
    """Return a step near the golden ratio of `size` that is coprime to it and so visits all positions."""
    step = max(1, round(size * _GOLDEN_RATIO))
    while gcd(step, size) > 1:
        step += 1
    return step
