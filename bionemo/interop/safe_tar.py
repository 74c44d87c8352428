# SPDX-License-Identifier: Apache-2.0
"""A tar from anywhere, read in place: its members are named and measured, nothing is unpacked or written.

The format is POSIX.1-2017's (pax, "ustar Interchange Format" and "pax Extended Header"). Only plain files and
directories are let through: whatever else a tar can hold, an archive of weights has no use for.
"""

import gzip
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from bionemo.common.errors import UserError

BLOCK = tarfile.BLOCKSIZE
_MOST_MEMBERS = 10_000
_MOST_PAX = 1 << 16  # bytes of extended header before one member
# Weights shrink by a tenth or so, by a half where they came from a shorter type; a bomb shrinks a thousandfold.
_MOST_EXPANSION = 20
_SMALL = 16 << 20  # bytes that a gzipped archive may expand to in any case


class Member(io.RawIOBase):
    """The bytes of one member, as a file that can be read and sought in."""

    def __init__(self, archive: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self.archive, self.start, self.size = archive, start, size
        self.position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, never before the beginning."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = max(0, origin + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Fill as much of the buffer as the member can."""
        wanted = memoryview(buffer).cast("B")
        self.archive.seek(self.start + self.position)
        count = self.archive.readinto(wanted[: max(0, self.size - self.position)])  # type: ignore[attr-defined]
        self.position += count
        return int(count)


@contextmanager
def opened(path: Path) -> Iterator[dict[str, Member]]:
    """Open a tar, gzipped or not, and give its files by their names, without a leading "./".

    A gzipped one is expanded into a nameless temporary file first, to no more than 20 times its size (or 16 MiB).

    Raises:
        UserError: for a damaged archive, and one that holds what could reach outside it or is larger than it seems.
        OSError: when it cannot be read, or expanded for want of room.
    """
    if not path.is_file():
        raise UserError("there is no such file")
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            yield _members(file)
            return
        with tempfile.TemporaryFile() as plain:
            _expand(file, plain)
            yield _members(plain)


def _expand(file: BinaryIO, plain: Any) -> None:
    limit = max(_SMALL, _MOST_EXPANSION * file.seek(0, os.SEEK_END))
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while piece := stream.read(1 << 20):
                plain.write(piece)
                if plain.tell() > limit:
                    raise UserError(f"it expands to more than {_MOST_EXPANSION} times its size")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError("its compression is damaged") from error


def _members(file: BinaryIO) -> dict[str, Member]:
    try:
        return _scan(file)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers in a header that overflow
        raise UserError("it has a damaged header") from error


def _scan(file: BinaryIO) -> dict[str, Member]:
    size, position = file.seek(0, os.SEEK_END), 0
    found: dict[str, Member] = {}
    pax: dict[str, str] = {}
    for _ in range(_MOST_MEMBERS):
        file.seek(position)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise UserError("it is cut short, or no tar")
        if not any(block):
            return {name: member for name, member in found.items() if member.size >= 0}
        header, start = _header(block), position + BLOCK
        extends = header.type == tarfile.XHDTYPE
        length = header.size if extends else int(pax.get("size", header.size))
        if not 0 <= length <= size - start:
            raise UserError("it is cut short, or claims to be larger than it is")
        if extends:
            pax = _extended(file.read(min(length, _MOST_PAX + 1)))
        else:
            name = _name(pax.get("path", header.name))
            if name in found:
                raise UserError(f"it has two members {name!r}")
            found[name] = Member(file, start, _length(header, name, length))
            pax = {}
        position = start + -(-length // BLOCK) * BLOCK
    raise UserError(f"it has more than {_MOST_MEMBERS} members")


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise UserError("it is damaged, or no tar") from error


def _length(header: tarfile.TarInfo, name: str, length: int) -> int:
    """Bytes of a file, -1 for a directory."""
    if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return length
    if header.type == tarfile.DIRTYPE and length == 0:
        return -1
    raise UserError(f"its member {name!r} is neither a plain file nor a directory")


def _name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or len(name) > 255:
        raise UserError(f"it has a member named {name[:80]!r}")
    return str(path)


def _extended(data: bytes) -> dict[str, str]:
    """Records `length key=value` of a pax header; of these only path and size are heeded."""
    records: dict[str, str] = {}
    while data:
        digits, _, rest = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not (rest and equals and length <= len(data) <= _MOST_PAX and data[length - 1 : length] == b"\n"):
            raise UserError("it has a damaged extended header")
        records[key.decode(errors="replace")] = value.decode(errors="replace")
        data = data[length:]
    if any(key.startswith("GNU.sparse") for key in records) or not records.get("size", "0").isdecimal():
        raise UserError("it has a sparse member, or one of no size")
    return records
