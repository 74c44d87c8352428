# SPDX-License-Identifier: Apache-2.0
"""One random stream for everything the data side draws, addressed by counters instead of by history.

A draw depends on (seed, epoch, record) and on what it is for, never on the draws before it. So order, crops and masks
are the same for any number of ranks and workers, and resuming needs no generator state. The generator is SplitMix64
(Steele, Lea and Flood 2014) started at a hashed key: draw i of key k is mix(k + (i + 1) * GOLDEN).
"""

import functools
import zlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: counters end up far apart
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_ROUNDS = 6  # of a permutation: with three, equal steps in the source stay equal steps a sixth too often
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix(words: Words) -> Words:
    """Scramble 64-bit words one to one, in place (Stafford's variant 13 of the MurmurHash3 finaliser)."""
    scratch = words >> _SHIFTS[0]
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS[1:], strict=True):
        words ^= scratch
        words *= multiplier
        np.right_shift(words, shift, out=scratch)
    words ^= scratch
    return words


@functools.lru_cache(maxsize=64)
def purpose_key(seed: int, purpose: str) -> int:
    """Key of everything drawn for one purpose ("mask", "crop", ...) under one seed."""
    words = np.array([seed % 2**64], np.uint64)
    words += np.array([zlib.crc32(purpose.encode())], np.uint64) * _GOLDEN
    return int(mix(words)[0])


def sample_keys(key: int, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Words:
    """Key of each (epoch, record) under a purpose's key, uint64 [k]."""
    words = mix(np.uint64(key) + epochs.astype(np.uint64) * _GOLDEN)
    words += records.astype(np.uint64) * _GOLDEN
    return mix(words)


def draw(keys: Words, counter: int = 0) -> Words:
    """Draw number `counter` of each key: one uniform 64-bit word, uint64 [k]."""
    return mix(keys + np.uint64((counter + 1) * int(_GOLDEN) % 2**64))


def draw_at(key: int, counters: NDArray[np.int64]) -> Words:
    """Draws of one key by their numbers, of any shape; a negative one is a draw too."""
    words = counters.astype(np.uint64)
    words += np.uint64(1)
    words *= _GOLDEN
    words += np.uint64(key)
    return mix(words)


def draw_runs(keys: Words, lengths: NDArray[np.integer]) -> Words:
    """Draws 0 to length - 1 of each key [k], end to end: uint64 [sum of lengths]."""
    total = int(lengths.sum())
    ramp = np.arange(1, total + 1, dtype=np.uint64)  # for all runs: each key is set back by where its run starts
    ramp *= _GOLDEN
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    ramp += np.repeat(keys - starts * _GOLDEN, lengths)
    return mix(ramp)


def below(words: Words, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn words into integers in [0, bound), by the upper half of a 32 x 32 bit product (bias below bound / 2^32)."""
    scaled = (words >> np.uint64(32)) * bounds.astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)


def uniform(words: Words) -> NDArray[np.float32]:
    """Turn words into numbers in [0, 1), multiples of 2^-24."""
    return ((words >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def normal(words: Words) -> NDArray[np.float64]:
    """Turn words [k] into standard normal numbers [2 k], two of the halves of each (Box and Muller 1958)."""
    radius = np.sqrt(-2 * np.log(((words >> np.uint64(32)) + np.uint64(1)) * 2.0**-32))
    angle = (words & np.uint64(2**32 - 1)) * (2 * np.pi * 2.0**-32)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(-1)


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a random permutation of range(size) puts each index: no table, so any size at any position costs the same.

    On the fewest bits that hold `size`, to add, to multiply by an odd number and to xor the upper half onto the lower
    are one to one each. Results outside the range are walked again until they fall inside (Black and Rogaway 2002,
    "cycle walking"; less than half of them each time).
    """
    bits = max(1, (size - 1).bit_length())
    low, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    words = draw_runs(np.array([key], np.uint64), np.array([2 * _ROUNDS]))
    result = indices.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        walked = result[pending]
        for addend, factor in words.reshape(_ROUNDS, 2):
            walked += addend
            walked *= factor | np.uint64(1)
            walked &= low
            walked ^= walked >> half
        result[pending] = walked
        pending = pending[walked >= size]
    return result.astype(np.int64)
