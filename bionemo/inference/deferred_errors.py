# SPDX-License-Identifier: Apache-2.0
"""Files for libraries that crash the process when a write fails: the error is raised after the library has finished.

HDF5 writes its caches again when a file is closed and when the process ends, and reads back what it has written. It
crashes if a write or a read fails. torch's writer raises the error in a destructor, which ends the process.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DeferredErrorFile(io.RawIOBase):
    """A new file for writing and reading that keeps all data in memory after the first write error.

    Call `raise_error` often, to bound the memory.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x+b", buffering=0)
        self._error: OSError | None = None
        self._unwritten: list[tuple[int, bytes]] = []  # offsets and data that could not be written, in order
        self._unset_size = 0  # size that `truncate` could not set

    def raise_error(self) -> None:
        """Raise the first error, if there was one.

        Raises:
            OSError: the error.
        """
        if self._error is not None:
            raise self._error

    def write(self, data: Any) -> int:
        """Write all data and return its size in bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self._error is None:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as error:
            self._error = error
        if left:
            self._unwritten.append((self._file.tell(), bytes(left)))
            self._file.seek(len(left), os.SEEK_CUR)
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the size in bytes and return it."""
        size = self.tell() if size is None else size
        try:
            if self._error is None:
                self._file.truncate(size)
        except OSError as error:
            self._error = error
        self._unset_size = size if self._error else 0
        return size

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes, 0 at the end of the file."""
        view, start = memoryview(buffer).cast("B"), self._file.tell()
        count = self._file.readinto(view) or 0
        if self._error is not None:
            end = min(len(view), max(self._size() - start, count))
            view[count:end] = bytes(max(end - count, 0))
            for offset, data in self._unwritten:
                first, last = max(offset, start), min(offset + len(data), start + end)
                if first < last:
                    view[first - start : last - start] = data[first - offset : last - offset]
            count = end
            self._file.seek(start + count)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position and return it."""
        if whence == os.SEEK_END and self._error is not None:
            return self._file.seek(self._size() + offset)
        return self._file.seek(offset, whence)

    def _size(self) -> int:
        """Return the size in bytes that the file would have without the error."""
        ends = (offset + len(data) for offset, data in self._unwritten)
        return max(os.fstat(self._file.fileno()).st_size, self._unset_size, *ends, 0)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()


@contextmanager
def defer_errors(path: Path) -> Iterator[DeferredErrorFile]:
    """Create a file whose write errors are raised at the end of the context.

    Raises:
        OSError: if the file cannot be created or written; it replaces any error of the library.
    """
    with DeferredErrorFile(path) as file:
        try:
            yield file
        except Exception:
            file.raise_error()
            raise
        file.raise_error()
