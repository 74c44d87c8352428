# SPDX-License-Identifier: Apache-2.0
"""Read a text file sequentially in blocks of whole records, in bounded memory."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.formats import BYTE_ORDER_MARK

BLOCK_BYTES = 1 << 20  # arrays computed from a block of this size stay in the CPU cache


class RecordBlock(NamedTuple):
    """Consecutive whole records of a file."""

    base: int  # offset of the first byte in the file
    data: bytes  # bytes that were read; those from `end` on belong to the next block
    end: int  # number of bytes of `data` in whole records; the last of them ends a line
    closed: bool  # False if the file does not end with a line end and one was added

    @property
    def array(self) -> np.ndarray:
        """The whole records as uint8 [end]."""
        return np.frombuffer(self.data, np.uint8, self.end)

    def contains(self, text: bytes) -> bool:
        """Return whether the whole records contain these bytes."""
        return self.data.find(text, 0, self.end) >= 0


class LineBlock(NamedTuple):
    """Consecutive whole lines of a file."""

    display_path: str  # path or URL of the file, for messages
    first_line: int  # number of the first line, from 1
    data: bytes  # the lines; the last line of the file may lack its line end
    size: int  # number of bytes of the (possibly compressed) file that were read for them, for progress


def read_blocks(
    path: Path,
    whole_records: Callable[[bytes], int],
    *,
    start: int | None = None,
    stop: int | None = None,
    newline: bytes = b"\n",
    limit: int = 1 << 31,
) -> Iterator[RecordBlock]:
    """Yield a file in blocks of about BLOCK_BYTES bytes that contain only whole records.

    Args:
        path: a regular file.
        whole_records: given bytes that begin with a record, returns how many of them are in whole records.
        start: offset of the first record; None: the beginning of the file, after a byte order mark.
        stop: offset of the first record to leave out; None: the end of the file.
        newline: the byte that ends a line.
        limit: maximum bytes of a record; by default, what int32 can count.

    Raises:
        UserError: if the file is empty or shrinks while it is read, or a record exceeds the limit.
    """
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        if total == 0:
            raise UserError(f"{path} is empty: write it again, or exclude it from the range of files")
        if start is None:
            start = len(BYTE_ORDER_MARK) if os.pread(file.fileno(), 3, 0) == BYTE_ORDER_MARK else 0
        base, size, stop = start, BLOCK_BYTES, total if stop is None else stop
        while base < stop:
            # reading the last, incomplete record again is cheaper than copying its first part
            data = os.pread(file.fileno(), min(size, stop - base), base)
            if not data:
                raise UserError(f"{path} was truncated while it was read: wait until it is complete, then start again")
            if base + len(data) == stop:
                closed = data.endswith(newline)
                data = data if closed else data + newline
                yield RecordBlock(base, data, len(data), closed)
                return
            end = whole_records(data)
            if end:
                yield RecordBlock(base, data, end, True)
                base, size = base + end, BLOCK_BYTES
            elif size >= limit:
                line = line_number(path, base, newline)
                raise UserError(
                    f"{path}:{line}: a record of over {limit:,} bytes begins here: split it, or close its quote"
                )
            else:
                size *= 2


def line_number(path: Path, offset: int, newline: bytes = b"\n") -> int:
    """Return the number, from 1, of the line at an offset. Reads the file up to it: for error messages only."""
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (data := file.read(min(BLOCK_BYTES, offset))):
            lines += data.count(newline)
            offset -= len(data)
    return lines
