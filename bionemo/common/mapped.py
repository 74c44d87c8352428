# SPDX-License-Identifier: Apache-2.0
"""Memory-mapped files, whose size is checked before reads: a page beyond the end of a file kills the process."""

import mmap
import os
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError


class MappedFile:
    """A file mapped into memory for reading.

    Reading a page beyond the end of a file that was truncated after mapping raises SIGBUS, which kills the process
    without a message. Callers therefore call `check` before reading, once for many reads, because it is a system call.

    Pickles as its path; the copy maps the file again.
    """

    __slots__ = ("_inode", "_written_at", "data", "path")

    def __init__(self, path: str | Path) -> None:
        """Map a whole file.

        Raises:
            OSError: if the file cannot be opened or mapped.
            ValueError: if the file is empty.
        """
        self.path = Path(path)
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._inode, self._written_at = status.st_ino, status.st_mtime_ns

    def __len__(self) -> int:
        return len(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedFile, (self.path,)

    def check(self) -> None:
        """Raise a UserError if the file was truncated or deleted since it was mapped.

        The content is not compared: if the file is replaced by renaming another one, the mapped file stays unchanged.
        """
        try:
            size = self.data.size()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read any more ({error.strerror}): check its file system, then start again"
            ) from error
        if size < len(self.data):
            raise UserError(
                f"{self.path} was truncated from {len(self.data):,} to {size:,} bytes while it was in use: restore "
                "the file, then start again"
            )

    def was_written(self) -> bool:
        """Return whether the file has another modification time than when it was mapped or at the last call.

        A file that replaced it at its path does not count, because the mapped file is unchanged.
        """
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        if status.st_ino != self._inode or status.st_mtime_ns == self._written_at:
            return False
        self._written_at = status.st_mtime_ns
        return True
