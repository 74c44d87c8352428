# SPDX-License-Identifier: Apache-2.0
"""Files mapped into memory, checked before they are read: a page beyond the end of a file ends the process."""

import mmap
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError


class MappedFile:
    """A file mapped into memory for reading.

    Reading a page that the file has lost since it was mapped raises SIGBUS, which ends the process without a message.
    Code that reads calls `check` before, once for many reads: it costs a system call.

    Pickles as its path: another process maps the file again.

    Attributes:
        path: the file.
        data: its bytes.
    """

    __slots__ = ("data", "path")

    def __init__(self, path: str | Path) -> None:
        """Map a whole file.

        Raises:
            OSError: the file cannot be opened or mapped.
            ValueError: the file is empty.
        """
        self.path = Path(path)
        with self.path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        """Bytes that were mapped."""
        return len(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedFile, (self.path,)

    def check(self) -> None:
        """See that the file is as long as it was when it was mapped.

        The content is not compared: a file replaced by renaming another one leaves the mapped one as it is.

        Raises:
            UserError: the file has become shorter, or is not there any more.
        """
        try:
            size = self.data.size()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read any more ({error.strerror}): check its file system, then start again"
            ) from error
        if size < len(self.data):
            raise UserError(
                f"{self.path} was cut short while it was in use, from {len(self.data):,} to {size:,} bytes: restore "
                "the file, then start again"
            )
