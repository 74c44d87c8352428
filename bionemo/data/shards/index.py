# SPDX-License-Identifier: Apache-2.0
"""The file that says where the records of one text shard are.

It has the layout of a safetensors file (8-byte header length, JSON header, raw little-endian arrays), so reading it
executes nothing and any safetensors reader shows what is in it. Its header is a pure function of what was asked for
and of the state of the data; a reader renders that header anew and compares bytes, so an index of another file, of
another state of the file, for other columns or by another version is never mistaken for the one wanted.
"""

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from bionemo.common.mapped import MappedFile

VERSION = 3  # since 2, no sequence of a FASTA file holds a '>'; since 3, the content of the data is hashed
UNWRAPPED = int(np.iinfo(np.int32).max)
_SAMPLES = 18  # head, tail and sixteen between
_SAMPLE_BYTES = 16 << 10
_MAX_HEADER = 1 << 20
_MOST_TIMES = 256  # status change times that an index remembers
_CHECKED = 1 << 20  # records checked at a time
_HASHED = 4 << 20  # bytes hashed at a time

Spec = dict[str, Any]
"""What the index is of: the format of the text and the columns wanted, as plain JSON values."""


class Fingerprint(NamedTuple):
    """The state of a data file, as far as it can be told without reading all of it."""

    size: int
    mtime_ns: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> "Fingerprint":
        """Take the size, the time of change and the hash of 18 evenly spread samples of 16 KiB.

        What this notices: any change of size or of modification time, and any change at all to a file of up to
        288 KiB, to the first or last 16 KiB of a larger one, or to a sample between. What it does not: bytes
        overwritten between samples by something that also puts the old modification time back. `load_index` notices
        those too, by the status change time and, where that is another one, by a hash of the whole file.
        """
        with path.open("rb", buffering=0) as file:
            state = os.fstat(file.fileno())
            digest = hashlib.blake2b(digest_size=16)
            last = max(0, state.st_size - _SAMPLE_BYTES)
            for place in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, place))
        return cls(state.st_size, state.st_mtime_ns, digest.hexdigest())


