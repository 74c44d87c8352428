# SPDX-License-Identifier: Apache-2.0
"""The generator matches the published one, its output passes statistical tests, and permutations are bijective."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from bionemo.common.random_stream import (
    draw,
    draw_runs,
    integers_below,
    normal,
    permute,
    purpose_key,
    sample_keys,
    uniform,
)

WORD = 2**64
CHI_255 = (170, 355)  # chi-square, 255 degrees of freedom: outside with probability 1 in 30,000


def splitmix64(state: int, number: int) -> list[int]:
    """Reference of Steele, Lea and Flood 2014, figure 17, with Stafford's constants of java.util.SplittableRandom."""
    words = []
    for _ in range(number):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
        words.append(z ^ (z >> 31))
    return words


def chi_square(values: np.ndarray, bins: int) -> float:
    counts = np.bincount(values.astype(np.int64), minlength=bins)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_output_equals_published_values_for_seed_1234567() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423,
                 4593380528125082431, 16408922859458223821]  # fmt: skip
    assert splitmix64(1234567, 5) == published
    assert draw_runs(keys(1234567), np.array([5])).tolist() == published


@given(st.lists(st.tuples(st.integers(0, WORD - 1), st.integers(0, 40)), min_size=1, max_size=8))
def test_each_key_starts_an_independent_generator(runs: list[tuple[int, int]]) -> None:
    expected = [word for key, length in runs for word in splitmix64(key, length)]
    found = draw_runs(keys(*(key for key, _ in runs)), np.array([length for _, length in runs]))
    assert found.dtype == np.uint64
    assert found.tolist() == expected


@given(st.integers(0, WORD - 1), st.integers(0, 300))
def test_a_single_draw_equals_that_of_the_sequence(key: int, counter: int) -> None:
    assert draw(keys(key), counter).tolist() == splitmix64(key, counter + 1)[-1:]


def test_drawing_does_not_modify_the_keys() -> None:
    start = keys(1, 2, 3)
    draw(start, 2), draw_runs(start, np.array([4, 0, 5]))
    assert start.tolist() == [1, 2, 3]


def test_keys_differ_by_seed_purpose_epoch_and_record() -> None:
    purposes = [
        purpose_key(seed, purpose) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for purpose in ("mask", "crop", "")
    ]
    assert len(set(purposes)) == 15
    epochs, records = (grid.ravel() for grid in np.meshgrid(np.arange(40), np.arange(5000)))
    assert len(np.unique(sample_keys(purposes[0], epochs, records))) == 40 * 5000
    alone = sample_keys(purposes[0], epochs[777:778], records[777:778])
    assert alone[0] == sample_keys(purposes[0], epochs, records)[777]


