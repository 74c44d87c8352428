# SPDX-License-Identifier: Apache-2.0
"""Write the records of an input to CSV shards: read, clean, find duplicates, assign rows, shuffle, count.

A row is a line of a shard, numbered across all shards. A row assignment determines the row of each record. It depends
on which records are dropped, which is known only after reading. If records were dropped, the pass over the input is
repeated; a clean input needs one pass.

Rows are shuffled in bounded memory: they are divided into buckets of about 32 MB. `_write_spill` writes the rows of a
chunk of the input to a file, grouped by bucket. `_write_shard` reads each bucket from all spill files, sorts it in
memory and appends it to the shard. Each byte is written twice and read once, in long runs, for any order.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bionemo.common.files import replacing, sync
from bionemo.common.progress import progress
from bionemo.config.schema.preparation import SequencePolicies
from bionemo.preparation.chunks import Chunk
from bionemo.preparation.manifest import OutputFile, checksum_file, write_with_checksum
from bionemo.preparation.name_index import NameIndex, find_duplicates, hash_names
from bionemo.preparation.records import Records, clean_records, format_rows, get_bytes, get_offsets
from bionemo.preparation.staged_output import StagedOutput

_BUCKET_BYTES = 32 << 20
_SCHEMA = pa.schema(
    {"record_id": pa.int64(), "record_name": pa.string(), "sequence_length": pa.int32(), "sequence": pa.string()}
)


HEADER = b"record_id,record_name,sequence_length,sequence"
_RENAME, _REMOVE = "rename it, or set on_duplicate=skip", "remove it, or set duplicates=drop"
_EXTRA_ROW_BYTES = 16  # size of a row minus size of its record in a FASTA file


@dataclass(frozen=True)
class RowAssignment:
    """Determines the output row of each record."""

    path: Path  # file of int64, the row of each record of the input, or -1 for a record that is not written
    index: Path | None = None  # file of a name index; then the file contains the row of each entry of the index

    def rows(self, records: Records) -> NDArray[np.int64]:
        """Return the row of each record, or -1: int64 [n]."""
        if self.index is None:
            return np.fromfile(self.path, np.int64, len(records), offset=8 * records.first_number)
        entries = NameIndex(self.index).lookup(hash_names(records.names))
        return np.where(entries < 0, -1, np.memmap(self.path, np.int64, "r")[entries])


def write_consecutive_rows(path: Path, kept: NDArray[np.bool_]) -> Path:
    """Write a file of int64 that numbers the kept entries consecutively and contains -1 for the others."""
    path.write_bytes(np.where(kept, np.cumsum(kept) - 1, -1).data)
    return path


AssignRows = Callable[[NDArray[np.int64]], tuple[RowAssignment, Sequence[tuple[str, int]]]]
"""Maps the indices of dropped records to the rows of the others and to names and sizes of the shards."""
DivideRecords = Callable[[NDArray[np.int64], Mapping[str, Sequence[Path]]], None]
"""Called with the indices of dropped records and the files of hashes by `names` and `sequences`."""


@dataclass(frozen=True)
class ShardLayout:
    """Shards and buckets of the output rows."""

    shards: dict[str, range]  # buckets of each shard by its path relative to the output, in the order of their rows
    bounds: NDArray[np.int64]  # [buckets + 1], number of the first row of each bucket

    @classmethod
    def create(cls, sizes: Sequence[tuple[str, int]], row_bytes: float) -> "ShardLayout":
        """Divide shards, given as name and number of rows, into buckets; `row_bytes` is the approximate row size."""
        shards, bounds = dict[str, range](), [0]
        for name, rows in sizes:
            first, count = len(bounds) - 1, max(1, round(rows * row_bytes / _BUCKET_BYTES))
            bounds += [bounds[first] + rows * (index + 1) // count for index in range(count)]
            shards[name] = range(first, first + count)
        return cls(shards, np.array(bounds, np.int64))


@dataclass(frozen=True)
class _ChunkResult:
    spill: Path  # file of its rows
    excluded: NDArray[np.int64]  # indices of the records dropped by a policy, which get no row
    letters: Counter[str]  # read, written, dropped
    dropped: Counter[str]
    changed: Counter[str]


def write_shards(
    output: StagedOutput,
    workers: Executor,
    label: str,
    chunks: Sequence[Chunk],
    policies: SequencePolicies,
    assign_rows: AssignRows,
    directories: Sequence[str],
    exclude_rows: Callable[[NDArray[np.int64]], None] | None = None,
    *,
    identical: Literal["keep", "drop", "error"] = "keep",
    divide: DivideRecords | None = None,
) -> None:
    """Write the records of an input to shards, and add the shards and the record counts to the manifest.

    `label` is the name of the input in the manifest, `chunks` are its parts with their record counts, and
    `directories` those of the shards. `exclude_rows` is called with the numbers of rows without a record; then rows
    are assigned again. `identical` is the policy for records with the sequence of an earlier record; those that are
    dropped are listed in `duplicates.csv`. `divide` is called when the dropped records are known; then rows are
    assigned again.

    Raises:
        UserError: if a record is invalid and its policy is `error`.
    """
    size, total = sum(chunk.stop - chunk.start for chunk in chunks), sum(chunk.num_records for chunk in chunks)
    output.require_space(size)
    scratch = output.scratch / "shards"
    scratch.mkdir()
    excluded = np.zeros(0, np.int64)
    hash_files = {
        kind: [scratch / f"{index:06}.{kind}" for index in range(len(chunks))]
        for kind, policy in (("names", policies.on_duplicate), ("sequences", identical))
        if divide or policy != "keep"
    }
    while True:
        assignment, sizes = assign_rows(excluded)
        layout = ShardLayout.create(sizes, size / max(1, total) + _EXTRA_ROW_BYTES)
        task = partial(_spill_chunk, hash_files, scratch, policies, assignment, layout)
        parts = np.split(excluded, np.searchsorted(excluded, [chunk.first_number for chunk in chunks])[1:])
        results: list[_ChunkResult] = []
        with progress(f"reading {label}", size) as advance:
            for chunk, result in zip(chunks, workers.map(task, range(len(chunks)), chunks, parts), strict=True):
                results.append(result)
                advance(chunk.stop - chunk.start)
        spills = [result.spill for result in results]
        duplicates, _ = _find_repeated(hash_files, chunks, "name", policies.on_duplicate, _RENAME)
        copies, first = _find_repeated(hash_files, chunks, "sequence", identical, _REMOVE, duplicates)
        found = np.union1d(np.concatenate([result.excluded for result in results]), np.append(duplicates, copies))
        if np.array_equal(found, excluded) and divide:
            divide(found, hash_files)
            divide = None
        elif np.array_equal(found, excluded):
            if exclude_rows is None or not len(empty := _find_empty_rows(spills, layout)):
                break
            exclude_rows(empty)
        excluded = found
    _write_all_shards(output, workers, label, spills, layout)
    if len(copies):
        needed = np.union1d(copies, first)
        names = read_strings(scratch / "needed.names", workers, chunks, policies, "names", needed)
        pairs = zip(np.searchsorted(needed, copies), np.searchsorted(needed, first), strict=True)
        rows = ([names[int(number)].as_py().decode() for number in pair] for pair in pairs)
        output.write_csv("duplicates.csv", ("dropped", "kept"), rows)
    shutil.rmtree(scratch)

    counts = output.add_counts(label, *directories)
    counts.read, counts.written = total, int(layout.bounds[-1])
    letters, dropped, changed = (
        sum((getattr(result, kind) for result in results), Counter[str]())
        for kind in ("letters", "dropped", "changed")
    )
    dropped["duplicate"], dropped["identical sequence"] = len(duplicates), len(copies)
    counts.dropped = {reason: number for reason, number in sorted(dropped.items()) if number}
    counts.changed = dict(sorted(changed.items()))
    counts.letters_read, counts.letters_written = letters["read"], letters["written"]
    counts.letters_dropped = letters["dropped"]


def _spill_chunk(
    hash_files: Mapping[str, Sequence[Path]],
    scratch: Path,
    policies: SequencePolicies,
    assignment: RowAssignment,
    layout: ShardLayout,
    index: int,
    chunk: Chunk,
    excluded: NDArray[np.int64],
) -> _ChunkResult:
    """Clean the records of a chunk and write their rows to a spill file, in a worker."""
    texts: list[pa.Array] = []
    rows, invalid = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    letters, dropped, changed = Counter[str](), Counter[str](), Counter[str]()
    with ExitStack() as stack:
        files = {
            kind: stack.enter_context(stack.enter_context(replacing(paths[index], durable=False)).open("wb"))
            for kind, paths in hash_files.items()
        }
        for records in chunk.read():
            lengths, numbers = records.lengths(), records.numbers()
            clean_records(records, policies)
            invalid.append(numbers[~records.kept])
            for kind, file in files.items():
                hashes = hash_names(getattr(records, kind)).copy()
                hashes[~records.kept] = np.stack([numbers, ~numbers], 1)[~records.kept]  # equal to no other
                file.write(hashes.data)
            records.kept &= ~np.isin(numbers, excluded, assume_unique=True)
            row = assignment.rows(records)
            records.drop(row < 0, "not in the mapping")
            texts.append(format_rows(records))
            rows.append(row[records.kept])
            read, written = (int(each.sum(dtype=np.int64)) for each in (lengths, records.lengths()[records.kept]))
            letters.update(read=read, written=written, dropped=read - written)
            dropped += records.dropped
            changed += records.changed
    spill = _write_spill(scratch / f"{index:06}.rows", texts, np.concatenate(rows), layout)
    return _ChunkResult(spill, np.concatenate(invalid), letters, dropped, changed)


def _write_all_shards(
    output: StagedOutput, workers: Executor, label: str, spills: Sequence[Path], layout: ShardLayout
) -> None:
    with progress(f"writing {label}", sum(spill.stat().st_size for spill in spills)) as advance:
        paths = {name: output.path(name) for name in layout.shards}
        tasks = {
            name: workers.submit(_write_shard, paths[name], spills, layout.bounds, buckets)
            for name, buckets in layout.shards.items()
        }
        for name, task in tasks.items():
            output.manifest.files[name] = task.result()
            sync(paths[name])  # while the next ones are written
            advance(task.result().size)


def _find_repeated(
    hash_files: Mapping[str, Sequence[Path]],
    chunks: Sequence[Chunk],
    what: str,
    policy: str,
    remedy: str,
    excluded: Sequence[int] | NDArray[np.int64] = (),
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the records whose name or sequence occurs earlier, and those of the first occurrences."""
    if policy == "keep":
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    repeated, first = find_duplicates(hash_files[f"{what}s"], sum(chunk.num_records for chunk in chunks), excluded)
    if len(repeated) and policy == "error":
        records, index = read_record(chunks, int(repeated[0]))
        first_records, first_index = read_record(chunks, int(first[0]))
        raise records.error(
            index,
            f"has the same {what} as the record at {first_records.display_path}:{first_records.lines[first_index]} "
            f"({len(repeated):,} such records): {remedy} (keeps the first) or keep",
        )
    return repeated, first


