# SPDX-License-Identifier: Apache-2.0
"""Read a text file front to back in blocks of whole records, in bounded memory."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bionemo.common.errors import UserError

BLOCK = 1 << 20  # bytes: what is computed from a block of this size stays in the cache and on recycled pages
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Some whole records.

    Attributes:
        base: place of the block's first byte in the file.
        data: bytes read; those from `end` on belong to the next block.
        end: how many bytes of `data` are whole records; the last of them is a line end.
        closed: False where the file does not end in a line end, and one was put there.
    """

    base: int
    data: bytes
    end: int
    closed: bool

    @property
    def letters(self) -> np.ndarray:
        """The whole records as uint8 [end]."""
        return np.frombuffer(self.data, np.uint8, self.end)

    def has(self, text: bytes) -> bool:
        """Say whether some bytes occur in the whole records."""
        return self.data.find(text, 0, self.end) >= 0


def blocks(
    path: Path,
    cut: Callable[[bytes], int],
    *,
    start: int | None = None,
    stop: int | None = None,
    newline: bytes = b"\n",
    limit: int = 1 << 31,
) -> Iterator[Block]:
    """Go through a file in blocks of about BLOCK bytes that hold whole records only.

    Args:
        path: a regular file.
        cut: tells of some bytes, the first of which begins a record, how many of them are whole records.
        start: place of the first record; None: the top of the file, less a byte order mark.
        stop: place of a record's begin that is not read any more; None: the end of the file.
        newline: the byte that ends a line.
        limit: bytes a single record may have; int32 can count those of the default.

    Raises:
        UserError: an empty file, a record over the limit, a file that shrinks while it is read.
    """
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        if total == 0:
            raise UserError(f"{path} is empty: write it again, or leave it out of the range of files")
        if start is None:
            start = len(BYTE_ORDER_MARK) if os.pread(file.fileno(), 3, 0) == BYTE_ORDER_MARK else 0
        base, want, stop = start, BLOCK, total if stop is None else stop
        while base < stop:
            # reading again from the last record's begin costs less than carrying its first half over
            data = os.pread(file.fileno(), min(want, stop - base), base)
            if not data:
                raise UserError(f"{path} became shorter while it was read: wait until it is written, then start again")
            if base + len(data) == stop:
                closed = data.endswith(newline)
                data = data if closed else data + newline
                yield Block(base, data, len(data), closed)
                return
            end = cut(data)
            if end:
                yield Block(base, data, end, True)
                base, want = base + end, BLOCK
            elif want >= limit:
                line = line_number(path, base, newline)
                raise UserError(
                    f"{path}:{line}: a record of over {limit:,} bytes begins here: split it, or close its quote"
                )
            else:
                want *= 2


def line_number(path: Path, offset: int, newline: bytes = b"\n") -> int:
    """Number, from 1, of the line that holds a byte; slow, for messages only."""
    lines = 1
    with path.open("rb") as file:
        while offset > 0 and (data := file.read(min(BLOCK, offset))):
            lines += data.count(newline)
            offset -= len(data)
    return lines
