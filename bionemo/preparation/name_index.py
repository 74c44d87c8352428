# SPDX-License-Identifier: Apache-2.0
"""Find duplicate names or sequences and look up names by 128-bit hashes, in bounded memory.

With 64-bit hashes, the probability of a collision among 200 million names is about 0.1 %; with 128 bits it is
negligible.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
        candidates = _find_candidates(hashes[:, 0])
        if not len(candidates := candidates[~np.isin(numbers[candidates], excluded)]):
            continue
        order = candidates[np.lexsort((numbers[candidates], hashes[candidates, 1], hashes[candidates, 0]))]
        ordered = hashes[order]
        same = np.append(False, (ordered[1:] == ordered[:-1]).all(axis=1))
        first_index = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        repeated.append(numbers[order][same])
        first.append(numbers[order][first_index[same]])
    order = np.argsort(np.concatenate(repeated))
    return np.concatenate(repeated)[order], np.concatenate(first)[order]


def _find_candidates(hash_halves: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Find the values that are not unique; usually there are none, and one sort is sufficient."""
    ordered = np.sort(hash_halves)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return np.flatnonzero(np.isin(hash_halves, repeated)) if len(repeated) else np.zeros(0, np.int64)


class NameIndex:
    """Map hashes of names to numbers. The sorted hashes are read from memory-mapped files."""

    def __init__(self, directory: Path) -> None:
        def load(name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
            path = directory / name
            return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)

        self._high, self._low = load("high", np.uint64), load("low", np.uint64)
        self._numbers = load("numbers", np.int64)

    @classmethod
    def build(cls, directory: Path, hash_files: Sequence[Path], total: int) -> "NameIndex":
        """Write the files of an index; the arguments are those of `find_duplicates`."""
        directory.mkdir()
        names = ("high", "low", "numbers")
        with ExitStack() as stack:
            files = [stack.enter_context((directory / name).open("wb")) for name in names]
            for hashes, numbers in _partitions(hash_files, total):
                order = np.argsort(hashes[:, 0], kind="stable")  # the first occurrence of a name stays first
                for column, file in zip((hashes[:, 0], hashes[:, 1], numbers), files, strict=True):
                    file.write(column[order].data)
        return cls(directory)

    def lookup(self, hashes: Hashes) -> NDArray[np.int64]:
        """Return the number of the first occurrence of each name, or -1: int64 [n]."""
        found = np.full(len(hashes), -1)
        if not len(self._high):
            return found
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
    num_partitions = -(-total // _PARTITION_SIZE) or 1
    bounds = [np.uint64(index * 2**64 // num_partitions) for index in range(num_partitions)]
    for index, low in enumerate(bounds):
        hashes, numbers, first = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)], 0
        for path in hash_files:
            found = np.fromfile(path, np.uint64).reshape(-1, 2)
            selected: NDArray[np.int64] | slice = slice(None)
            if num_partitions > 1:
                high = found[:, 0]
                selected = np.flatnonzero(
                    (high >= low) & (high < bounds[index + 1] if index + 1 < num_partitions else True)
                )
            hashes.append(found[selected])
            numbers.append(np.arange(first, first + len(found))[selected])
            first += len(found)
        yield np.concatenate(hashes), np.concatenate(numbers)
