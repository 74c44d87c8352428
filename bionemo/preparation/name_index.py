# SPDX-License-Identifier: Apache-2.0
"""Find duplicate names or sequences and look up names by 128-bit hashes, in bounded memory.

With 64-bit hashes, the probability of a collision among 200 million names is about 0.1 %; with 128 bits it is
negligible.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

_PARTITION_SIZE = 8 << 20  # names that are sorted at a time, which takes about 400 MB
Hashes = NDArray[np.uint64]
"""uint64 [n, 2]"""


def hash_names(names: pa.Array) -> Hashes:
    """Compute the hash of each name or sequence (XXH3, 128 bits)."""
    return np.frombuffer(b"".join(map(xxh3_128_digest, names.to_pylist())), np.uint64).reshape(-1, 2)


def find_duplicates(
    hash_files: Sequence[Path], total: int, excluded: Sequence[int] | NDArray[np.int64] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find names that occur more than once; occurrences with an `excluded` number are ignored.

    The files contain the hashes of `total` names, which are numbered across the files. Returns the number of each
    repeated occurrence in ascending order, and the number of the first occurrence of its name.
    """
    repeated, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for hashes, numbers in _partitions(hash_files, total):
        ordered_halves = np.sort(hashes[:, 0])  # usually all are distinct, and one sort is sufficient
        shared = ordered_halves[1:][ordered_halves[1:] == ordered_halves[:-1]]
        candidates = np.flatnonzero(np.isin(hashes[:, 0], shared))
        candidates = candidates[~np.isin(numbers[candidates], excluded)]
        order = candidates[np.lexsort((numbers[candidates], hashes[candidates, 1], hashes[candidates, 0]))]
        same = np.append(False, (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1))[: len(order)]
        first_index = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        repeated.append(numbers[order][same])
        first.append(numbers[order][first_index[same]])
    order = np.argsort(np.concatenate(repeated))
    return np.concatenate(repeated)[order], np.concatenate(first)[order]


class NameIndex:
    """Map hashes of names to numbers. The sorted hashes are read from a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        self._high, self._low, self._numbers = np.load(path, mmap_mode="r")

    @classmethod
    def build(cls, path: Path, hash_files: Sequence[Path], total: int) -> "NameIndex":
        """Write the file of an index; the other arguments are those of `find_duplicates`."""
        table, begin = np.lib.format.open_memmap(path, "w+", np.uint64, (3, total)), 0
        for hashes, numbers in _partitions(hash_files, total):
            order = np.argsort(hashes[:, 0], kind="stable")  # the first occurrence of a name stays first
            table[:2, begin : begin + len(order)] = hashes[order].T
            table[2, begin : begin + len(order)] = numbers[order]
            begin += len(order)
        table.flush()
        return cls(path)

    def lookup(self, hashes: Hashes) -> NDArray[np.int64]:
        """Return the number of the first occurrence of each name, or -1: int64 [n]."""
        found = np.full(len(hashes), -1)
        order = np.argsort(hashes[:, 0])  # consecutive lookups then access neighbouring memory
        wanted = hashes[order]
        index = np.searchsorted(self._high, wanted[:, 0])
        pending = np.arange(len(wanted))
        while len(pending := pending[index[pending] < len(self._high)]):
            pending = pending[self._high[index[pending]] == wanted[pending, 0]]
            match = self._low[index[pending]] == wanted[pending, 1]
            found[order[pending[match]]] = self._numbers[index[pending[match]]]
            pending = pending[~match]  # another name with the same first half
            index[pending] += 1
        return found


def _partitions(hash_files: Sequence[Path], total: int) -> Iterator[tuple[Hashes, NDArray[np.int64]]]:
    """Yield hashes and their numbers in partitions by the first bits of the hash, in ascending order of these bits."""
    count = -(-total // _PARTITION_SIZE) or 1
    for index in range(count):
        hashes, numbers, first = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)], 0
        for path in hash_files:
            found = np.fromfile(path, np.uint64).reshape(-1, 2)
            selected = np.flatnonzero((found[:, 0] >> 32) * count >> 32 == index)
            hashes.append(found[selected])
            numbers.append(first + selected)
            first += len(found)
        yield np.concatenate(hashes), np.concatenate(numbers)
