# SPDX-License-Identifier: Apache-2.0
"""Several corpora as one: which sample of which corpus a record is, by arithmetic instead of a table."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError

_GOLDEN = 0.6180339887498949  # golden ratio - 1: steps of this share of a circle spread evenly over it


@dataclass(frozen=True)
class Blend:
    """An epoch has as many records as all corpora have samples, and of each corpus its share of them.

    Without weights that is every sample once. With weights, a corpus goes on in every epoch where it stood: a small
    one is gone through several times in one, a large one takes several.

    Attributes:
        sizes: samples of each corpus, at least 1.
        weights: share of each, of any sum; None: by size.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Records of each corpus in an epoch: its share rounded down or up, by the largest remainders.

        Raises:
            UserError: when a corpus gets none.
        """
        if self.weights is None:
            return self.sizes
        shares = [len(self) * weight / sum(self.weights) for weight in self.weights]
        quotas = [int(share) for share in shares]
        left = sorted(range(len(shares)), key=lambda corpus: quotas[corpus] - shares[corpus])
        for corpus in left[: len(self) - sum(quotas)]:
            quotas[corpus] += 1
        if 0 in quotas:
            corpus = quotas.index(0)
            raise UserError(
                f"weight {self.weights[corpus]} of model.data.data_prefix is less than one of {len(self):,} samples: "
                "raise it, or leave the corpus out"
            )
        return tuple(quotas)

    def place(
        self, epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Say of each record [k] of each epoch [k] its corpus, the pass through it, and the sample in that pass.

        Corpora are dealt evenly: any stretch of records holds the share of each, but for a few.
        """
        if len(self.sizes) == 1:
            return np.zeros_like(records), epochs, records
        spread = records * self._strides[0] % len(self)
        bounds = np.cumsum((0, *self.quotas))
        corpora = np.searchsorted(bounds, spread, side="right") - 1
        drawn = epochs * np.array(self.quotas)[corpora] + spread - bounds[corpora]
        sizes = np.array(self.sizes)[corpora]
        passes, numbers = np.divmod(drawn, sizes)
        # what an epoch takes of a corpus comes from all of it, not from its beginning
        return corpora, passes, numbers * np.array(self._strides[1:])[corpora] % sizes

    @cached_property
    def _strides(self) -> list[int]:
        """Of records, and of the samples of each corpus."""
        return [_stride(size) for size in (len(self), *self.sizes)]


def _stride(size: int) -> int:
    """A step near the golden section of a circle of `size` places that comes to all of them."""
    step = max(1, round(size * _GOLDEN))
    while gcd(step, size) > 1:
        step += 1
    return step
