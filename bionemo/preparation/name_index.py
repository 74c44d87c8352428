# SPDX-License-Identifier: Apache-2.0
"""Names by their 128-bit digests: which occur twice, and where a name stands, for more names than memory holds.

With 64-bit digests two of 200 million names would share one in a run of a thousand; with 128 bits none ever will.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

_TOGETHER = 8 << 20  # names sorted at a time: about 400 MB
Digests = NDArray[np.uint64]
"""uint64 [n, 2]"""


def digest(names: pa.Array) -> Digests:
    """Take the digest of each name (XXH3, 128 bits)."""
    return np.frombuffer(b"".join(map(xxh3_128_digest, names.to_pylist())), np.uint64).reshape(-1, 2)


def repeated(digests: Sequence[Path], total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the names that occur again, in files of digests that follow one another.

    Returns:
        Number of each name that has occurred before, ascending, and of its first occurrence.
    """
    again, before = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for keys, numbers in _partitions(digests, total):
        if not len(twins := _twins(keys[:, 0])):
            continue
        order = twins[np.lexsort((numbers[twins], keys[twins, 1], keys[twins, 0]))]
        ordered = keys[order]
        same = np.append(False, (ordered[1:] == ordered[:-1]).all(axis=1))
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        again.append(numbers[order][same])
        before.append(numbers[order][first[same]])
    order = np.argsort(np.concatenate(again))
    return np.concatenate(again)[order], np.concatenate(before)[order]


def _twins(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Find the words that are not alone: almost never any, so only a sort is spent on it."""
    ordered = np.sort(words)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return np.flatnonzero(np.isin(words, twice)) if len(twice) else np.zeros(0, np.int64)


class Places:
    """Tells the number of a name from its digest: sorted digests in files, read through memory maps."""

    def __init__(self, directory: Path) -> None:
        def load(name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
            path = directory / name
            return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)

        self._high, self._low = load("high", np.uint64), load("low", np.uint64)
        self._numbers = load("numbers", np.int64)

    @classmethod
    def build(cls, directory: Path, digests: Sequence[Path], total: int) -> "Places":
        """Write the files, from files of digests that follow one another."""
        directory.mkdir()
        names = ("high", "low", "numbers")
        with ExitStack() as stack:
            files = [stack.enter_context((directory / name).open("wb")) for name in names]
            for keys, numbers in _partitions(digests, total):
                order = np.argsort(keys[:, 0], kind="stable")  # of several with one name the first comes first
                for column, file in zip((keys[:, 0], keys[:, 1], numbers), files, strict=True):
                    file.write(column[order].data)
        return cls(directory)

    def find(self, digests: Digests) -> NDArray[np.int64]:
        """Give the number of each name, the first if it has several, or -1: int64 [n]."""
        found = np.full(len(digests), -1)
        if not len(self._high):
            return found
        order = np.argsort(digests[:, 0])  # neighbours are looked up one after the other, which is kind to caches
        wanted = digests[order]
        at = np.searchsorted(self._high, wanted[:, 0])
        pending = np.arange(len(wanted))
        while len(pending := pending[at[pending] < len(self._high)]):
            here = at[pending]
            pending = pending[self._high[here] == wanted[pending, 0]]
            here = at[pending]
            match = self._low[here] == wanted[pending, 1]
            found[order[pending[match]]] = self._numbers[here[match]]
            pending = pending[~match]  # another name with the same first half
            at[pending] += 1
        return found


def _partitions(digests: Sequence[Path], total: int) -> Iterator[tuple[Digests, NDArray[np.int64]]]:
    """Give all digests with their numbers, those with the same first bits together, in the order of these bits."""
    parts = -(-total // _TOGETHER) or 1
    edges = [np.uint64(part * 2**64 // parts) for part in range(parts)]
    for part, low in enumerate(edges):
        keys, numbers, first = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)], 0
        for path in digests:
            words = np.fromfile(path, np.uint64).reshape(-1, 2)
            mine: NDArray[np.int64] | slice = slice(None)
            if parts > 1:
                high = words[:, 0]
                mine = np.flatnonzero((high >= low) & (high < edges[part + 1] if part + 1 < parts else True))
            keys.append(words[mine])
            numbers.append(np.arange(first, first + len(words))[mine])
            first += len(words)
        yield np.concatenate(keys), np.concatenate(numbers)