@pytest.mark.parametrize("along", ["a sequence", "records", "epochs"])
def test_draws_are_uniform_and_neighbours_independent(along: str) -> None:
    number = 1 << 16
    zeros, ramp = np.zeros(number, np.int64), np.arange(number)
    words = {
        "a sequence": lambda: draw_runs(keys(purpose_key(5, "mask")), np.array([number])),
        "records": lambda: draw(sample_keys(purpose_key(5, "mask"), zeros, ramp)),
        "epochs": lambda: draw(sample_keys(purpose_key(5, "mask"), ramp, zeros)),
    }[along]()
    low, high = CHI_255
    for shift in (0, 24, 32, 56):
        byte = words >> np.uint64(shift) & np.uint64(255)
        assert low < chi_square(byte, 256) < high
        nibble = byte >> np.uint64(4)
        assert low < chi_square(nibble[:-1] * np.uint64(16) + nibble[1:], 256) < high
    flips = np.unpackbits((words[1:] ^ words[:-1]).view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert abs(flips - 0.5).max() < 5 * 0.5 / np.sqrt(number)


@given(st.integers(1, 2**31), st.integers(0, WORD - 1))
def test_integers_below_a_bound_are_in_range(bound: int, word: int) -> None:
    assert integers_below(keys(word), np.array([bound]))[0] == (word >> 32) * bound >> 32 < bound


def test_integers_below_a_bound_reach_both_ends_and_are_uniform() -> None:
    for bound in (1, 2, 26, 1023, 2**31):
        assert integers_below(keys(0, WORD - 1), np.array([bound, bound])).tolist() == [0, bound - 1]
    words = draw_runs(keys(3), np.array([256 * 200]))
    low, high = CHI_255
    assert low < chi_square(integers_below(words, np.full(len(words), 256)), 256) < high
    assert sorted(Counter(integers_below(words, np.full(len(words), 27)).tolist())) == list(range(27))


PRIMES = (1009, 4099, 10_007, 65_537)
POWERS = tuple(2**k + d for k in (11, 12, 15, 16) for d in (-1, 0, 1))


def test_every_permutation_is_one_to_one() -> None:
    for size in (*range(1, 1001), *PRIMES, *POWERS):
        places = permute(np.arange(size), size, size * 0x123456789ABCDEF % WORD)
        assert places.dtype == np.int64
        assert np.array_equal(np.bincount(places, minlength=size), np.ones(size)), size


@given(st.integers(1, 10**15), st.integers(0, WORD - 1), st.lists(st.integers(0, 10**15), max_size=20))
def test_permuting_an_index_does_not_depend_on_other_indices(size: int, key: int, wanted: list[int]) -> None:
    indices = np.unique(np.array(wanted, np.int64) % size)
    places = permute(indices, size, key)
    assert len(set(places.tolist())) == len(indices)
    assert all(0 <= place < size for place in places)
    assert [permute(indices[i : i + 1], size, key)[0] for i in range(len(indices))] == places.tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_small_permutations_are_equally_frequent(size: int) -> None:
    seen = Counter(tuple(permute(np.arange(size), size, purpose_key(seed, "order")).tolist()) for seed in range(2400))
    assert set(seen) == set(permutations(range(size)))
    expected = 2400 / len(seen)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 2.5 * len(seen) + 10


@pytest.mark.parametrize("size", [64, 1000, 1024, 5000])
def test_permutations_are_independent_of_the_original_order(size: int) -> None:
    """On average one element is fixed, one adjacent pair stays adjacent, and the rank correlation is zero."""
    keyed = np.array([permute(np.arange(size), size, purpose_key(seed, "order")) for seed in range(400)])
    assert abs((keyed == np.arange(size)).sum(axis=1).mean() - 1) < 0.25  # five standard errors
    assert abs((np.diff(keyed) == 1).sum(axis=1).mean() - 1) < 0.25
    assert abs((keyed[1:] == keyed[:-1]).sum(axis=1).mean() - 1) < 0.25  # so keys have different permutations
    ramp = np.arange(size) - (size - 1) / 2
    correlation = (keyed - (size - 1) / 2) @ ramp / (ramp @ ramp)
    assert abs((correlation**2).mean() * (size - 1) - 1) < 0.36


def test_normal_draws() -> None:
    """Kolmogorov-Smirnov test; the two numbers from one draw are independent."""
    words = draw_runs(np.array([7], np.uint64), np.array([50_000]))
    numbers = normal(words)
    assert numbers.shape == (100_000,)
    assert kstest(numbers, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[::2], numbers[1::2])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[::2] ** 2, numbers[1::2] ** 2)[0, 1]) < 0.02
    edges = normal(np.array([0, WORD - 1], np.uint64))
    assert np.isfinite(edges).all()
    assert np.abs(edges).max() == pytest.approx((64 * np.log(2)) ** 0.5)


def test_uniform_draws_below_one() -> None:
    words = draw_runs(np.array([9], np.uint64), np.array([50_000]))
    assert kstest(uniform(words), "uniform").pvalue > 1e-3
    assert uniform(np.array([0, WORD - 1], np.uint64)).tolist() == [0.0, 1 - 2.0**-24]