def read_record(chunks: Sequence[Chunk], number: int) -> tuple[Records, int]:
    """Read the record with an index in the input, for messages: some records, and its position among them."""
    chunk = next(each for each in chunks if each.first_number <= number < each.first_number + each.num_records)
    for records in chunk.read():
        if number < records.first_number + len(records):
            return records, number - records.first_number
    raise AssertionError(number)


def read_strings(
    path: Path,
    workers: Executor,
    chunks: Sequence[Chunk],
    policies: SequencePolicies,
    kind: Literal["names", "sequences"],
    numbers: NDArray[np.int64],
) -> pa.Array:
    """Read names or sequences, cleaned, to a file that is mapped into memory.

    `numbers` are the indices of the records, ascending int64 [n]. Returns large_binary [n].
    """
    parts = np.split(numbers, np.searchsorted(numbers, [chunk.first_number for chunk in chunks])[1:])
    lengths = [np.zeros(1, np.int64)]
    with path.open("wb") as file:
        for arrays in workers.map(partial(_select_strings, policies, kind), chunks, parts):
            for strings in arrays:
                file.write(get_bytes(strings).data)
                lengths.append(np.diff(get_offsets(strings)))
        file.write(b"\n")  # an empty file cannot be mapped
    offsets = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.memory_map(str(path)).read_buffer()]
    return pa.Array.from_buffers(pa.large_binary(), len(numbers), buffers)


