# SPDX-License-Identifier: Apache-2.0
"""Write the records of an input to CSV shards: read, clean, find duplicates, assign rows, shuffle, count.

A row is a line of a shard, numbered across all shards. A row assignment determines the row of each record. It depends
on which records are dropped, which is known only after reading. If records were dropped, the pass over the input is
repeated; a clean input needs one pass.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bionemo.common.files import replacing, sync
from bionemo.common.progress import progress
from bionemo.config.schema.preparation import SequencePolicies
from bionemo.preparation.checksums import OutputFile
from bionemo.preparation.chunks import Chunk
from bionemo.preparation.name_index import NameIndex, find_duplicates, hash_names
from bionemo.preparation.records import Records, clean_records, format_rows, get_bytes, get_offsets
from bionemo.preparation.shuffle import ShardLayout, SpillFile, write_shard, write_spill
from bionemo.preparation.staged_output import StagedOutput

HEADER = b"record_id,record_name,sequence_length,sequence"
_RENAME, _REMOVE = "rename it, or set on_duplicate=skip", "remove it, or set duplicates=drop"
_EXTRA_ROW_BYTES = 16  # size of a row minus size of its record in a FASTA file


@dataclass(frozen=True)
class RowAssignment:
    """Determines the output row of each record."""

    path: Path  # file of int64, the row of each record of the input, or -1 for a record that is not written
    index: Path | None = None  # directory of a name index; then the file contains the row of each entry of the index

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
class _ChunkResult:
    spill: SpillFile
    excluded: NDArray[np.int64]  # indices of the records dropped by a policy, which get no row
    letters: tuple[int, int, int]  # read, written, dropped
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
    output.require_space(sum(chunk.stop - chunk.start for chunk in chunks))
    scratch = output.scratch / "shards"
    scratch.mkdir()
    excluded, total = np.zeros(0, np.int64), sum(chunk.num_records for chunk in chunks)
    hash_files = {
        kind: [scratch / f"{index:06}.{kind}" for index in range(len(chunks))]
        for kind, policy in (("names", policies.on_duplicate), ("sequences", identical))
        if divide or policy != "keep"
    }
    while True:
        assignment, sizes = assign_rows(excluded)
        layout = ShardLayout.create(sizes, _estimate_row_bytes(chunks))
        results = _spill_chunks(
            workers, label, chunks, _ChunkTask(hash_files, scratch, policies, assignment, layout), excluded
        )
        duplicates, _ = _find_repeated(hash_files, chunks, "name", policies.on_duplicate, _RENAME)
        copies, first = _find_repeated(hash_files, chunks, "sequence", identical, _REMOVE, duplicates)
        found = np.union1d(np.concatenate([result.excluded for result in results]), np.append(duplicates, copies))
        if np.array_equal(found, excluded) and divide:
            divide(found, hash_files)
            divide = None
        elif np.array_equal(found, excluded):
            empty = _find_empty_rows([result.spill for result in results], layout)
            if exclude_rows is None or not len(empty):
                break
            exclude_rows(empty)
        excluded = found
    _write_all_shards(output, workers, label, [result.spill for result in results], layout)
    if len(copies):
        needed = np.union1d(copies, first)
        names = read_strings(scratch / "needed.names", workers, chunks, policies, "names", needed)
        pairs = zip(np.searchsorted(needed, copies), np.searchsorted(needed, first), strict=True)
        rows = ([names[int(number)].as_py().decode() for number in pair] for pair in pairs)
        output.write_csv("duplicates.csv", ("dropped", "kept"), rows)
    shutil.rmtree(scratch)

    counts = output.add_counts(label, *directories)
    counts.read, counts.written = total, int(layout.bounds[-1])
    dropped = sum((result.dropped for result in results), Counter[str]())
    dropped["duplicate"], dropped["identical sequence"] = len(duplicates), len(copies)
    counts.dropped = {reason: number for reason, number in sorted(dropped.items()) if number}
    counts.changed = dict(sorted(sum((result.changed for result in results), Counter[str]()).items()))
    counts.letters_read, counts.letters_written, counts.letters_dropped = (
        sum(each) for each in zip(*(result.letters for result in results), strict=True)
    )


def _estimate_row_bytes(chunks: Sequence[Chunk]) -> float:
    size = sum(chunk.stop - chunk.start for chunk in chunks)
    return size / max(1, sum(chunk.num_records for chunk in chunks)) + _EXTRA_ROW_BYTES


@dataclass(frozen=True)
class _ChunkTask:
    """Cleans the records of a chunk and writes their rows to a spill file, in a worker."""

    hash_files: Mapping[str, Sequence[Path]]
    scratch: Path
    policies: SequencePolicies
    assignment: RowAssignment
    layout: ShardLayout

    def __call__(self, index: int, chunk: Chunk, excluded: NDArray[np.int64]) -> _ChunkResult:
        texts: list[pa.Array] = []
        rows, invalid = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        dropped, changed = Counter[str](), Counter[str]()
        letters_read = letters_written = letters_dropped = 0
        with ExitStack() as stack:
            files = {
                kind: stack.enter_context(stack.enter_context(replacing(paths[index], durable=False)).open("wb"))
                for kind, paths in self.hash_files.items()
            }
            for records in chunk.read():
                lengths = records.lengths()
                letters_read += len(get_bytes(records.sequences))
                numbers = records.numbers()
                clean_records(records, self.policies)
                invalid.append(numbers[~records.kept])
                for kind, file in files.items():
                    hashes = hash_names(getattr(records, kind)).copy()
                    hashes[~records.kept] = np.stack([numbers, ~numbers], 1)[~records.kept]  # equal to no other
                    file.write(hashes.data)
                records.kept &= ~np.isin(numbers, excluded, assume_unique=True)
                row = self.assignment.rows(records)
                records.drop(row < 0, "not in the mapping")
                texts.append(format_rows(records))
                rows.append(row[records.kept])
                kept_lengths = np.where(records.kept, records.lengths(), 0)
                letters_written += int(kept_lengths.sum(dtype=np.int64))
                letters_dropped += int((lengths - kept_lengths).sum(dtype=np.int64))
                dropped += records.dropped
                changed += records.changed
        spill = write_spill(self.scratch / f"{index:06}.rows", texts, np.concatenate(rows), self.layout)
        letters = (letters_read, letters_written, letters_dropped)
        return _ChunkResult(spill, np.concatenate(invalid), letters, dropped, changed)


def _spill_chunks(
    workers: Executor, label: str, chunks: Sequence[Chunk], task: _ChunkTask, excluded: NDArray[np.int64]
) -> list[_ChunkResult]:
    """Process all chunks; the results are in the order of the chunks."""
    bounds = np.searchsorted(excluded, [chunk.first_number for chunk in chunks])
    results: list[_ChunkResult] = []
    with progress(f"reading {label}", sum(chunk.stop - chunk.start for chunk in chunks)) as advance:
        futures = workers.map(task, range(len(chunks)), chunks, np.split(excluded, bounds[1:]))
        for chunk, result in zip(chunks, futures, strict=True):
            results.append(result)
            advance(chunk.stop - chunk.start)
    return results


def _write_all_shards(
    output: StagedOutput, workers: Executor, label: str, spills: Sequence[SpillFile], layout: ShardLayout
) -> None:
    """Write all shards, and flush them to disk while the next ones are written."""
    with (
        progress(f"writing {label}", sum(spill.text_bytes for spill in spills)) as advance,
        ThreadPoolExecutor(2) as syncing,
    ):
        pending: list[tuple[Path, str, Future[OutputFile]]] = []
        for shard in layout.shards:
            path = output.path(shard.name)
            pending.append((path, shard.name, workers.submit(write_shard, path, HEADER, spills, layout, shard)))
        synced = []
        for path, name, future in pending:
            output.manifest.files[name] = future.result()
            advance(future.result().size)
            synced.append(syncing.submit(sync, path))
        for done in synced:
            done.result()


def _find_empty_rows(spills: Sequence[SpillFile], layout: ShardLayout) -> NDArray[np.int64]:
    if sum(spill.num_rows for spill in spills) == layout.bounds[-1]:
        return np.zeros(0, np.int64)
    is_filled = np.zeros(int(layout.bounds[-1]), bool)
    for spill in spills:
        is_filled[spill.read_row_numbers()] = True
    return np.flatnonzero(~is_filled)


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
