# SPDX-License-Identifier: Apache-2.0
"""External shuffle: write rows that arrive in one order to files in another order, in bounded memory.

The output rows are numbered consecutively and divided into buckets of about 32 MB. `write_spill` writes the rows of
one chunk of the input to a file, grouped by bucket. `write_shard` reads each bucket from all spill files, sorts it in
memory and appends it to the shard. Each byte is written twice and read once, in long runs, for any order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bionemo.common.files import replacing
from bionemo.preparation.checksums import OutputFile, checksum_file, write_with_checksum
from bionemo.preparation.records import get_bytes

_BUCKET_BYTES = 32 << 20
_SCHEMA = pa.schema(
    {"record_id": pa.int64(), "record_name": pa.string(), "sequence_length": pa.int32(), "sequence": pa.string()}
)


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
    """The rows of one chunk: an Arrow file with one record batch of texts and row numbers per bucket."""

    path: Path
    num_rows: int  # number of rows in the file
    text_bytes: int  # size of their texts

    def read_row_numbers(self) -> NDArray[np.int64]:
        """Read the row numbers of all buckets, int64 [num_rows]."""
        with pa.ipc.open_file(self.path) as file:
            return file.read_all().column("row").to_numpy()

    def read_bucket(self, bucket: int) -> tuple[pa.Array, NDArray[np.int64]]:
        """Read the rows of a bucket, binary [n], and their row numbers, int64 [n]."""
        with pa.memory_map(str(self.path)) as file:
            batch = pa.ipc.open_file(file).get_batch(bucket)
        return batch.column("text"), batch.column("row").to_numpy()


def write_spill(
    path: Path, texts: Sequence[pa.Array], row_numbers: NDArray[np.int64], layout: ShardLayout
) -> SpillFile:
    """Write rows, given as consecutive arrays with int64 [n] output row numbers, to a file grouped by bucket."""
    buckets = np.searchsorted(layout.bounds, row_numbers, side="right") - 1
    order = np.argsort(buckets, kind="stable")
    text = pa.concat_arrays(texts).take(pa.array(order)) if len(row_numbers) else pa.array([], pa.binary())
    rows = pa.record_batch({"text": text, "row": row_numbers[order]})
    bounds = np.searchsorted(buckets[order], np.arange(len(layout.bounds)))
    with replacing(path, durable=False) as new, pa.ipc.new_file(new, rows.schema) as file:
        for begin, end in pairwise(bounds.tolist()):
            file.write_batch(rows.slice(begin, end - begin))
    return SpillFile(path, len(row_numbers), len(get_bytes(text)))


def write_shard(
    path: Path, header: bytes, spills: Sequence[SpillFile], layout: ShardLayout, shard: Shard
) -> OutputFile:
    """Write a header and the rows of a shard in order. Each row begins with a line end and contains no other.

    A file named `*.parquet` has the same rows and columns, with a row group for each bucket.

    Raises:
        AssertionError: if rows are missing or duplicated.
    """
    rows = int(layout.bounds[shard.buckets.stop] - layout.bounds[shard.buckets.start])
    parts = _shard_parts(header, spills, layout, shard)
    if path.suffix == ".parquet":
        _write_parquet(path, parts)
        return replace(checksum_file(path), rows=rows)
    return write_with_checksum(path, parts, rows, flush=False)


def _write_parquet(path: Path, parts: Iterator[memoryview]) -> None:
    """Write the parts of a CSV file as parquet, with a row group for each part."""
    header = bytes(next(parts))
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd", use_dictionary=False) as file:
        for part in parts:
            if len(part) > 1:  # the last part is a line end
                text = pa.py_buffer(header + part + b"\n")
                options = pa.csv.ReadOptions(use_threads=False, block_size=len(text))
                types = pa.csv.ConvertOptions(column_types=_SCHEMA)
                file.write_table(pa.csv.read_csv(pa.BufferReader(text), options, convert_options=types))


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
