# SPDX-License-Identifier: Apache-2.0
"""Random access to the sequences of memory-mapped text files; base class of the CSV and FASTA sources."""

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
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import is_local_rank_zero
from bionemo.common.mapped import MappedFile
from bionemo.data.shards.blocks import RecordBlock
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.data.shards.index import UNWRAPPED, ContentHash, IndexSpec, RecordIndex
from bionemo.data.shards.index_store import load_index
from bionemo.tokenizers.residues import note_stops

_log = logging.getLogger(__name__)
_PROGRESS_BAR_BYTES, _PROGRESS_BAR_FILES = 2 << 30, 1000  # less is indexed too quickly for a progress bar


class TextShards(ABC):
    """Records of one or several text files, numbered consecutively in the order of the files.

    The files and their indexes are memory-mapped, so that all processes of a machine share one copy. Objects can be
    used after a fork. When unpickled, they open the files again.

    Attributes:
        paths: the files.
        lengths: int32 [n], letters of each record's sequence.
    """

    def __init__(
        self, paths: Sequence[str | Path], spec: IndexSpec, index_mapping_dir: str | Path | None, workers: int | None
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
    def _scan(self, path: Path) -> Iterator[tuple[RecordBlock, RecordIndex]]:
        """Yield consecutive blocks of a file and their indexes."""

    @abstractmethod
    def _decode(self, raw: bytes) -> bytes:
        """Convert a complete field from its representation in the file."""

    @abstractmethod
    def fields(self, record: int) -> dict[str, str]:
        """Return all fields of a record, including its sequence."""

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
        shards = self._bounds.searchsorted(records, "right") - 1
        numbers = shards.tolist()
        opened, target = self._shards, out.data
        for number in set(numbers):
            opened[number].check()
        stops = starts + counts
        if np.bitwise_or.reduce(records | starts | counts | (self.lengths[records] - stops)) < 0:  # any sign bit
            raise IndexError("gather: records or letters that do not exist")
        indices = records - self._bounds[shards]
        first, last = starts, stops  # in bytes from the start of the sequence in the file
        if self._wraps:
            width, line_end_size = self._wrap[shards], self._line_end_size[shards]
            first = starts + starts // width * line_end_size
            last = stops + np.maximum(stops - 1, 0) // width * line_end_size
        # One slice per record is twice as fast as one index per letter, and its cost does not depend on the number of
        # shards. Python integers, because NumPy scalars would cost more than the copy.
        columns = (column.tolist() for column in (indices, first, last, counts, offsets))
        for shard, index, a, b, count, offset in zip(numbers, *columns, strict=True):
            data, begins, widths, line_end, _, _ = opened[shard]
            if widths is None:
                begin = begins[index]
                piece = data[begin + a : begin + b]
                if b - a != count:
                    piece = piece.replace(line_end, b"")
            else:
                piece = self._slice_uneven(opened[shard], index, a, b)
            if len(piece) != count:
                raise UserError(
                    f"{self.paths[shard]} changed while it was in use and no longer matches its index; wait until it "
                    "is written, then start again"
                )
            target[offset : offset + count] = piece

    def text(self, record: int) -> str:
        """Return a whole sequence."""
        shard, index = self._locate(record)
        return self._decode(self._cell(shard, index, self._sequence_field)).decode()

    def _locate(self, record: int) -> "tuple[_Shard, int]":
        """Return the shard of a record and the index of the record in it."""
        if not 0 <= record < len(self):
            raise IndexError(f"record {record} of {len(self)}")
        shard = int(np.searchsorted(self._bounds, record, side="right")) - 1
        self._shards[shard].check()
        return self._shards[shard], record - int(self._bounds[shard])

    def _cell(self, shard: "_Shard", index: int, field: int) -> bytes:
        """Return the bytes of a field in the file."""
        begin = int(shard.record_index.offset[field][index])
        return shard.data[begin : begin + int(shard.record_index.length[field][index])]

    def _slice_uneven(self, shard: "_Shard", index: int, start: int, stop: int) -> bytes:
        """Return letters [start, stop) of a sequence in a shard with several line widths."""
        width = shard.widths[index] if shard.widths else 0
        if width == 0:
            return self._decode(self._cell(shard, index, self._sequence_field))[start:stop]
        begin, line_end = shard.begins[index], shard.line_end
        first = begin + start + start // width * len(line_end)
        last = begin + stop + max(stop - 1, 0) // width * len(line_end)
        piece = shard.data[first:last]
        return piece if last - first == stop - start else piece.replace(line_end, b"")

    def _open(self) -> None:
        """Map all files and their indexes. Missing indexes are built, several at a time."""
        sizes = [_regular_size(path) for path in self.paths]
        workers = max(1, min(self._workers or (os.cpu_count() or 2) // 2, len(self.paths)))
        with _progress_bar(sum(sizes), len(sizes)) as progress, ThreadPoolExecutor(workers) as pool:
            try:
                self._shards = list(pool.map(lambda path: self._open_shard(path, progress), self.paths))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        indexes = [shard.record_index for shard in self._shards]
        self._bounds = np.cumsum([0, *map(len, indexes)])[:-1]
        self._wrap = np.array([index.wrap or UNWRAPPED for index in indexes])
        self._wraps = bool((self._wrap != UNWRAPPED).any())
        self._line_end_size = np.array([len(shard.line_end) for shard in self._shards])
        letters = [index.letters for index in indexes]
        self.lengths = letters[0] if len(letters) == 1 else np.concatenate(letters)
        self.lengths.flags.writeable = False
        if dos := [path for path, index in zip(self.paths, indexes, strict=True) if index.crlf]:
            more = f" and {len(dos) - 1} more" if len(dos) > 1 else ""
            _log.warning("%s%s: lines end in CR LF (Windows); the CR is ignored", dos[0], more)
        if stops := sum(index.stops for index in indexes):
            note_stops(str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths):,} files", stops, len(self))

    def _open_shard(self, path: Path, progress: Callable[[int], object]) -> "_Shard":
        def build() -> RecordIndex:
            content, parts = ContentHash(path), []
            for block, part in self._scan(path):
                content.update(block)
                progress(block.end)
                parts.append(part)
            return replace(RecordIndex.join(parts), content=content.digest())

        refuse_compressed(path)
        try:
            index = load_index(path, self._spec, build, self._index_mapping_dir)
            return _Shard.open(path, index, self._sequence_field)
        except OSError as error:
            hint = "check the file and its permissions"
            if error.errno == errno.EMFILE:
                hint = f"raise the hard limit (`ulimit -Hn`) above {2 * len(self.paths) + 256:,}, or merge files"
            raise UserError(f"{path} cannot be read ({error.strerror}): {hint}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in self.__dict__.keys() - {"_shards", "lengths"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _Shard(NamedTuple):
    """An open file."""

    data: mmap
    # offset of each sequence; like `widths` a memoryview, whose single items are faster to read than an array's
    begins: memoryview
    widths: memoryview | None  # letters per line of each record, see `RecordIndex`; None if all are equal
    line_end: bytes  # line end in sequences
    record_index: (
        RecordIndex  # offsets of all fields. Index files are only replaced by renaming, so they need no check
    )
    file: MappedFile  # the file of `data`

    @classmethod
    def open(cls, path: Path, index: RecordIndex, sequence: int) -> "_Shard":
        file = MappedFile(path)
        widths = None if index.wrap else index.width.data
        line_end = b"\r\n" if index.crlf else b"\n"
        return cls(file.data, index.offset[sequence].data, widths, line_end, index, file)

    def check(self) -> None:
        """Raise a UserError if the file was truncated, deleted or overwritten; `touch` is no change."""
        self.file.check()
        if self.file.was_written() and ContentHash(self.file.path).digest() != self.record_index.content:
            raise UserError(
                f"{self.file.path} was overwritten while it was in use: restore the file, or start again with the "
                "new data"
            )


def _regular_size(path: Path) -> int:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}): check the path") from error
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{path} is not a regular file and cannot be memory-mapped: give a file")
    return state.st_size


@contextmanager
def _progress_bar(size: int, files: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar while large or many files are indexed; without a terminal, print one note.

    Only the first rank of each machine shows it, and nothing appears if all indexes exist.
    """
    if (size < _PROGRESS_BAR_BYTES and files < _PROGRESS_BAR_FILES) or not is_local_rank_zero():
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        yield lambda count: _note_indexing(size, files)
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("indexing", total=size)

    def advance(count: int) -> None:
        bar.start()
        bar.advance(task, count)

    try:
        yield advance
    finally:
        bar.stop()


@cache
def _note_indexing(size: int, files: int) -> None:
    _log.warning("indexing %s files (%s MiB), once", f"{files:,}", f"{size >> 20:,}")
