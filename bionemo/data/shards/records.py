# SPDX-License-Identifier: Apache-2.0
"""Random access to the records of text files, which are read in place: the one reader of all commands."""

import errno
import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import is_local_rank_zero
from bionemo.common.mapped import MappedFile
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.data.shards.formats import ENTRY, NEWLINE, TextFormat, location, record_error
from bionemo.data.shards.index import RecordIndex, hash_file, load_index
from bionemo.data.shards.parquet import Parquet, write_rows
from bionemo.tokenizers.residues import WHITE_SPACE, check_letters, note_stops, trim

_log = logging.getLogger(__name__)
_NOTED_BYTES, _NOTED_FILES = 2 << 30, 1000  # less is indexed too quickly for a note
_PERHAPS_WRONG = re.compile(rb"[<\x80-\xff]")  # first letter of all that `check_letters` rejects
_BLOCK_BYTES = 1 << 20  # arrays computed from a block of this size stay in the CPU cache


class TextRecords:
    """Records of one or several text files, numbered consecutively in the order of the files.

    The files and their indexes are memory-mapped, so that all processes of a machine share one copy. Objects can be
    used after a fork. When unpickled, they open the files again.

    Args:
        paths: the files.
        formats: format of all files, or of each.
        index_mapping_dir: directory for indexes; None: next to the data, or the user's cache if that is read-only.
        workers: number of files to index at a time; None: half of the cores.

    Attributes:
        paths: the files.
        lengths: int32 [n], letters of each record's sequence; bytes if it is not a protein.

    Raises:
        UserError: if a file cannot be read with its format.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        formats: TextFormat | Sequence[TextFormat],
        *,
        index_mapping_dir: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        if not paths:
            raise UserError("no data files given: check the dataset's range of files")
        self.paths = [Path(path) for path in paths]
        self._formats = list(formats) if isinstance(formats, Sequence) else [formats] * len(paths)
        self._index_mapping_dir, self._workers = index_mapping_dir, workers
        self._open()

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(
        self, records: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, offsets: np.ndarray
    ) -> None:
        """Copy parts of sequences; see `SequenceSource.gather`.

        Raises:
            IndexError: if a record or letter does not exist.
            UserError: if a file was truncated or changed after it was opened.
        """
        if len(records) == 0:
            return
        numbers = self._bounds.searchsorted(records, "right") - 1
        shards, target = self._shards, out.data
        for number in set(numbers.tolist()):
            shards[number].check()
        lengths = self.lengths[records]
        if np.bitwise_or.reduce(records | starts | counts | (lengths - starts - counts)) < 0:
            raise IndexError("gather: records or letters that do not exist")  # a sign bit
        # One slice per record is twice as fast as one index per letter, and its cost does not depend on the number of
        # shards. Python integers, because NumPy scalars would cost more than the copy.
        indices = records - self._bounds[numbers]
        columns = (column.tolist() for column in (numbers, indices, lengths, starts, counts, offsets))
        for number, index, length, start, count, offset in zip(*columns, strict=True):
            _, data, _, _, sequences, begins, sizes = shard = shards[number]
            begin = sequences[index]
            if begin >= 0:
                piece = data[begin + start : begin + start + count]
            elif begin < -1:
                # in most files only line ends are between the letters; removing them alone is three times as fast
                wrapped = data[~begin : begins[index] + sizes[index]]
                piece = wrapped.replace(NEWLINE, b"")
                if len(piece) != length:
                    piece = wrapped.translate(None, WHITE_SPACE)
                piece = piece[start : start + count] if count < len(piece) else piece
            else:
                piece = shard.letters(shard.record(index))[start : start + count]
            if len(piece) != count:
                raise UserError(f"{self.paths[number]} no longer matches its index: delete the index")
            target[offset : offset + count] = piece

    def text(self, record: int) -> str:
        """Return a whole sequence."""
        shard, index = self._locate(record)
        return shard.letters(shard.record(index)).decode()

    def fields(self, record: int) -> dict[str, str]:
        """Return all fields of a record, including its sequence."""
        shard, index = self._locate(record)
        raw = shard.record(index)
        fields = shard.text_format.fields(raw)
        return fields | {"sequence": shard.letters(raw).decode()} if shard.text_format.proteins else fields

    def _locate(self, record: int) -> "tuple[_Shard, int]":
        """Return the shard of a record and the index of the record in it."""
        if not 0 <= record < len(self):
            raise IndexError(f"record {record} of {len(self)}")
        number = int(np.searchsorted(self._bounds, record, side="right")) - 1
        self._shards[number].check()
        return self._shards[number], record - int(self._bounds[number])

    def _open(self) -> None:
        """Map all files and their indexes. Missing indexes are built, of large files in several processes."""
        size, count = sum(_regular_size(path) for path in self.paths), len(self.paths)
        is_noted = is_local_rank_zero() and (size >= _NOTED_BYTES or count >= _NOTED_FILES)
        note = f"indexing {count:,} files ({size >> 20:,} MiB), once" if is_noted else ""
        with ThreadPoolExecutor(max(1, self._workers or (os.cpu_count() or 2) // 2)) as pool:
            arguments = repeat(self._index_mapping_dir), repeat(note)
            opened: Iterable[_Shard] = pool.map(_open_shard, self.paths, self._formats, *arguments)
            try:
                self._shards = list(_show_progress(opened) if is_noted and sys.stderr.isatty() else opened)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        letters = [shard.record_index.letters for shard in self._shards]
        self._bounds = np.cumsum([0, *map(len, letters)])[:-1]
        self.lengths = letters[0] if len(letters) == 1 else np.concatenate(letters)
        self.lengths.flags.writeable = False
        if stops := sum(shard.record_index.stops for shard in self._shards):
            note_stops(str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths):,} files", stops, len(self))

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in self.__dict__.keys() - {"_shards", "lengths"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _Shard(NamedTuple):
    """An open file."""

    file: MappedFile
    data: Any  # mmap of the file
    text_format: TextFormat
    record_index: RecordIndex
    # arrays of the index; single items of a memoryview are faster to read
    sequences: memoryview
    starts: memoryview
    sizes: memoryview

    def record(self, number: int) -> bytes:
        """Return the bytes of a record."""
        start = self.starts[number]
        record: bytes = self.data[start : start + self.sizes[number]]
        return record

    def letters(self, record: bytes) -> bytes:
        """Return the sequence of a record."""
        sequence = self.text_format.sequence(record) or b""
        return trim(sequence) if self.text_format.proteins else sequence

    def check(self) -> None:
        """Raise a UserError if the file was truncated, deleted or overwritten; `touch` is no change."""
        self.file.check()
        if self.file.was_written() and hash_file(self.file) != self.record_index.xxh3_128:
            raise UserError(
                f"{self.file.path} was overwritten while it was in use: restore the file, or start again with the "
                "new data"
            )


def _open_shard(path: Path, text_format: TextFormat, index_mapping_dir: str | Path | None, note: str) -> _Shard:
    def build() -> RecordIndex:
        _note_once(note)
        return _build_index(file, text_format)

    refuse_compressed(path)
    try:
        if isinstance(text_format, Parquet):
            _note_once(note)
            path, index_mapping_dir = write_rows(path, text_format.column, index_mapping_dir), None
        file = MappedFile(path)
        index = load_index(path, text_format.spec, build, index_mapping_dir)
    except OSError as error:
        hint = "check the file and its permissions"
        if error.errno == errno.EMFILE:
            hint = "raise the hard limit (`ulimit -Hn`) above twice the number of files, or merge files"
        raise UserError(f"{path} cannot be read ({error.strerror}): {hint}") from error
    return _Shard(file, file.data, text_format, index, index.sequence.data, index.start.data, index.size.data)


def _build_index(file: MappedFile, text_format: TextFormat) -> RecordIndex:
    """Index a file in blocks: with array operations where possible, else record by record."""
    stops, tables = 0, []

    def entries(start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        nonlocal stops
        for offset, record in text_format.records(file.data, file.path, start, stop):
            try:
                raw = letters = text_format.sequence(record)
                if raw is None or letters is None:
                    continue
                if text_format.proteins:
                    spaceless = raw.translate(None, WHITE_SPACE)
                    letters = spaceless.rstrip(b"*")
                    stops += len(letters) < len(spaceless)
                    if not letters.isalpha() and (wrong := _PERHAPS_WRONG.search(raw)):
                        place = offset + max(record.find(raw), 0) + wrong.start()
                        check_letters(letters, location(file.path, file.data, place))
            except ValueError as error:
                raise record_error(file.path, file.data, offset, error) from error
            sequence = -1
            if (found := record.rfind(letters)) >= 0:
                sequence = offset + found
            elif record.endswith(raw):
                sequence = ~(offset + len(record) - len(raw))
            yield offset, sequence, len(record), len(letters)

    for start, stop in _divide(file, text_format):
        table = text_format.index_block(file.data[start:stop]) if stop - start <= 2 * _BLOCK_BYTES else None
        if table is None:
            table = np.fromiter(entries(start, stop), ENTRY)
        else:
            table["start"] += start
            table["sequence"] += np.where(table["sequence"] < 0, -start, start)
        tables.append(table)
    table = np.concatenate([np.zeros(0, ENTRY), *tables])
    if not len(table):
        raise UserError(f"{file.path} contains no records: check header_lines, or exclude it from the range of files")
    arrays = (np.ascontiguousarray(table[name]) for name in ENTRY.names or ())
    return RecordIndex(*arrays, stops=stops, xxh3_128=hash_file(file))  # type: ignore[arg-type, misc]


def _divide(file: MappedFile, text_format: TextFormat) -> Iterator[tuple[int, int]]:
    """Yield the bounds of blocks of whole records."""
    start, size = text_format.find_start(file.data, file.path), len(file)
    boundary = text_format.find_boundary(file.data)
    while start < size:
        file.check()
        stop = size
        if boundary and size - start > _BLOCK_BYTES:
            stop = file.data.find(boundary, start + _BLOCK_BYTES) + 1 or size
        yield start, stop
        start = stop


def _regular_size(path: Path) -> int:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}): check the path") from error
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{path} is not a regular file and cannot be memory-mapped: give a file")
    if not state.st_size:
        raise UserError(f"{path} is empty: write it again, or exclude it from the range of files")
    return state.st_size


def _show_progress(shards: Iterable[Any]) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    yield from track(shards, "indexing", console=Console(stderr=True), transient=True)


@cache
def _note_once(note: str) -> None:
    if note:
        _log.warning(note)
