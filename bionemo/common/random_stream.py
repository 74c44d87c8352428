# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers for data loading.

A number depends on the seed, the epoch, the record and the purpose, never on numbers drawn before. Order, crops and
masks are therefore the same for any number of ranks and workers, and resuming needs no generator state. The generator
is SplitMix64 (Steele, Lea and Flood 2014) with a hashed key: number i of key k is mix(k + (i + 1) * GOLDEN).
"""

import functools
import zlib

import numpy as np
from numpy.typing import NDArray

RandomBits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_ROUNDS = 6  # per permutation; with three, equal input differences persist a sixth too often
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix(bits: RandomBits) -> RandomBits:
    """Apply a bijection to 64-bit integers, in place (Stafford's variant 13 of the MurmurHash3 finaliser)."""
    scratch = bits >> _SHIFTS[0]
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS[1:], strict=True):
        bits ^= scratch
        bits *= multiplier
        np.right_shift(bits, shift, out=scratch)
    bits ^= scratch
    return bits


@functools.lru_cache(maxsize=64)
def purpose_key(seed: int, purpose: str) -> int:
    """Return the key of a purpose, such as "mask" or "crop", for one seed."""
    bits = np.array([seed % 2**64], np.uint64)
    bits += np.array([zlib.crc32(purpose.encode())], np.uint64) * _GOLDEN
    return int(mix(bits)[0])


def sample_keys(key: int, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> RandomBits:
    """Return the key of each (epoch, record) for the key of a purpose, uint64 [k]."""
    bits = mix(np.uint64(key) + epochs.astype(np.uint64) * _GOLDEN)
    bits += records.astype(np.uint64) * _GOLDEN
    return mix(bits)


def draw(keys: RandomBits, counter: int = 0) -> RandomBits:
    """Return random number `counter` of each key, uint64 [k]."""
    return mix(keys + np.uint64((counter + 1) * int(_GOLDEN) % 2**64))


def draw_at(key: int, counters: NDArray[np.int64]) -> RandomBits:
    """Return the random numbers of one key at the given counters, which may be negative and of any shape."""
    bits = counters.astype(np.uint64)
    bits += np.uint64(1)
    bits *= _GOLDEN
    bits += np.uint64(key)
    return mix(bits)


def draw_runs(keys: RandomBits, lengths: NDArray[np.integer]) -> RandomBits:
    """Return random numbers 0 to length - 1 of each key [k], concatenated: uint64 [sum of lengths]."""
    total = int(lengths.sum())
    ramp = np.arange(1, total + 1, dtype=np.uint64)  # counters of all keys; `keys - starts` restarts each key at 1
    ramp *= _GOLDEN
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    ramp += np.repeat(keys - starts * _GOLDEN, lengths)
    return mix(ramp)


def integers_below(bits: RandomBits, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert random bits to integers in [0, bound): upper half of a 32 x 32 bit product (bias < bound / 2^32)."""
    scaled = (bits >> np.uint64(32)) * bounds.astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)


def uniform(bits: RandomBits) -> NDArray[np.float32]:
    """Convert random bits to numbers in [0, 1), multiples of 2^-24."""
    return ((bits >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def normal(bits: RandomBits) -> NDArray[np.float64]:
    """Convert random bits [k] to standard normal numbers [2 k] (Box and Muller 1958)."""
    radius = np.sqrt(-2 * np.log(((bits >> np.uint64(32)) + np.uint64(1)) * 2.0**-32))
    angle = (bits & np.uint64(2**32 - 1)) * (2 * np.pi * 2.0**-32)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(-1)


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return the images of indices under a random permutation of range(size), without a table.

    Adding, multiplying by an odd number and xoring the upper half onto the lower are bijections on the fewest bits
    that hold `size`. Results outside the range are permuted again until they fall inside ("cycle walking", Black and
    Rogaway 2002); each pass leaves less than half of them outside.
    """
    width = max(1, (size - 1).bit_length())
    low, half = np.uint64((1 << width) - 1), np.uint64((width + 1) // 2)
    bits = draw_runs(np.array([key], np.uint64), np.array([2 * _ROUNDS]))
    result = indices.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        walked = result[pending]
        for addend, factor in bits.reshape(_ROUNDS, 2):
            walked += addend
            walked *= factor | np.uint64(1)
            walked &= low
            walked ^= walked >> half
        result[pending] = walked
        pending = pending[walked >= size]
    return result.astype(np.int64)