class ContentHash:
    """The hash of a whole file, computed piece by piece while something else reads it."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._hash = path, 0, xxhash.xxh3_128()

    def advance(self, count: int) -> None:
        """Hash the next bytes, which were just read and so are in the page cache."""
        with self._path.open("rb", buffering=0) as file:
            while count > 0 and (data := os.pread(file.fileno(), min(count, _HASHED), self._place)):
                self._hash.update(data)
                self._place, count = self._place + len(data), count - len(data)

    def digest(self) -> str:
        """Hash what is left of the file, and give the hash in hexadecimal."""
        self.advance(1 << 62)
        return self._hash.hexdigest()


@dataclass
class Table:
    """Places of the n records of a shard, each of F fields, one of which is the sequence.

    Attributes:
        offset: F arrays int64 [n], first byte of the field.
        length: F arrays int32 [n], bytes of the field as it stands in the file.
        letters: int32 [n], letters of the sequence.
        width: int32 [n], letters per line of the sequence; 0 where its lines are uneven or it must be decoded as a
            whole. Empty if `wrap` says it for all of them.
        crlf: whether lines end in CR LF.
        wrap: letters per line in all of the shard (UNWRAPPED if each sequence is one line); 0 if that differs.
        content: hash of the whole data file, see `ContentHash`; "": unknown.
        ctimes_ns: status change times that the data file had when it was known to have this content: that of copies
            differ.
        file: the mapped index that the arrays are views of; None: they are in memory.
    """

    offset: list[np.ndarray]
    length: list[np.ndarray]
    letters: np.ndarray
    width: np.ndarray
    crlf: bool
    wrap: int = 0
    content: str = ""
    ctimes_ns: tuple[int, ...] = ()
    file: MappedFile | None = None

    def __len__(self) -> int:
        """Give the number of records."""
        return len(self.letters)

    @classmethod
    def join(cls, parts: Sequence["Table"]) -> "Table":
        """Put tables of successive parts of a shard one behind the other."""
        letters = np.concatenate([part.letters for part in parts])
        width = np.concatenate([part.width for part in parts])
        on_one_line = width == letters
        wrap, least = width.max(initial=0, where=~on_one_line), width.min(initial=UNWRAPPED, where=~on_one_line)
        if least == UNWRAPPED:
            wrap = UNWRAPPED
        elif wrap != least or letters.max(initial=0, where=on_one_line) > wrap:
            wrap = 0
        return cls(
            offset=[np.concatenate(field) for field in zip(*(part.offset for part in parts), strict=True)],
            length=[np.concatenate(field) for field in zip(*(part.length for part in parts), strict=True)],
            letters=letters,
            width=np.empty(0, np.int32) if wrap else width,
            crlf=any(part.crlf for part in parts),
            wrap=int(wrap),
        )

    def arrays(self) -> Iterator[np.ndarray]:
        """Give the arrays in the order of the file."""
        yield from (*self.offset, *self.length, self.letters, self.width)


def write_index(path: Path, spec: Spec, fingerprint: Fingerprint, table: Table) -> None:
    """Write an index so that it appears under its name whole or not at all.

    Raises:
        OSError: the place cannot be written; nothing is left behind there.
    """
    about = {
        "records": len(table),
        "crlf": table.crlf,
        "wrap": table.wrap,
        "content": table.content,
        "ctimes_ns": table.ctimes_ns[-_MOST_TIMES:],
    }
    checksum = zlib.crc32(_header(spec, fingerprint, about, checksum=0))
    for array in table.arrays():
        checksum = zlib.crc32(array.data, checksum)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_header(spec, fingerprint, about, checksum))
            for array in table.arrays():
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_index(path: Path, spec: Spec, fingerprint: Fingerprint) -> Table | None:
    """Map an index into memory.

    Returns:
        The table, its arrays read-only views of the file; None if there is no index, or not for this data in this
        state, if a single bit of it is wrong, or if it names places outside the data.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError), path.open("rb") as file:
        start = 8 + min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)
        file.seek(0)
        header = file.read(start)
        notes = json.loads(header[8:])["__metadata__"]
        about, checksum = json.loads(notes["about"]), int(notes["checksum"])
        if header != _header(spec, fingerprint, about, checksum):
            return None
        layout = _layout(len(spec["fields"]), about)
        mapped = MappedFile(path)
        if mapped.data[:start] != header:
            return None  # replaced since it was opened
        view = memoryview(mapped.data)
        if len(view) != start + sum(4 * n if kind == "I32" else 8 * n for _, kind, n in layout):
            return None
        if zlib.crc32(view[start:], zlib.crc32(_header(spec, fingerprint, about, checksum=0))) != checksum:
            return None
        arrays = []
        for _, kind, count in layout:
            dtype = np.dtype("<i8" if kind == "I64" else "<i4")
            arrays.append(np.frombuffer(view, dtype, count, start))
            start += count * dtype.itemsize
        *columns, letters, width = arrays
        half = len(columns) // 2
        table = Table(
            columns[:half], columns[half:], letters, width, bool(about["crlf"]), int(about["wrap"]),
            str(about["content"]), tuple(map(int, about["ctimes_ns"])), mapped,
        )  # fmt: skip
        return table if _within(table, fingerprint.size, spec["sequence"]) else None
    return None


def _within(table: Table, size: int, sequence: int) -> bool:
    """Whether all places lie in a file of `size` bytes, and no sequence has more letters than bytes.

    A checksum tells of damage, but not of an index that somebody wrote by hand.
    """
    if not 0 <= table.wrap <= UNWRAPPED:
        return False
    for first in range(0, len(table), _CHECKED):
        part = slice(first, first + _CHECKED)
        for offset, length in zip(table.offset, table.length, strict=True):
            begin, count = offset[part], length[part]
            if begin.min() < 0 or begin.max() > size or count.min() < 0 or (begin + count).max() > size:
                return False
        letters = table.letters[part]
        if letters.min() < 0 or (letters > table.length[sequence][part]).any():
            return False
    return not len(table.width) or bool(table.width.min() >= 0)


def _layout(fields: int, about: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Name, type and number of entries of each array, in the order of the file."""
    records = about["records"]
    return [
        *((f"offset.{field}", "I64", records) for field in range(fields)),
        *((f"length.{field}", "I32", records) for field in range(fields)),
        ("letters", "I32", records),
        ("width", "I32", 0 if about["wrap"] else records),
    ]


def _header(spec: Spec, fingerprint: Fingerprint, about: dict[str, Any], checksum: int) -> bytes:
    """Render the header behind its 8-byte length; the checksum is taken of a header with 0 in it, then the arrays."""
    notes = {
        "format": "bionemo-index",
        "version": str(VERSION),
        "spec": json.dumps(spec, sort_keys=True),
        "data": json.dumps(fingerprint._asdict()),
        "about": json.dumps(about),
        "checksum": str(checksum),
    }
    header: dict[str, Any] = {"__metadata__": notes}
    place = 0
    for name, kind, count in _layout(len(spec["fields"]), about):
        end = place + count * (8 if kind == "I64" else 4)
        header[name] = {"dtype": kind, "shape": [count], "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    return len(text).to_bytes(8, "little") + text
