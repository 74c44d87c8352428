# SPDX-License-Identifier: Apache-2.0
"""Files for libraries that crash the process when a write fails: they are told of no error, their caller is."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LateErrorFile(io.RawIOBase):
    """A new file that is written and read; after the first error it keeps what is written in memory.

    `raise_error` raises that error: call it often, to bound the memory. HDF5 writes its caches again when a file is
    closed and when the process ends, reads back what it has written, and faults where either fails; torch's writer
    raises from a destructor.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x+b", buffering=0)
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []  # positions and bytes that could not be written, in their order
        self._end = 0  # size that could not be set

    def raise_error(self) -> None:
        """Raise the first error, if there was one.

        Raises:
            OSError: the error.
        """
        if self._error is not None:
            raise self._error

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def writable(self) -> bool:
        """Whether it can be written."""
        return True

    def seekable(self) -> bool:
        """Whether it has positions."""
        return True

    def write(self, data: Any) -> int:
        """Write all of it; its size in bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self._error is None:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as error:
            self._error = error
        if left:
            self._kept.append((self._file.tell(), bytes(left)))
            self._file.seek(len(left), os.SEEK_CUR)
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the size in bytes; give it."""
        size = self.tell() if size is None else size
        try:
            if self._error is None:
                self._file.truncate(size)
        except OSError as error:
            self._error = error
        self._end = size if self._error else 0
        return size

    def readinto(self, buffer: Any) -> int:
        """Read; the number of bytes, 0 at the end."""
        view, start = memoryview(buffer).cast("B"), self._file.tell()
        count = self._file.readinto(view) or 0
        if self._error is not None:
            end = min(len(view), max(self._size() - start, count))
            view[count:end] = bytes(max(end - count, 0))
            for at, data in self._kept:
                first, last = max(at, start), min(at + len(data), start + end)
                if first < last:
                    view[first - start : last - start] = data[first - at : last - at]
            count = end
            self._file.seek(start + count)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position; give it."""
        if whence == os.SEEK_END and self._error is not None:
            return self._file.seek(self._size() + offset)
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The position."""
        return self._file.tell()

    def _size(self) -> int:
        """The size in bytes that the file would have."""
        return max(os.fstat(self._file.fileno()).st_size, self._end, *(at + len(data) for at, data in self._kept), 0)

    def close(self) -> None:
        """Close it."""
        super().close()
        self._file.close()


@contextmanager
def written_to(path: Path) -> Iterator[LateErrorFile]:
    """Make a file for such a library.

    Raises:
        OSError: when the file cannot be made, or a write has failed; whatever the library has made of that is dropped.
    """
    with LateErrorFile(path) as file:
        try:
            yield file
        except Exception:
            file.raise_error()
            raise
        file.raise_error()
