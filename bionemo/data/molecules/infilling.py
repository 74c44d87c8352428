# SPDX-License-Identifier: Apache-2.0
"""BART's text infilling: replaces token spans of random length by a single <MASK> (Lewis et al. 2020)."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bionemo.common.random_stream import RandomBits, draw_runs
from bionemo.data.dataset import TokenSequences


@dataclass(frozen=True)
class TextInfilling:
    """Masks spans.

    Tokens are visited in order. With probability `mask_prob`, the next k tokens are replaced by one <MASK>, where k is
    Poisson distributed with mean `span_lambda` and limited to the end of the sequence; the visit continues after the
    span. With k = 0 the <MASK> is inserted before the token, which is kept. (BioNeMo v1 masked it nevertheless.)
    """

    mask_id: int
    mask_prob: float
    span_lambda: float

    def __call__(self, sequences: TokenSequences, keys: RandomBits) -> TokenSequences:
        """Mask spans, with a random key for each sequence [N]."""
        ids, lengths = sequences.ids, sequences.lengths
        bits = draw_runs(keys, lengths)  # decide at which tokens spans begin, and how long they are
        begins = np.flatnonzero(bits < self._bounds[-1])
        spans = self._bounds.searchsorted(bits[begins], side="right")
        ends = lengths.cumsum()
        stops = np.minimum(begins + spans, ends[ends.searchsorted(begins, side="right")])

        selected, free = [], 0
        for number, (begin, stop) in enumerate(zip(begins.tolist(), stops.tolist(), strict=True)):
            if begin >= free:  # a loop, because each span decides which of the following ones exist
                selected.append(number)
                free = stop
        begins, stops = begins[selected], stops[selected]

        is_nonempty = stops > begins
        edges = np.zeros(len(ids) + 1, np.int8)
        edges[begins[is_nonempty] + 1] += 1  # the first token of the span becomes <MASK>
        edges[stops[is_nonempty]] -= 1
        copies = 1 - edges[:-1].cumsum(dtype=np.int8)
        copies[begins[~is_nonempty]] = 2
        result = np.repeat(ids, copies)
        bounds = np.concatenate([[0], copies.cumsum(dtype=np.int64)])
        result[bounds[begins]] = self.mask_id
        return TokenSequences(result, bounds[ends] - bounds[ends - lengths])

    @cached_property
    def _bounds(self) -> RandomBits:
        """Upper bounds, ascending, of the bits of a token at which a span of at most 0, 1, 2 ... tokens begins."""
        rate = self.span_lambda
        count = math.ceil(rate + 12 * math.sqrt(rate)) + 20  # the probability of longer spans is below 2^-64
        terms = [math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) if rate else k == 0 for k in range(count)]
        shares = np.minimum(np.cumsum(terms), 1.0) * self.mask_prob
        shares[-1] = self.mask_prob
        return np.array([min(int(share * 2**64), 2**64 - 1) for share in shares.tolist()], np.uint64)
