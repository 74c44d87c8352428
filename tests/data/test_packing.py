# SPDX-License-Identifier: Apache-2.0
"""Packed sequences contain every sequence once, respect the maximum length and are nearly full."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bionemo.data.packing import pack, pad


def uniref_like(number: int, max_length: int, seed: int) -> np.ndarray:
    """Return token counts with the median and spread of UniRef90, truncated to the maximum length."""
    residues = np.random.default_rng(seed).lognormal(np.log(270), 0.75, number).astype(np.int64).clip(16)
    return np.minimum(residues + 2, max_length)


@given(st.integers(2, 300).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(2, size), max_size=80))))
def test_every_sequence_is_packed_once_within_the_maximum_length(case: tuple[int, list[int]]) -> None:
    max_length, sizes = case
    lengths = np.array(sizes, np.int64)
    groups = pack(lengths, max_length, key=len(sizes))
    packed = [sequence for group in groups for sequence in group.tolist()]
    assert sorted(packed) == list(range(len(sizes)))
    fill = [int(lengths[group].sum()) for group in groups]
    assert all(0 < tokens <= max_length for tokens in fill)
    assert len(groups) <= len(sizes)
    # best fit opens a packed sequence only if no other has space, so no two of them fit together
    assert all(a + b > max_length for i, a in enumerate(fill) for b in fill[:i])


@pytest.mark.parametrize("max_length", [512, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_packed_sequences_are_nearly_full_with_uniref_lengths(max_length: int, seed: int) -> None:
    lengths = uniref_like(2048, max_length, seed)
    groups = pack(lengths, max_length, key=1)
    assert lengths.sum() / (len(groups) * max_length) >= 0.97


def test_the_key_shuffles_the_packed_sequences() -> None:
    lengths = uniref_like(2048, 1024, 0)
    one, again, other = ([group.tolist() for group in pack(lengths, 1024, key)] for key in (1, 1, 2))
    assert one == again != other
    assert sorted(one) == sorted(other)
    longest = np.array([lengths[group].max() for group in one])
    first, second = np.split(longest[: len(longest) // 2 * 2], 2)
    assert abs(first.mean() - second.mean()) < 0.1 * longest.mean()  # the longest sequences are not first


def test_padding_packs_each_sequence_alone() -> None:
    assert [group.tolist() for group in pad(np.array([5, 9, 2]), 9, key=3)] == [[0], [1], [2]]
    assert pad(np.zeros(0, np.int64), 9, key=3) == pack(np.zeros(0, np.int64), 9, key=3) == []
