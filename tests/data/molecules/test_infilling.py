# SPDX-License-Identifier: Apache-2.0
"""Spans equal those of a token-by-token reference; their frequency and lengths match the options."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare, poisson

from bionemo.common.random_stream import draw_runs, purpose_key, sample_keys
from bionemo.data.dataset import TokenSequences
from bionemo.data.molecules.infilling import TextInfilling

MASK = 4


def packed(lengths: list[int], seed: int = 0) -> tuple[TokenSequences, np.ndarray]:
    """Return tokens that differ from their neighbours and from the mask, and a key for each sequence."""
    ids = 10 + np.arange(sum(lengths)) % 500
    records = np.arange(len(lengths))
    keys = sample_keys(purpose_key(seed, "mask"), np.zeros_like(records), records)
    return TokenSequences(ids.astype(np.uint16), np.array(lengths, np.int64)), keys


def reference(tokens: list[int], words: list[int], prob: float, rate: float) -> list[int]:
    """Reference: mask spans token by token, with scipy's Poisson quantile function for their lengths."""
    masked, at = [], 0
    while at < len(tokens):
        share = words[at] / 2**64
        if share >= prob:
            masked.append(tokens[at])
            at += 1
            continue
        span = int(poisson.ppf(share / prob, rate)) if rate else 0
        masked.append(MASK)
        if span == 0:
            masked.append(tokens[at])
        at += max(span, 1)
    return masked


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.3, 3.0, 40.0]),
    st.integers(0, 1000),
)
def test_spans_equal_the_reference(lengths: list[int], prob: float, rate: float, seed: int) -> None:
    sequences, keys = packed(lengths, seed)
    before = sequences.ids.copy()
    hidden = TextInfilling(MASK, prob, rate)(sequences, keys)
    assert hidden.ids.dtype == np.uint16
    assert hidden.lengths.dtype == np.int64
    assert (sequences.ids == before).all()
    words = np.split(draw_runs(keys, sequences.lengths), sequences.lengths.cumsum())
    parts = np.split(before, sequences.lengths.cumsum())
    expected = [reference(part.tolist(), word.tolist(), prob, rate) for part, word in zip(parts, words, strict=True)][
        :-1
    ]
    assert hidden.lengths.tolist() == [len(part) for part in expected]
    assert hidden.ids.tolist() == [token for part in expected for token in part]


@pytest.mark.parametrize(("prob", "rate"), [(0.1, 3.0), (0.3, 1.0), (0.05, 8.0)])
def test_frequency_and_lengths_of_spans(prob: float, rate: float) -> None:
    number, length = 40_000, 40
    sequences, keys = packed([length] * number)
    hidden = TextInfilling(MASK, prob, rate)(sequences, keys)
    begins = hidden.lengths.cumsum() - hidden.lengths
    first = hidden.ids[begins] == MASK  # a span begins with the first token
    assert binomtest(int(first.sum()), number, prob).pvalue > 1e-4
    sizes = hidden.lengths[first]
    second = hidden.ids[np.minimum(begins[first] + 1, len(hidden.ids) - 1)].astype(np.int64)
    seen = (sizes > 1) & (second != MASK)  # then the next visible token gives the number of masked tokens
    spans = (second - sequences.ids[::length][first])[seen] % 500
    # the token after a span begins no other span; an empty span is followed by its own token
    shares = poisson.pmf(np.arange(length), rate) * np.where(np.arange(length) > 0, 1 - prob, 1)
    counts, enough = np.bincount(spans, minlength=length), shares * len(spans) > 8
    assert chisquare(counts[enough], shares[enough] / shares[enough].sum() * counts[enough].sum()).pvalue > 1e-4
    assert counts[~enough].sum() < 0.02 * len(spans)


def test_later_spans_are_as_frequent_as_first_ones() -> None:
    prob, rate = 0.2, 2.0
    hidden = TextInfilling(MASK, prob, rate)(*packed([4000] * 50))
    masks = int((hidden.ids == MASK).sum())
    passed = 1 - prob + prob * (rate + np.exp(-rate))  # mean number of tokens per step
    assert abs(masks / (200_000 / passed * prob) - 1) < 0.03


def test_masks_do_not_depend_on_other_sequences() -> None:
    infill = TextInfilling(MASK, 0.2, 2.0)
    sequences, keys = packed([30, 0, 7, 55, 1])
    parts = np.split(sequences.ids, sequences.lengths.cumsum())[:-1]
    order = [3, 1, 4, 0, 2]
    mixed = infill(TokenSequences(np.concatenate([parts[i] for i in order]), sequences.lengths[order]), keys[order])
    found = np.split(mixed.ids, mixed.lengths.cumsum())[:-1]
    for place, i in enumerate(order):
        alone = infill(TokenSequences(parts[i], sequences.lengths[i : i + 1]), keys[i : i + 1])
        assert alone.ids.tolist() == found[place].tolist()


def test_probabilities_0_and_1() -> None:
    sequences, keys = packed([20, 5])
    assert TextInfilling(MASK, 0.0, 3.0)(sequences, keys).ids.tolist() == sequences.ids.tolist()
    inserted = TextInfilling(MASK, 1.0, 0.0)(sequences, keys)
    assert inserted.lengths.tolist() == [40, 10]
    assert (inserted.ids[::2] == MASK).all()
    assert (inserted.ids[1::2] == sequences.ids).all()
    empty = TextInfilling(MASK, 0.5, 3.0)(*packed([]))
    assert len(empty.ids) == len(empty.lengths) == 0
