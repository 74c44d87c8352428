# SPDX-License-Identifier: Apache-2.0
"""Put rows that come in one order into files in another, in bounded memory: an external shuffle of two linear passes.

The rows of the output are numbered through and cut into buckets of a few ten megabytes. `spill` writes the rows of one
stretch of the input bucket by bucket; `gather` collects a bucket from all spills, orders it in memory, and appends it
to its file. Each byte is written twice and read once, in long runs, whatever the order is.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bionemo.preparation.checksums import OutputFile
from bionemo.preparation.records import binary, offsets, values

_BUCKET = 32 << 20  # bytes


@dataclass(frozen=True)
class Shard:
    """A file of the output.

    Attributes:
        name: its path in the output.
        buckets: which buckets make it.
    """

    name: str
    buckets: range


@dataclass(frozen=True)
class Layout:
    """Where each row of the output belongs.

    Attributes:
        shards: the files, in the order of their rows.
        bounds: int64 [buckets + 1], first row of each bucket.
    """

    shards: tuple[Shard, ...]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, sizes: Sequence[tuple[str, int]], row_bytes: float) -> "Layout":
        """Lay out files of so many rows each, of about so many bytes a row."""
        shards: list[Shard] = []
        bounds = [0]
        for name, rows in sizes:
            pieces = max(1, round(rows * row_bytes / _BUCKET))
            first, begin = len(bounds) - 1, bounds[-1]
            bounds += [begin + rows * (piece + 1) // pieces for piece in range(pieces)]
            shards.append(Shard(name, range(first, first + pieces)))
        return cls(tuple(shards), np.array(bounds, np.int64))


@dataclass(frozen=True)
class Spill:
    """The rows of one stretch of the input, sorted by bucket, in a file: texts, then lengths, then row numbers.

    Attributes:
        path: of the file.
        count: rows in it.
        size: bytes of their texts.
        rows: int64 [buckets + 1], first row of each bucket, counted in the spill.
        places: int64 [buckets + 1], its first byte.
        first: number of the first of these buckets.
    """

    path: Path
    count: int
    size: int
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    first: int = 0

    def targets(self) -> NDArray[np.int64]:
        """Give the row numbers of all of it."""
        return np.fromfile(self.path, np.int64, self.count, offset=self.size + 4 * self.count)

    def only(self, buckets: range) -> "Spill":
        """Forget where all other buckets are: many spills of many buckets are much to send to a worker."""
        here = slice(buckets.start, buckets.stop + 1)
        return replace(self, rows=self.rows[here], places=self.places[here], first=buckets.start)


def spill(path: Path, texts: Sequence[pa.Array], targets: NDArray[np.int64], layout: Layout) -> Spill:
    """Write rows, sorted by bucket.

    Args:
        path: of the file to write.
        texts: the rows, in pieces.
        targets: int64 [n], the number of each in the output.
        layout: says which bucket holds that number.
    """
    buckets = np.searchsorted(layout.bounds, targets, side="right") - 1
    order = np.argsort(buckets, kind="stable")
    text = pa.concat_arrays(texts).take(pa.array(order)) if len(targets) else pa.array([], pa.binary())
    bounds = offsets(text)
    rows = np.searchsorted(buckets[order], np.arange(len(layout.bounds)))
    with path.open("wb", buffering=0) as file:
        for part in (values(text), np.diff(bounds), targets[order]):
            write_all(file.fileno(), part.data)
    return Spill(path, len(targets), int(bounds[-1]), rows, bounds[rows].astype(np.int64))


def gather(path: Path, header: bytes, spills: Sequence[Spill], layout: Layout, shard: Shard) -> OutputFile:
    """Write a file: its header, then its rows in order. Each row begins with a line end, and so does nothing else.

    Raises:
        AssertionError: rows are missing, or there are too many.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in _parts(header, spills, layout, shard):
            write_all(file.fileno(), part)
            digest.update(part)
            size += len(part)
    rows = int(layout.bounds[shard.buckets.stop] - layout.bounds[shard.buckets.start])
    return OutputFile(size, digest.hexdigest(), rows)


def _parts(header: bytes, spills: Sequence[Spill], layout: Layout, shard: Shard) -> Iterator[memoryview]:
    yield memoryview(header)
    for bucket in shard.buckets:
        first, rows = int(layout.bounds[bucket]), int(layout.bounds[bucket + 1] - layout.bounds[bucket])
        pieces = [piece for spilled in spills if len((piece := _Piece.read(spilled, bucket)).targets)]
        targets = np.concatenate([np.zeros(0, np.int64), *(piece.targets for piece in pieces)]) - first
        order = np.full(rows, -1)
        order[targets] = np.arange(len(targets))
        assert len(targets) == rows and (order >= 0).all(), f"{shard.name}: {len(targets)} rows instead of {rows}"
        if rows:
            yield values(pa.concat_arrays([piece.texts for piece in pieces]).take(pa.array(order))).data
    yield memoryview(b"\n")


@dataclass(frozen=True)
class _Piece:
    """The rows of a bucket in one spill."""

    texts: pa.Array
    targets: NDArray[np.int64]

    @classmethod
    def read(cls, spilled: Spill, bucket: int) -> "_Piece":
        at = bucket - spilled.first
        begin, end = spilled.rows[at : at + 2].tolist()
        first, last = spilled.places[at : at + 2].tolist()
        total, text = spilled.count, spilled.size
        with spilled.path.open("rb", buffering=0) as file:

            def read(count: int, place: int) -> bytes:
                data = os.pread(file.fileno(), count, place)
                assert len(data) == count, f"{spilled.path} is cut off"
                return data

            if begin == end:
                return cls(pa.array([], pa.binary()), np.zeros(0, np.int64))
            texts = np.frombuffer(read(last - first, first), np.uint8)
            lengths = np.frombuffer(read(4 * (end - begin), text + 4 * begin), np.int32)
            targets = np.frombuffer(read(8 * (end - begin), text + 4 * total + 8 * begin), np.int64)
        return cls(binary(texts, np.append(0, np.cumsum(lengths))), targets)


def write_all(handle: int, data: memoryview) -> None:
    """Write all bytes, whatever a single call takes."""
    rest = data.cast("B") if data.nbytes else memoryview(b"")
    while rest:
        rest = rest[os.write(handle, rest) :]
