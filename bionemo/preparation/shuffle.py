# SPDX-License-Identifier: Apache-2.0
"""External shuffle: write rows that arrive in one order to files in another order, in bounded memory.

The output rows are numbered consecutively and divided into buckets of about 32 MB. `write_spill` writes the rows of
one chunk of the input to a file, grouped by bucket. `write_shard` reads each bucket from all spill files, sorts it in
memory and appends it to the shard. Each byte is written twice and read once, in long runs, for any order.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bionemo.preparation.checksums import OutputFile, write_with_checksum
from bionemo.preparation.records import binary_array, get_bytes, get_offsets

_BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Shard:
    """An output file."""

    name: str  # path relative to the output
    buckets: range  # indices of the buckets of its rows


@dataclass(frozen=True)
class ShardLayout:
    """Shards and buckets of the output rows."""

    shards: tuple[Shard, ...]  # the shards in the order of their rows
    bounds: NDArray[np.int64]  # [buckets + 1], number of the first row of each bucket

    @classmethod
    def create(cls, sizes: Sequence[tuple[str, int]], row_bytes: float) -> "ShardLayout":
        """Divide shards, given as name and number of rows, into buckets; `row_bytes` is the approximate row size."""
        shards: list[Shard] = []
        bounds = [0]
        for name, rows in sizes:
            num_buckets = max(1, round(rows * row_bytes / _BUCKET_BYTES))
            first, begin = len(bounds) - 1, bounds[-1]
            bounds += [begin + rows * (index + 1) // num_buckets for index in range(num_buckets)]
            shards.append(Shard(name, range(first, first + num_buckets)))
        return cls(tuple(shards), np.array(bounds, np.int64))


@dataclass(frozen=True)
class SpillFile:
    """The rows of one chunk, grouped by bucket.

    The file contains the index of the first row of each bucket and the end, the offset of its text, the row numbers,
    the lengths of the texts, and the texts.
    """

    path: Path
    num_buckets: int  # number of buckets of the output
    num_rows: int  # number of rows in the file
    text_bytes: int  # size of their texts

    def read_row_numbers(self) -> NDArray[np.int64]:
        """Read the row numbers of all buckets, int64 [num_rows]."""
        return np.fromfile(self.path, np.int64, self.num_rows, offset=16 * (self.num_buckets + 1))

    def read_bucket(self, bucket: int) -> tuple[pa.Array, NDArray[np.int64]]:
        """Read the rows of a bucket, binary [n], and their row numbers, int64 [n]."""
        offset_table = 8 * (self.num_buckets + 1)
        row_numbers = 2 * offset_table
        lengths = row_numbers + 8 * self.num_rows
        texts = lengths + 4 * self.num_rows
        with self.path.open("rb", buffering=0) as file:

            def read(dtype: type[np.generic], count: int, offset: int) -> NDArray[Any]:
                data = os.pread(file.fileno(), count * np.dtype(dtype).itemsize, offset)
                return np.frombuffer(data, dtype, count)  # fails if the file is truncated

            begin, end = read(np.int64, 2, 8 * bucket).tolist()
            if begin == end:
                return pa.array([], pa.binary()), np.zeros(0, np.int64)
            first, last = read(np.int64, 2, offset_table + 8 * bucket).tolist()
            bounds = np.append(0, np.cumsum(read(np.int32, end - begin, lengths + 4 * begin)))
            text = binary_array(read(np.uint8, last - first, texts + first), bounds)
            return text, read(np.int64, end - begin, row_numbers + 8 * begin)


def write_spill(
    path: Path, texts: Sequence[pa.Array], row_numbers: NDArray[np.int64], layout: ShardLayout
) -> SpillFile:
    """Write rows, given as consecutive arrays with int64 [n] output row numbers, to a file grouped by bucket."""
    buckets = np.searchsorted(layout.bounds, row_numbers, side="right") - 1
    order = np.argsort(buckets, kind="stable")
    text = pa.concat_arrays(texts).take(pa.array(order)) if len(row_numbers) else pa.array([], pa.binary())
    offsets = get_offsets(text)
    rows = np.searchsorted(buckets[order], np.arange(len(layout.bounds)))
    with path.open("wb") as file:
        for part in (rows, offsets[rows].astype(np.int64), row_numbers[order], np.diff(offsets), get_bytes(text)):
            file.write(part.data)
    return SpillFile(path, len(layout.bounds) - 1, len(row_numbers), int(offsets[-1]))


def write_shard(
    path: Path, header: bytes, spills: Sequence[SpillFile], layout: ShardLayout, shard: Shard
) -> OutputFile:
    """Write a header and the rows of a shard in order. Each row begins with a line end and contains no other.

    Raises:
        AssertionError: if rows are missing or duplicated.
    """
    rows = int(layout.bounds[shard.buckets.stop] - layout.bounds[shard.buckets.start])
    return write_with_checksum(path, _shard_parts(header, spills, layout, shard), rows, flush=False)


def _shard_parts(
    header: bytes, spills: Sequence[SpillFile], layout: ShardLayout, shard: Shard
) -> Iterator[memoryview]:
    yield memoryview(header)
    for bucket in shard.buckets:
        first, stop = layout.bounds[bucket : bucket + 2].tolist()
        texts, row_numbers = zip(*(spill.read_bucket(bucket) for spill in spills), strict=True)
        rows = np.concatenate(row_numbers) - first
        order = np.full(stop - first, -1)
        order[rows] = np.arange(len(rows))
        assert len(rows) == len(order) and (order >= 0).all(), f"{shard.name}: {len(rows)} of {len(order)} rows"
        if len(rows):
            yield get_bytes(pa.concat_arrays(texts).take(pa.array(order))).data
    yield memoryview(b"\n")