def _select_strings(policies: SequencePolicies, kind: str, chunk: Chunk, numbers: NDArray[np.int64]) -> list[pa.Array]:
    selected = []
    for records in chunk.read() if len(numbers) else ():
        clean_records(records, policies)
        selected.append(getattr(records, kind).filter(pa.array(np.isin(records.numbers(), numbers))))
    return selected


def _write_spill(path: Path, texts: Sequence[pa.Array], row_numbers: NDArray[np.int64], layout: ShardLayout) -> Path:
    """Write the rows of a chunk to an Arrow file with one record batch of texts and row numbers per bucket.

    The rows are consecutive arrays of texts, and their numbers in the output, int64 [n].
    """
    buckets = np.searchsorted(layout.bounds, row_numbers, side="right") - 1
    order = np.argsort(buckets, kind="stable")
    text = pa.concat_arrays(texts).take(pa.array(order)) if len(row_numbers) else pa.array([], pa.binary())
    rows = pa.record_batch({"text": text, "row": row_numbers[order]})
    bounds = np.searchsorted(buckets[order], np.arange(len(layout.bounds)))
    with replacing(path, durable=False) as new, pa.ipc.new_file(new, rows.schema) as file:
        for begin, end in pairwise(bounds.tolist()):
            file.write_batch(rows.slice(begin, end - begin))
    return path


