# SPDX-License-Identifier: Apache-2.0
"""Index file of a text shard: the offsets and lengths of its records.

The format is that of safetensors (8-byte header length, JSON header, raw little-endian arrays), so reading it executes
no code and any safetensors reader can display it. The header is a function of the index specification and the state of
the data file. A reader renders the expected header and compares the bytes, so it never accepts an index of another
file, another state of the file, other columns or another version.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from bionemo.common.files import replacing
from bionemo.common.mapped import MappedFile
from bionemo.data.shards.blocks import RecordBlock

VERSION = 4  # since 2, '>' in a FASTA sequence is an error; 3: a hash of the data; 4: proteins are trimmed
UNWRAPPED = int(np.iinfo(np.int32).max)
_SAMPLES = 18  # the beginning, the end, and sixteen between
_SAMPLE_BYTES = 16 << 10
_MAX_HEADER_BYTES = 1 << 20
_MAX_CTIMES = 256  # status change times in an index
_RECORDS_PER_CHECK = 1 << 20
_HASH_BYTES = 4 << 20  # bytes per read
_SMALL_BYTES = 64 << 10  # a smaller index is read, not mapped: a mapped file stays open, and there may be thousands

IndexSpec = dict[str, Any]
"""The text format and the columns to index, as JSON values."""


class FileState(NamedTuple):
    """Size, modification time and hash of samples of a data file."""

    size: int
    mtime_ns: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Read the state of a file, with a hash of 18 evenly spaced samples of 16 KiB.

        The state changes with the size, the modification time, any byte of a file of up to 288 KiB, and any byte of
        the samples of a larger one. It does not change if bytes between the samples are overwritten and the old
        modification time is restored. `load_index` also compares the status change time and, if that differs, a hash
        of the whole file.
        """
        with path.open("rb", buffering=0) as file:
            state = os.fstat(file.fileno())
            digest = hashlib.blake2b(digest_size=16)
            last = max(0, state.st_size - _SAMPLE_BYTES)
            for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
        return cls(state.st_size, state.st_mtime_ns, digest.hexdigest())


class ContentHash:
    """Hash of a whole file, computed while the file is indexed."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._hash = path, 0, xxhash.xxh3_128()

    def update(self, block: RecordBlock) -> None:
        """Hash the bytes before a block that have not been hashed, and the block."""
        if self._offset < block.base:
            self._read_until(block.base)
        end = block.end if block.closed else block.end - 1  # without the added line end
        self._hash.update(memoryview(block.data)[:end])
        self._offset += end

    def digest(self) -> str:
        """Hash the rest of the file and return the hash in hexadecimal."""
        self._read_until(1 << 62)
        return self._hash.hexdigest()

    def _read_until(self, stop: int) -> None:
        with self._path.open("rb", buffering=0) as file:
            while data := os.pread(file.fileno(), min(stop - self._offset, _HASH_BYTES), self._offset):
                self._hash.update(data)
                self._offset += len(data)


@dataclass
class RecordIndex:
    """Offsets of the n records of a shard. Each has F fields, one of which is the sequence."""

    offset: list[np.ndarray]  # F arrays int64 [n], offset of the field in the file
    length: list[np.ndarray]  # F arrays int32 [n], bytes of the field in the file
    letters: np.ndarray  # int32 [n], letters of the sequence
    # int32 [n], letters per line of the sequence; 0 if its lines are uneven or it must be decoded as a whole. Empty if
    # `wrap` is not 0
    width: np.ndarray
    crlf: bool  # whether lines end in CR LF
    stops: int = 0  # number of proteins with a stop codon, `*`, at the end, which is not part of the sequence
    wrap: int = 0  # letters per line in the whole shard (UNWRAPPED if each sequence is one line); 0 if they differ
    content: str = ""  # hash of the whole data file, see `ContentHash`; "" if unknown
    # status change times at which the data file was known to have this content; copies of a file have different ones
    ctimes_ns: tuple[int, ...] = ()
    file: MappedFile | None = None  # the mapped index file of the arrays; None if they are in memory

    def __len__(self) -> int:
        return len(self.letters)

    @classmethod
    def join(cls, parts: Sequence["RecordIndex"]) -> "RecordIndex":
        """Concatenate the indexes of consecutive parts of a shard."""
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
            stops=sum(part.stops for part in parts),
            wrap=int(wrap),
        )

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the arrays in the order of the file."""
        yield from (*self.offset, *self.length, self.letters, self.width)


