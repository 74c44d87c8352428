# SPDX-License-Identifier: Apache-2.0
"""Size and checksum of files, and detection of input files that have changed."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bionemo.common.files import replacing
from bionemo.common.progress import progress

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class OutputFile:
    """Size and checksum of a file."""

    size: int
    sha256: str
    rows: int | None = None  # number of records of a CSV file with one header line, or of a parquet file


@dataclass(frozen=True)
class InputFile:
    """Origin, size and checksum of an input file."""

    source: str  # path or URL
    size: int  # number of bytes
    sha256: str  # checksum of all bytes
    mtime_ns: int | None = None  # modification time; None in manifests of earlier versions

    def matches(self, path: Path) -> bool:
        """Return whether a file has this size and checksum; all its bytes are read."""
        return path.stat().st_size == self.size and checksum_file(path).sha256 == self.sha256

    def is_unchanged(self, path: Path) -> bool:
        """Return whether a file is this one; it is read if its size is equal and its modification time is not."""
        found = path.stat()
        if found.st_size != self.size or found.st_mtime_ns == self.mtime_ns:
            return found.st_size == self.size
        with progress(f"comparing {path.name} with the file that was prepared", self.size) as advance:
            return checksum_file(path, advance).sha256 == self.sha256


def checksum_file(path: Path, advance: Callable[[int], object] = lambda count: None, csv: bool = False) -> OutputFile:
    """Compute size and checksum of a file and, if it is a CSV file, the number of rows below its header.

    Raises:
        OSError: if it cannot be read.
    """
    digest, size, lines = hashlib.sha256(), 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
            lines += block.count(b"\n") if csv else 0
            advance(len(block))
    return OutputFile(size, digest.hexdigest(), lines - 1 if csv else None)


def write_with_checksum(
    path: Path, parts: Iterable[bytes | memoryview], rows: int | None = None, flush: bool = True
) -> OutputFile:
    """Write a file and compute its checksum; with `flush`, wait until it is on disk."""
    digest, size = hashlib.sha256(), 0
    with replacing(path, durable=flush) as new, new.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return OutputFile(size, digest.hexdigest(), rows)
