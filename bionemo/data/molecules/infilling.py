# SPDX-License-Identifier: Apache-2.0
"""BART's text infilling: spans of tokens of random length, each hidden behind a single <MASK> (Lewis et al. 2020)."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bionemo.common.random_stream import Words, draw_runs
from bionemo.data.dataset import Sequences


@dataclass(frozen=True)
class Infilling:
    """How to hide spans.

    Tokens are gone through in order. At each one, with probability `mask_prob`, a <MASK> is put, and it hides k tokens
    from this one on, k from a Poisson distribution of mean `span_lambda` and at most to the end of the sequence; one
    goes on behind them. With k = 0 the <MASK> stands before its token, which stays. (In BioNeMo v1 such a token was
    then masked all the same.)
    """

    mask_id: int
    mask_prob: float
    span_lambda: float

    def __call__(self, sequences: Sequences, keys: Words) -> Sequences:
        """Hide spans, by a random key of each sequence [N]."""
        ids, lengths = sequences.ids, sequences.lengths
        words = draw_runs(keys, lengths)  # one a token: whether a span begins there, and if so, how long it is
        begins = np.flatnonzero(words < self._bounds[-1])
        spans = self._bounds.searchsorted(words[begins], side="right")
        ends = lengths.cumsum()
        stops = np.minimum(begins + spans, ends[ends.searchsorted(begins, side="right")])

        taken, free = [], 0
        for number, (begin, stop) in enumerate(zip(begins.tolist(), stops.tolist(), strict=True)):
            if begin >= free:  # a loop over spans, as what one hides decides on the next
                taken.append(number)
                free = stop
        begins, stops = begins[taken], stops[taken]

        hiding = stops > begins
        edges = np.zeros(len(ids) + 1, np.int8)
        edges[begins[hiding] + 1] += 1  # the first hidden token becomes the <MASK>
        edges[stops[hiding]] -= 1
        copies = 1 - edges[:-1].cumsum(dtype=np.int8)
        copies[begins[~hiding]] = 2
        result = np.repeat(ids, copies)
        bounds = np.concatenate([[0], copies.cumsum(dtype=np.int64)])
        result[bounds[begins]] = self.mask_id
        return Sequences(result, bounds[ends] - bounds[ends - lengths])

    @cached_property
    def _bounds(self) -> Words:
        """What a word lies below if a span begins at its token and is no longer than 0, 1, 2 ... tokens; ascending."""
        rate = self.span_lambda
        longest = math.ceil(rate + 12 * math.sqrt(rate)) + 20  # beyond it less than one word in 2^64
        terms = [math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) if rate else k == 0 for k in range(longest)]
        shares = np.minimum(np.cumsum(terms), 1.0) * self.mask_prob
        shares[-1] = self.mask_prob
        return np.array([min(int(share * 2**64), 2**64 - 1) for share in shares.tolist()], np.uint64)
