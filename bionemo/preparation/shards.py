# SPDX-License-Identifier: Apache-2.0
"""Deal the records of an input to shards: read once, cleaned, placed, shuffled, written, accounted for.

A placement says which row of the output each record becomes. Where a record has to be left out, which nobody knows
before it is read, and the others move up, the pass is made again with that knowledge; a clean input takes one.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bionemo.common.files import sync
from bionemo.config.schema.preparation import SequencePolicies
from bionemo.preparation.checksums import OutputFile
from bionemo.preparation.chunks import Stretch
from bionemo.preparation.name_index import Places, digest, repeated
from bionemo.preparation.progress import progress
from bionemo.preparation.records import Records, clean, rows, values
from bionemo.preparation.shuffle import Layout, Spill, gather, spill
from bionemo.preparation.writer import Draft

HEADER = b"record_id,record_name,sequence_length,sequence"
_ROW_EXTRA = 16  # bytes of a row beyond what its record has in a FASTA file


class Placement(Protocol):
    """Tells workers where records go."""

    def targets(self, records: Records) -> NDArray[np.int64]:
        """Row of each record in the output, -1 for one that has none: int64 [n]."""


@dataclass(frozen=True)
class ByNumber:
    """The row of each record of the input, in a file of int64."""

    path: Path

    def targets(self, records: Records) -> NDArray[np.int64]:
        """Read them."""
        return np.fromfile(self.path, np.int64, len(records), offset=8 * records.first)


@dataclass(frozen=True)
class ByName:
    """The number of each name, in the files of `Places`, and the row of each number, in a file of int64."""

    directory: Path
    rows: Path

    def targets(self, records: Records) -> NDArray[np.int64]:
        """Look them up."""
        numbers = Places(self.directory).find(digest(records.names))
        return np.where(numbers < 0, -1, np.memmap(self.rows, np.int64, "r")[numbers])


Arrange = Callable[[NDArray[np.int64]], tuple[Placement, Sequence[tuple[str, int]]]]
"""From the numbers of the records left out to where the others go, and the names of the shards with their rows."""


@dataclass(frozen=True)
class _Report:
    """What became of a stretch."""

    spill: Spill
    left_out: NDArray[np.int64]  # numbers of the records whose place others may take
    letters: tuple[int, int, int]  # read, written, left out with their record or taken from it
    dropped: Counter[str]
    changed: Counter[str]


def deal(
    draft: Draft,
    pool: Executor,
    label: str,
    stretches: Sequence[Stretch],
    policies: SequencePolicies,
    arrange: Arrange,
    into: Sequence[str],
    missing: Callable[[NDArray[np.int64]], None] | None = None,
) -> None:
    """Write shards, and enter them and the input's books into the manifest.

    Args:
        draft: the output.
        pool: where the work is done.
        label: what the input is called in the manifest.
        stretches: the input, counted.
        policies: for records that are not as they should be.
        arrange: decides which row each record becomes.
        into: directories of the shards.
        missing: told of the rows that no record has become; they are arranged anew after it.

    Raises:
        UserError: a record that a policy calls an error.
    """
    scratch = draft.scratch / "deal"
    scratch.mkdir()
    left_out = np.zeros(0, np.int64)
    while True:
        placement, sizes = arrange(left_out)
        layout = Layout.of(sizes, _row_bytes(stretches))
        reports = _spill_all(
            pool, label, stretches, partial(_spill_stretch, scratch, policies, placement, layout), left_out
        )
        duplicates = _duplicates(scratch, stretches, policies)
        found = np.union1d(np.concatenate([left_out[:0], *(report.left_out for report in reports)]), duplicates)
        if np.array_equal(found, left_out):
            if missing is None or not len(absent := _absent([report.spill for report in reports], layout)):
                break
            missing(absent)
        left_out = found
    _gather_all(draft, pool, label, [report.spill for report in reports], layout)
    shutil.rmtree(scratch)

    tally = draft.tally(label, *into)
    tally.read, tally.written = sum(stretch.records for stretch in stretches), int(layout.bounds[-1])
    dropped = sum((report.dropped for report in reports), Counter[str]())
    dropped["duplicate"] = len(duplicates)
    tally.dropped = {reason: number for reason, number in sorted(dropped.items()) if number}
    tally.changed = dict(sorted(sum((report.changed for report in reports), Counter[str]()).items()))
    tally.letters_read, tally.letters_written, tally.letters_dropped = (
        sum(each) for each in zip(*(report.letters for report in reports), strict=True)
    )


def _row_bytes(stretches: Sequence[Stretch]) -> float:
    """What a row will take, about."""
    size = sum(stretch.stop - stretch.start for stretch in stretches)
    return size / max(1, sum(stretch.records for stretch in stretches)) + _ROW_EXTRA


def _spill_all(
    pool: Executor,
    label: str,
    stretches: Sequence[Stretch],
    work: Callable[[int, Stretch, NDArray[np.int64]], _Report],
    left_out: NDArray[np.int64],
) -> list[_Report]:
    """Have all stretches read; the reports come in their order."""
    mine = [left_out[(left_out >= each.first) & (left_out < each.first + each.records)] for each in stretches]
    reports: list[_Report] = []
    with progress(f"reading {label}", sum(each.stop - each.start for each in stretches)) as advance:
        for stretch, report in zip(stretches, pool.map(work, range(len(stretches)), stretches, mine), strict=True):
            reports.append(report)
            advance(stretch.stop - stretch.start)
    return reports


def _gather_all(draft: Draft, pool: Executor, label: str, spills: Sequence[Spill], layout: Layout) -> None:
    """Have all shards written, and see them onto the disk while the next ones are put together."""
    with progress(f"writing {label}", sum(each.size for each in spills)) as advance, ThreadPoolExecutor(2) as syncing:
        gathered: list[tuple[Path, str, Future[OutputFile]]] = []
        for shard in layout.shards:
            path = draft.path(shard.name)
            parts = [each.only(shard.buckets) for each in spills]
            gathered.append((path, shard.name, pool.submit(gather, path, HEADER, parts, layout, shard)))
        synced = []
        for path, name, future in gathered:
            draft.manifest.files[name] = future.result()
            advance(future.result().size)
            synced.append(syncing.submit(sync, path))
        for done in synced:
            done.result()


def _spill_stretch(
    scratch: Path,
    policies: SequencePolicies,
    placement: Placement,
    layout: Layout,
    number: int,
    stretch: Stretch,
    left_out: NDArray[np.int64],
) -> _Report:
    """Read a stretch and sort its rows by bucket."""
    texts: list[pa.Array] = []
    targets, gone = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    dropped, changed = Counter[str](), Counter[str]()
    letters = kept = left = 0
    with (scratch / f"{number:06}.names").open("wb") as names:
        for records in stretch.read():
            letters += len(values(records.sequences))
            before = records.lengths()
            numbers = records.first + np.arange(len(records))
            clean(records, policies)
            gone.append(numbers[~records.kept])
            if policies.on_duplicate != "keep":
                keys = digest(records.names).copy()
                keys[~records.kept] = np.stack([numbers, ~numbers], 1)[~records.kept]  # alike to no other
                names.write(keys.data)
            records.kept &= ~np.isin(numbers, left_out, assume_unique=True)
            target = placement.targets(records)
            records.drop(target < 0, "not in the mapping")
            texts.append(rows(records))
            targets.append(target[records.kept])
            after = np.where(records.kept, records.lengths(), 0)
            kept += int(after.sum(dtype=np.int64))
            left += int((before - after).sum(dtype=np.int64))
            dropped += records.dropped
            changed += records.changed
    path = scratch / f"{number:06}.rows"
    spilled = spill(path, texts, np.concatenate(targets), layout)
    return _Report(spilled, np.concatenate(gone), (letters, kept, left), dropped, changed)


def _absent(spills: Sequence[Spill], layout: Layout) -> NDArray[np.int64]:
    """Find the rows that no spill holds."""
    if sum(each.count for each in spills) == layout.bounds[-1]:
        return np.zeros(0, np.int64)
    seen = np.zeros(int(layout.bounds[-1]), bool)
    for each in spills:
        seen[each.targets()] = True
    return np.flatnonzero(~seen)


def _duplicates(scratch: Path, stretches: Sequence[Stretch], policies: SequencePolicies) -> NDArray[np.int64]:
    """Find the numbers of the records whose name has occurred before.

    Raises:
        UserError: where that is an error.
    """
    if policies.on_duplicate == "keep":
        return np.zeros(0, np.int64)
    files = [scratch / f"{number:06}.names" for number in range(len(stretches))]
    again, before = repeated(files, sum(stretch.records for stretch in stretches))
    if len(again) and policies.on_duplicate == "error":
        records, index = find(stretches, int(again[0]))
        earlier, place = find(stretches, int(before[0]))
        raise records.fail(
            index,
            f"has the name of the one at {earlier.path}:{earlier.lines[place]} ({len(again):,} such records): "
            "rename it, or set on_duplicate=skip (the first stays) or keep",
        )
    return again


def find(stretches: Sequence[Stretch], number: int) -> tuple[Records, int]:
    """Read a record again, to name it: some records, and which of them it is."""
    stretch = next(each for each in stretches if each.first <= number < each.first + each.records)
    for records in stretch.read():
        if number < records.first + len(records):
            return records, number - records.first
    raise AssertionError(number)


def in_order(path: Path, total: int, left_out: NDArray[np.int64]) -> ByNumber:
    """Place records one behind the other as they come."""
    kept = np.ones(total, np.int64)
    kept[left_out] = 0
    path.write_bytes((np.cumsum(kept) - 1).data)
    return ByNumber(path)