def _read_bucket(spill: Path, bucket: int) -> tuple[pa.Array, NDArray[np.int64]]:
    """Read the rows of a bucket, binary [n], and their row numbers, int64 [n]."""
    with pa.memory_map(str(spill)) as file:
        batch = pa.ipc.open_file(file).get_batch(bucket)
    return batch.column("text"), batch.column("row").to_numpy()


def _find_empty_rows(spills: Sequence[Path], layout: ShardLayout) -> NDArray[np.int64]:
    """Return the numbers of the rows of the layout that no record has, int64."""
    is_empty = np.ones(int(layout.bounds[-1]), bool)
    for spill in spills:
        with pa.memory_map(str(spill)) as file:
            is_empty[pa.ipc.open_file(file).read_all().column("row").to_numpy()] = False
    return np.flatnonzero(is_empty)


def _write_shard(path: Path, spills: Sequence[Path], bounds: NDArray[np.int64], buckets: range) -> OutputFile:
    """Write a header and the rows of the buckets of a shard in order; `bounds` are those of the layout.

    Each row begins with a line end and contains no other. A file named `*.parquet` has the same rows and columns as a
    CSV file, with a row group for each bucket.

    Raises:
        AssertionError: if rows are missing or duplicated.
    """
    rows = int(bounds[buckets.stop] - bounds[buckets.start])
    parts = _shard_parts(spills, bounds, buckets)
    if path.suffix == ".parquet":
        _write_parquet(path, parts)
        return replace(checksum_file(path), rows=rows)
    return write_with_checksum(path, parts, rows, flush=False)


def _write_parquet(path: Path, parts: Iterator[memoryview]) -> None:
    """Write the parts of a CSV file as parquet, with a row group for each part."""
    header, types = bytes(next(parts)), pa.csv.ConvertOptions(column_types=_SCHEMA)
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd", use_dictionary=False) as file:
        for part in parts:
            if len(part) > 1:  # the last part is a line end
                text = pa.py_buffer(header + part + b"\n")
                options = pa.csv.ReadOptions(use_threads=False, block_size=len(text))
                file.write_table(pa.csv.read_csv(pa.BufferReader(text), options, convert_options=types))


def _shard_parts(spills: Sequence[Path], bounds: NDArray[np.int64], buckets: range) -> Iterator[memoryview]:
    yield memoryview(HEADER)
    for bucket in buckets:
        first, stop = bounds[bucket : bucket + 2].tolist()
        texts, row_numbers = zip(*(_read_bucket(spill, bucket) for spill in spills), strict=True)
        rows = np.concatenate(row_numbers) - first
        order = np.full(stop - first, -1)
        order[rows] = np.arange(len(rows))
        assert len(rows) == len(order) and (order >= 0).all(), f"bucket {bucket}: {len(rows)} of {len(order)} rows"
        if len(rows):
            yield get_bytes(pa.concat_arrays(texts).take(pa.array(order))).data
    yield memoryview(b"\n")