def write_index(path: Path, spec: IndexSpec, state: FileState, index: RecordIndex) -> None:
    """Write an index file atomically; its checksum detects one that did not reach the disk.

    Raises:
        OSError: if the directory cannot be written; nothing is left behind.
    """
    about = {
        "records": len(index),
        "crlf": index.crlf,
        "stops": index.stops,
        "wrap": index.wrap,
        "content": index.content,
        "ctimes_ns": index.ctimes_ns[-_MAX_CTIMES:],
    }
    checksum = zlib.crc32(_render_header(spec, state, about, checksum=0))
    for array in index.arrays():
        checksum = zlib.crc32(array.data, checksum)
    with replacing(path, durable=False) as temporary, temporary.open("xb") as file:
        file.write(_render_header(spec, state, about, checksum))
        for array in index.arrays():
            file.write(array.data)


def read_index(path: Path, spec: IndexSpec, state: FileState) -> RecordIndex | None:
    """Map an index file into memory, or read a small one; the arrays are read-only.

    Returns None if there is no index, it belongs to another state of the data, it is damaged, or an offset is outside
    the data.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError), path.open("rb") as file:
        start = 8 + min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
        file.seek(0)
        header = file.read(start)
        metadata = json.loads(header[8:])["__metadata__"]
        about, checksum = json.loads(metadata["about"]), int(metadata["checksum"])
        if header != _render_header(spec, state, about, checksum):
            return None
        layout = _array_layout(len(spec["fields"]), about)
        mapped = MappedFile(path) if os.fstat(file.fileno()).st_size > _SMALL_BYTES else None
        if mapped is not None and mapped.data[:start] != header:
            return None  # the file was replaced after it was opened
        view = memoryview(header + file.read() if mapped is None else mapped.data)
        if len(view) != start + sum(4 * n if dtype == "I32" else 8 * n for _, dtype, n in layout):
            return None
        if zlib.crc32(view[start:], zlib.crc32(_render_header(spec, state, about, checksum=0))) != checksum:
            return None
        arrays = []
        for _, name, count in layout:
            dtype = np.dtype("<i8" if name == "I64" else "<i4")
            arrays.append(np.frombuffer(view, dtype, count, start))
            start += count * dtype.itemsize
        *columns, letters, width = arrays
        half = len(columns) // 2
        index = RecordIndex(
            columns[:half], columns[half:], letters, width, bool(about["crlf"]), int(about["stops"]),
            int(about["wrap"]), str(about["content"]), tuple(map(int, about["ctimes_ns"])), mapped,
        )  # fmt: skip
        return index if _is_within(index, state.size, spec["sequence"]) else None
    return None


def _is_within(index: RecordIndex, size: int, sequence: int) -> bool:
    """Return whether all fields are within `size` bytes, and no sequence has more letters than bytes.

    The checksum detects damage, but not a forged index.
    """
    if not 0 <= index.wrap <= UNWRAPPED:
        return False
    for first in range(0, len(index), _RECORDS_PER_CHECK):
        part = slice(first, first + _RECORDS_PER_CHECK)
        for offset, length in zip(index.offset, index.length, strict=True):
            begin, count = offset[part], length[part]
            if begin.min() < 0 or begin.max() > size or count.min() < 0 or (begin + count).max() > size:
                return False
        letters = index.letters[part]
        if letters.min() < 0 or (letters > index.length[sequence][part]).any():
            return False
    return not len(index.width) or bool(index.width.min() >= 0)


def _array_layout(fields: int, about: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return the name, type and size of each array, in the order of the file."""
    records = about["records"]
    return [
        *((f"offset.{field}", "I64", records) for field in range(fields)),
        *((f"length.{field}", "I32", records) for field in range(fields)),
        ("letters", "I32", records),
        ("width", "I32", 0 if about["wrap"] else records),
    ]


def _render_header(spec: IndexSpec, state: FileState, about: dict[str, Any], checksum: int) -> bytes:
    """Return the header with its 8-byte length. The checksum is that of a header with checksum 0 and of the arrays."""
    metadata = {
        "format": "bionemo-index",
        "version": str(VERSION),
        "spec": json.dumps(spec, sort_keys=True),
        "data": json.dumps(state._asdict()),
        "about": json.dumps(about),
        "checksum": str(checksum),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, count in _array_layout(len(spec["fields"]), about):
        end = offset + count * (8 if dtype == "I64" else 4)
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the arrays
    return len(text).to_bytes(8, "little") + text
