# SPDX-License-Identifier: Apache-2.0
"""Rows hold every sequence once, never more than fits, and hardly any filler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bionemo.data.packing import pack, pad


def uniref_like(number: int, capacity: int, seed: int) -> np.ndarray:
    """Token counts with the median and spread of UniRef90, cut at the capacity."""
    residues = np.random.default_rng(seed).lognormal(np.log(270), 0.75, number).astype(np.int64).clip(16)
    return np.minimum(residues + 2, capacity)


@settings(deadline=None)
@given(st.integers(2, 300).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(2, room), max_size=80))))
def test_every_sequence_is_in_one_row_and_no_row_overflows(case: tuple[int, list[int]]) -> None:
    capacity, sizes = case
    lengths = np.array(sizes, np.int64)
    rows = pack(lengths, capacity, key=len(sizes))
    held = [sequence for row in rows for sequence in row.tolist()]
    assert sorted(held) == list(range(len(sizes)))
    fill = [int(lengths[row].sum()) for row in rows]
    assert all(0 < tokens <= capacity for tokens in fill)
    assert len(rows) <= len(sizes)
    # best fit never opens a row while a sequence fits elsewhere: no two rows could be one
    assert all(a + b > capacity for i, a in enumerate(fill) for b in fill[:i])


@pytest.mark.parametrize("capacity", [512, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_nearly_full_on_lengths_like_those_of_uniref(capacity: int, seed: int) -> None:
    lengths = uniref_like(2048, capacity, seed)
    rows = pack(lengths, capacity, key=1)
    assert lengths.sum() / (len(rows) * capacity) >= 0.97


def test_rows_are_shuffled_by_the_key() -> None:
    lengths = uniref_like(2048, 1024, 0)
    one, again, other = ([row.tolist() for row in pack(lengths, 1024, key)] for key in (1, 1, 2))
    assert one == again != other
    assert sorted(one) == sorted(other)
    longest = np.array([lengths[row].max() for row in one])
    first, second = np.split(longest[: len(longest) // 2 * 2], 2)
    assert abs(first.mean() - second.mean()) < 0.1 * longest.mean()  # the long ones do not come first


def test_padding_gives_a_row_to_each() -> None:
    assert [row.tolist() for row in pad(np.array([5, 9, 2]), 9, key=3)] == [[0], [1], [2]]
    assert pad(np.zeros(0, np.int64), 9, key=3) == pack(np.zeros(0, np.int64), 9, key=3) == []
