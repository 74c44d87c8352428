# SPDX-License-Identifier: Apache-2.0
"""Size and checksum of files, and whether a file is still the one that was read."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bionemo.common.errors import UserError
from bionemo.common.regular import open_regular
from bionemo.preparation.progress import progress

_BLOCK = 4 << 20
_SAMPLES, _SAMPLE = 64, 64 << 10  # blocks, and bytes of each


@dataclass(frozen=True)
class OutputFile:
    """A file that was written."""

    size: int
    sha256: str
    rows: int | None = None  # records, for a CSV file with one header line


@dataclass(frozen=True)
class InputFile:
    """A file that was read: where it came from, and its bytes.

    Attributes:
        source: path or URL.
        size: in bytes.
        sha256: of all bytes.
        mtime_ns: time of its last change; None in manifests of earlier versions.
        sample: SHA-256 of blocks at regular distances, of the whole file if it is small; None as above.
    """

    source: str
    size: int
    sha256: str
    mtime_ns: int | None = None
    sample: str | None = None

    @classmethod
    def of(cls, source: str, path: Path, found: OutputFile) -> "InputFile":
        """Describe a file that lies at a path and has been read."""
        return cls(source, found.size, found.sha256, path.stat().st_mtime_ns, _sampled(path, found.size))

    def is_as_read(self, path: Path) -> bool:
        """Whether a file has the size and checksum of this one; it is read through."""
        return path.stat().st_size == self.size and measure(path).sha256 == self.sha256

    def is_unchanged(self, path: Path) -> bool:
        """Whether a file is this one.

        One of the same size and time of change is read in samples only, any other of this size is read through.
        """
        found = path.stat()
        if found.st_size != self.size:
            return False
        if self.sample is not None and found.st_mtime_ns == self.mtime_ns:
            return _sampled(path, self.size) == self.sample
        with progress(f"comparing {path.name} with the file that was prepared", self.size) as advance:
            return measure(path, advance).sha256 == self.sha256


def _sampled(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with _opened(path) as file:
        if size <= _SAMPLES * _SAMPLE:
            starts = range(0, size, _SAMPLE)
        else:
            starts = range(0, size - _SAMPLE + 1, (size - _SAMPLE) // (_SAMPLES - 1))
        for start in starts:
            digest.update(os.pread(file.fileno(), _SAMPLE, start))
    return digest.hexdigest()


def measure(path: Path, advance: Callable[[int], object] = lambda count: None, csv: bool = False) -> OutputFile:
    """Read a file through: its size, checksum and, of a CSV file, its rows below the header.

    Raises:
        UserError: it is not a regular file.
        OSError: it cannot be read.
    """
    digest, size, lines = hashlib.sha256(), 0, 0
    with _opened(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
            lines += block.count(b"\n") if csv else 0
            advance(len(block))
    return OutputFile(size, digest.hexdigest(), lines - 1 if csv else None)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): give a regular file") from error
