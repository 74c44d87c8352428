# SPDX-License-Identifier: Apache-2.0
"""Sequences in memory-mapped text shards: what CSV and FASTA have in common."""

import errno
import logging
import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import first_of_node
from bionemo.common.mapped import MappedFile
from bionemo.data.shards.index import UNWRAPPED, ContentHash, Spec, Table
from bionemo.data.shards.index_store import load_index

_log = logging.getLogger(__name__)
_LONG_BYTES = 2 << 30  # less than this is indexed before a bar could be read

Advance = Callable[[int], object]
"""Told of every stretch of bytes that has been gone through."""


class TextShards(ABC):
    """Records of one or several text files, numbered through in the order of the files.

    The files and their indexes are memory-mapped, so processes of a machine share one copy of them. A source may be
    used after a fork; pickling leaves the maps out and opens them again.

    Attributes:
        paths: the files.
        lengths: int32 [n], letters of each record's sequence.
    """

    def __init__(
        self, paths: Sequence[str | Path], spec: Spec, index_mapping_dir: str | Path | None, workers: int | None
    ) -> None:
        if not paths:
            raise UserError("no data files given: check the dataset's range of files")
        self.paths = [Path(path) for path in paths]
        self._spec = spec
        self._sequence_field: int = spec["sequence"]
        self._index_mapping_dir = index_mapping_dir
        self._workers = workers
        self._open()

    @abstractmethod
    def _scan(self, path: Path, advance: Advance) -> Iterator[Table]:
        """Go through a file and give the places of its records, part by part, with offsets in the file."""

    @abstractmethod
    def _decode(self, raw: bytes) -> bytes:
        """Turn a whole sequence as it stands in the file into its letters."""

    @abstractmethod
    def fields(self, record: int) -> dict[str, str]:
        """Give everything known of a record; its sequence is among it."""

    def __len__(self) -> int:
        """Give the number of records."""
        return len(self.lengths)

    def gather(
        self, records: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, positions: np.ndarray
    ) -> None:
        """Copy letters [start, start + count) of each record into out[position : position + count].

        Args:
            records: integer [k], numbers of the records; any order, repeats allowed.
            starts: integer [k], first letter wanted of each.
            counts: integer [k], how many letters of each.
            out: uint8 [m], contiguous; only the places named are written.
            positions: integer [k], where in `out` each piece goes.

        Raises:
            IndexError: a record, or a stretch of letters, that does not exist.
            UserError: a file was cut short or changed since it was opened.
        """
        if len(records) == 0:
            return
        shards = self._bounds.searchsorted(records, "right") - 1
        numbers = shards.tolist()
        opened, target = self._shards, out.data
        for number in set(numbers):
            opened[number].file.check()
        stops = starts + counts
        if np.bitwise_or.reduce(records | starts | counts | (self.lengths[records] - stops)) < 0:  # any sign bit
            raise IndexError("gather asks for records or letters that do not exist")
        rows = records - self._bounds[shards]
        first, last = starts, stops  # in the file, from where the sequence begins
        if self._wraps:
            width, line_end_size = self._wrap[shards], self._line_end_size[shards]
            first = starts + starts // width * line_end_size
            last = stops + np.maximum(stops - 1, 0) // width * line_end_size
        # One slice copied per record: twice as fast as arithmetic on one index per letter, and independent of how
        # many shards the records come from. Plain numbers, as numpy's scalars would cost more than the copy.
        columns = (column.tolist() for column in (rows, first, last, counts, positions))
        for shard, row, a, b, count, position in zip(numbers, *columns, strict=True):
            data, begins, widths, line_end, _, _ = opened[shard]
            if widths is None:
                begin = begins[row]
                piece = data[begin + a : begin + b]
                if b - a != count:
                    piece = piece.replace(line_end, b"")
            else:
                piece = self._uneven(opened[shard], row, a, b)
            if len(piece) != count:
                raise UserError(
                    f"{self.paths[shard]} changed while it was in use: its index does not fit it any more; wait until "
                    "it is written, then start again"
                )
            target[position : position + count] = piece

    def text(self, record: int) -> str:
        """Give a whole sequence."""
        shard, row = self._locate(record)
        return self._decode(self._cell(shard, row, self._sequence_field)).decode()

    def _locate(self, record: int) -> "tuple[_Shard, int]":
        if not 0 <= record < len(self):
            raise IndexError(f"record {record} of {len(self)}")
        shard = int(np.searchsorted(self._bounds, record, side="right")) - 1
        self._shards[shard].file.check()
        return self._shards[shard], record - int(self._bounds[shard])

    def _cell(self, shard: "_Shard", row: int, field: int) -> bytes:
        """Give a field as it stands in the file."""
        begin = int(shard.table.offset[field][row])
        return shard.data[begin : begin + int(shard.table.length[field][row])]

    def _uneven(self, shard: "_Shard", row: int, start: int, stop: int) -> bytes:
        """Give letters [start, stop) of a sequence in a shard whose lines are not all of one width."""
        width = shard.widths[row] if shard.widths else 0
        if width == 0:
            return self._decode(self._cell(shard, row, self._sequence_field))[start:stop]
        begin, line_end = shard.begins[row], shard.line_end
        first = begin + start + start // width * len(line_end)
        last = begin + stop + max(stop - 1, 0) // width * len(line_end)
        piece = shard.data[first:last]
        return piece if last - first == stop - start else piece.replace(line_end, b"")

    def _open(self) -> None:
        """Index what has no valid index, several shards at a time, and map everything."""
        sizes = [_regular_size(path) for path in self.paths]
        workers = max(1, min(self._workers or (os.cpu_count() or 2) // 2, len(self.paths)))
        with _progress(sum(sizes)) as advance, ThreadPoolExecutor(workers) as pool:
            try:
                self._shards = list(pool.map(lambda path: self._open_shard(path, advance), self.paths))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        tables = [shard.table for shard in self._shards]
        self._bounds = np.cumsum([0, *map(len, tables)])[:-1]
        self._wrap = np.array([table.wrap or UNWRAPPED for table in tables])
        self._wraps = bool((self._wrap != UNWRAPPED).any())
        self._line_end_size = np.array([len(shard.line_end) for shard in self._shards])
        self.lengths = tables[0].letters if len(tables) == 1 else np.concatenate([table.letters for table in tables])
        self.lengths.flags.writeable = False
        if dos := [path for path, table in zip(self.paths, tables, strict=True) if table.crlf]:
            more = f" and {len(dos) - 1} more" if len(dos) > 1 else ""
            _log.warning("%s%s: lines end in CR LF (Windows); the CR is left out", dos[0], more)

    def _open_shard(self, path: Path, advance: Advance) -> "_Shard":
        def build() -> Table:
            content = ContentHash(path)

            def advance_both(count: int) -> None:
                content.advance(count)
                advance(count)

            table = Table.join(list(self._scan(path, advance_both)))
            return replace(table, content=content.digest())

        try:
            table = load_index(path, self._spec, build, self._index_mapping_dir)
            return _Shard.open(path, table, self._sequence_field)
        except OSError as error:
            hint = "raise `ulimit -n`" if error.errno == errno.EMFILE else "check the file and its permissions"
            raise UserError(f"{path} cannot be read ({error.strerror}): {hint}") from error

    def __getstate__(self) -> dict[str, Any]:
        """Leave the maps out: a process that is not a fork opens its own."""
        return {key: self.__dict__[key] for key in self.__dict__.keys() - {"_shards", "lengths"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the files again."""
        self.__dict__.update(state)
        self._open()


class _Shard(NamedTuple):
    """One open file.

    Attributes:
        data: bytes of the file.
        begins: place of each sequence; like `widths` a view that reads single entries faster than an array does.
        widths: letters per line of each record, see `Table`; None if the shard has one width.
        line_end: what ends the lines of a sequence.
        table: places of all fields.
        file: the file that `data` is of. The index is not checked: it is only ever replaced by renaming.
    """

    data: mmap
    begins: memoryview
    widths: memoryview | None
    line_end: bytes
    table: Table
    file: MappedFile

    @classmethod
    def open(cls, path: Path, table: Table, sequence: int) -> "_Shard":
        file = MappedFile(path)
        widths = None if table.wrap else table.width.data
        line_end = b"\r\n" if table.crlf else b"\n"
        return cls(file.data, table.offset[sequence].data, widths, line_end, table, file)


def _regular_size(path: Path) -> int:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}): check the path") from error
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{path} is not a regular file and cannot be memory-mapped: give a file")
    return state.st_size


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """Show a bar while indexing, if someone looks and it takes long; nothing where all indexes are there."""
    if total < _LONG_BYTES or not sys.stderr.isatty() or not first_of_node():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("indexing", total=total)

    def advance(count: int) -> None:
        bar.start()  # at the first stretch; does nothing after it
        bar.advance(task, count)

    try:
        yield advance
    finally:
        bar.stop()
