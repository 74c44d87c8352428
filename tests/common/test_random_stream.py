# SPDX-License-Identifier: Apache-2.0
"""The generator is the published one, its words look random from every side, and permutations are permutations."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from bionemo.common.random_stream import below, draw, draw_runs, normal, permute, purpose_key, sample_keys, uniform

WORD = 2**64
CHI_255 = (170, 355)  # what chi-square with 255 degrees of freedom leaves with a chance of about 1 in 30,000


def splitmix64(state: int, number: int) -> list[int]:
    """As published: Steele, Lea and Flood 2014, figure 17, with Stafford's constants of java.util.SplittableRandom."""
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


def test_words_are_those_that_others_publish_for_seed_1234567() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423,
                 4593380528125082431, 16408922859458223821]  # fmt: skip
    assert splitmix64(1234567, 5) == published
    assert draw_runs(keys(1234567), np.array([5])).tolist() == published


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, WORD - 1), st.integers(0, 40)), min_size=1, max_size=8))
def test_runs_are_the_generator_started_at_each_key(runs: list[tuple[int, int]]) -> None:
    expected = [word for key, length in runs for word in splitmix64(key, length)]
    found = draw_runs(keys(*(key for key, _ in runs)), np.array([length for _, length in runs]))
    assert found.dtype == np.uint64
    assert found.tolist() == expected


@settings(deadline=None)
@given(st.integers(0, WORD - 1), st.integers(0, 300))
def test_a_single_draw_is_that_of_the_run(key: int, counter: int) -> None:
    assert draw(keys(key), counter).tolist() == splitmix64(key, counter + 1)[-1:]


def test_drawing_leaves_the_keys_alone() -> None:
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
def test_words_are_uniform_and_neighbours_independent(along: str) -> None:
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


@settings(deadline=None)
@given(st.integers(1, 2**31), st.integers(0, WORD - 1))
def test_below_stays_in_range(bound: int, word: int) -> None:
    assert below(keys(word), np.array([bound]))[0] == (word >> 32) * bound >> 32 < bound


def test_below_reaches_both_ends_and_is_uniform() -> None:
    for bound in (1, 2, 26, 1023, 2**31):
        assert below(keys(0, WORD - 1), np.array([bound, bound])).tolist() == [0, bound - 1]
    words = draw_runs(keys(3), np.array([256 * 200]))
    low, high = CHI_255
    assert low < chi_square(below(words, np.full(len(words), 256)), 256) < high
    assert sorted(Counter(below(words, np.full(len(words), 27)).tolist())) == list(range(27))


PRIMES = (1009, 4099, 10_007, 65_537)
POWERS = tuple(2**k + d for k in (11, 12, 15, 16) for d in (-1, 0, 1))


def test_every_permutation_is_one_to_one() -> None:
    for size in (*range(1, 1001), *PRIMES, *POWERS):
        places = permute(np.arange(size), size, size * 0x123456789ABCDEF % WORD)
        assert places.dtype == np.int64
        assert np.array_equal(np.bincount(places, minlength=size), np.ones(size)), size


@settings(deadline=None)
@given(st.integers(1, 10**15), st.integers(0, WORD - 1), st.lists(st.integers(0, 10**15), max_size=20))
def test_an_index_goes_to_the_same_place_whatever_is_asked_with_it(size: int, key: int, wanted: list[int]) -> None:
    indices = np.unique(np.array(wanted, np.int64) % size)
    places = permute(indices, size, key)
    assert len(set(places.tolist())) == len(indices)
    assert all(0 <= place < size for place in places)
    assert [permute(indices[i : i + 1], size, key)[0] for i in range(len(indices))] == places.tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_permutations_all_come_about_equally_often(size: int) -> None:
    seen = Counter(tuple(permute(np.arange(size), size, purpose_key(seed, "order")).tolist()) for seed in range(2400))
    assert set(seen) == set(permutations(range(size)))
    expected = 2400 / len(seen)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 2.5 * len(seen) + 10


@pytest.mark.parametrize("size", [64, 1000, 1024, 5000])
def test_a_permutation_keeps_nothing_of_the_order(size: int) -> None:
    """One element stays, one pair of neighbours stays neighbours, rank correlation is chance: on average over keys."""
    keyed = np.array([permute(np.arange(size), size, purpose_key(seed, "order")) for seed in range(400)])
    assert abs((keyed == np.arange(size)).sum(axis=1).mean() - 1) < 0.25  # five standard errors
    assert abs((np.diff(keyed) == 1).sum(axis=1).mean() - 1) < 0.25
    assert abs((keyed[1:] == keyed[:-1]).sum(axis=1).mean() - 1) < 0.25  # so keys differ in all the rest
    ramp = np.arange(size) - (size - 1) / 2
    correlation = (keyed - (size - 1) / 2) @ ramp / (ramp @ ramp)
    assert abs((correlation**2).mean() * (size - 1) - 1) < 0.36


def test_words_become_normal_numbers() -> None:
    """Kolmogorov and Smirnov's test; the two numbers of a word have nothing to do with each other."""
    words = draw_runs(np.array([7], np.uint64), np.array([50_000]))
    numbers = normal(words)
    assert numbers.shape == (100_000,)
    assert kstest(numbers, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[::2], numbers[1::2])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[::2] ** 2, numbers[1::2] ** 2)[0, 1]) < 0.02
    edges = normal(np.array([0, WORD - 1], np.uint64))
    assert np.isfinite(edges).all()
    assert np.abs(edges).max() == pytest.approx((64 * np.log(2)) ** 0.5)


def test_words_become_numbers_below_one() -> None:
    words = draw_runs(np.array([9], np.uint64), np.array([50_000]))
    assert kstest(uniform(words), "uniform").pvalue > 1e-3
    assert uniform(np.array([0, WORD - 1], np.uint64)).tolist() == [0.0, 1 - 2.0**-24]
