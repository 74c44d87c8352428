# SPDX-License-Identifier: Apache-2.0
"""Read the members of untrusted tar archives without extracting them to disk.

The format is POSIX.1-2017's (pax, "ustar Interchange Format" and "pax Extended Header"). Only regular files and
directories are accepted. tarfile's own reader is not used: it stops silently at a damaged header.
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
_MAX_MEMBERS = 10_000
_MAX_PAX = 1 << 16  # bytes of extended header before one member
# gzip compresses weights to at least half of their size, but a decompression bomb to a thousandth.
_MAX_EXPANSION = 20
_MIN_EXPANDED = 16 << 20  # bytes to which every gzipped archive may expand


class Member(io.RawIOBase):
    """The bytes of one member as a seekable file."""

    def __init__(self, archive: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self.archive, self.start, self.size = archive, start, size
        self.position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, which is never negative."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = max(0, origin + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read into the buffer, up to the end of the member."""
        wanted = memoryview(buffer).cast("B")
        self.archive.seek(self.start + self.position)
        count = self.archive.readinto(wanted[: max(0, self.size - self.position)])  # type: ignore[attr-defined]
        self.position += count
        return int(count)


@contextmanager
def open_tar(path: Path) -> Iterator[dict[str, Member]]:
    """Open a tar, gzipped or not, and yield its files by name, without a leading "./".

    A gzipped archive is first expanded into an unnamed temporary file, to at most 20 times its size (or 16 MiB).

    Raises:
        UserError: if the archive is damaged, has members with unsafe names or types, or false sizes.
        OSError: if it cannot be read, or the disk is full.
    """
    if not path.is_file():
        raise UserError("the file does not exist")
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            yield _list_members(file)
            return
        with tempfile.TemporaryFile() as plain:
            _gunzip(file, plain)
            yield _list_members(plain)


def _gunzip(file: BinaryIO, plain: Any) -> None:
    limit = max(_MIN_EXPANDED, _MAX_EXPANSION * file.seek(0, os.SEEK_END))
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while chunk := stream.read(1 << 20):
                plain.write(chunk)
                if plain.tell() > limit:
                    raise UserError(f"it expands to more than {_MAX_EXPANSION} times its size")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError("its compression is damaged") from error


def _list_members(file: BinaryIO) -> dict[str, Member]:
    try:
        return _scan(file)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers that overflow
        raise UserError("it has a damaged header") from error


def _scan(file: BinaryIO) -> dict[str, Member]:
    size, position = file.seek(0, os.SEEK_END), 0
    found: dict[str, Member] = {}
    pax: dict[str, str] = {}
    for _ in range(_MAX_MEMBERS):
        file.seek(position)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise UserError("it is truncated, or not a tar")
        if not any(block):
            return {name: member for name, member in found.items() if member.size >= 0}
        header, start = _parse_header(block), position + BLOCK
        extends = header.type == tarfile.XHDTYPE
        length = header.size if extends else int(pax.get("size", header.size))
        if not 0 <= length <= size - start:
            raise UserError("it is truncated, or a member is larger than the archive")
        if extends:
            pax = _parse_pax(file.read(min(length, _MAX_PAX + 1)))
        else:
            name = _check_name(pax.get("path", header.name))
            if name in found:
                raise UserError(f"it has two members named {name!r}")
            found[name] = Member(file, start, _member_size(header, name, length))
            pax = {}
        position = start + -(-length // BLOCK) * BLOCK
    raise UserError(f"it has more than {_MAX_MEMBERS} members")


def _parse_header(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise UserError("it is damaged, or not a tar") from error


def _member_size(header: tarfile.TarInfo, name: str, length: int) -> int:
    """Return the size of a file in bytes, -1 for a directory."""
    if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return length
    if header.type == tarfile.DIRTYPE and length == 0:
        return -1
    raise UserError(f"its member {name!r} is neither a regular file nor a directory")


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or len(name) > 255:
        raise UserError(f"it has a member with the unsafe name {name[:80]!r}")
    return str(path)


def _parse_pax(data: bytes) -> dict[str, str]:
    """Parse the records `length key=value` of a pax header; only path and size are used."""
    records: dict[str, str] = {}
    while data:
        digits, _, rest = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not (rest and equals and length <= len(data) <= _MAX_PAX and data[length - 1 : length] == b"\n"):
            raise UserError("it has a damaged extended header")
        records[key.decode(errors="replace")] = value.decode(errors="replace")
        data = data[length:]
    if any(key.startswith("GNU.sparse") for key in records) or not records.get("size", "0").isdecimal():
        raise UserError("it has a sparse member, or one with an invalid size")
    return records
