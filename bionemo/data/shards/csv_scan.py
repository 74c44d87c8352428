# SPDX-License-Identifier: Apache-2.0
"""Find the records and columns of a CSV file, with a few array operations per block of it.

Every separator and line end is a delimiter unless an odd number of quotes stands before it. From the sorted places of
the delimiters follow records, columns and their bounds, without a look at the bytes between.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import Block, blocks, line_number
from bionemo.data.shards.index import Table
from bionemo.data.shards.text_shards import Advance

_QUOTE, _RETURN = b'"\r'
_LENGTH_COLUMN = "sequence_length"
_LARGEST_RECORD = 64 << 20  # a quote left open would swallow the rest of the file


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is laid out, and what is wanted of it.

    Attributes:
        fields: names given to the columns wanted.
        columns: their numbers, from 0.
        sequence: which of the fields is the sequence.
        separator: byte between columns.
        newline: byte that ends a record; LF may have a CR before it.
        header_lines: records to leave out at the top.
    """

    fields: tuple[str, ...]
    columns: tuple[int, ...]
    sequence: int
    separator: bytes
    newline: bytes
    header_lines: int

    def whole_records(self, data: bytes) -> int:
        """Find the last line end outside quotes, that is, after an even number of them."""
        end = data.rfind(self.newline)
        if b'"' not in data:  # far faster than counting
            return end + 1
        odd = data.count(b'"', 0, max(end, 0)) % 2
        while end >= 0 and odd:
            earlier = data.rfind(self.newline, 0, data.rfind(b'"', 0, end))
            odd ^= data.count(b'"', max(earlier, 0), end) % 2
            end = earlier
        return end + 1


def scan(path: Path, dialect: Dialect, advance: Advance) -> Iterator[Table]:
    """Go through a CSV file and give the places of its records, block by block.

    Raises:
        UserError: a file without records, or a line that is not what the dialect says, named by its number.
    """
    scanner = _Scanner(path, dialect)
    for block in blocks(path, dialect.whole_records, newline=dialect.newline, limit=_LARGEST_RECORD):
        yield scanner.table(block)
        advance(block.end)
    if not scanner.records:
        header = f" beyond its {dialect.header_lines} header line(s)" if dialect.header_lines else ""
        raise UserError(f"{path} holds no records{header}: check header_lines, or leave it out of the range of files")


class _Scanner:
    """What must be remembered of a file from one block to the next."""

    def __init__(self, path: Path, dialect: Dialect) -> None:
        self.path = path
        self.dialect = dialect
        self.records = 0
        self._header_left = dialect.header_lines
        self._names: list[str] = []
        self._blank: int | None = None  # place in the file of the first blank line

    def table(self, block: Block) -> Table:
        """Find the wanted columns of the records of a block."""
        dialect, text = self.dialect, block.letters
        quotes = self._quotes(block)
        delimiters = np.flatnonzero((text == dialect.newline[0]) | (text == dialect.separator[0]))
        if len(quotes):
            delimiters = delimiters[np.searchsorted(quotes, delimiters) % 2 == 0]
        if not block.data.isascii():
            self._check_utf8(block)

        # of each record: its bounds, and which delimiters are its first and last
        last = np.flatnonzero(text[delimiters] == dialect.newline[0])
        first = np.append(0, last[:-1] + 1)
        stop = delimiters[last]
        start = np.append(0, stop[:-1] + 1)
        crlf = False
        if dialect.newline == b"\n" and block.has(b"\r"):
            returns = (text[stop - 1] == _RETURN) & (stop > start)
            stop, crlf = stop - returns, bool(returns.any())
        rows = self._without_blank(block, self._without_header(block, np.stack([start, stop, first, last])))
        self._check_columns(block, rows)
        self.records += rows.shape[1]

        offset, length = [], []
        start, stop, first, last = rows
        for column in dialect.columns:
            begin = delimiters[first + column - 1] + 1 if column else start
            end = np.minimum(delimiters[first + column], stop)  # where the last column ends, CR is left out
            if len(quotes):
                quoted = (text[begin] == _QUOTE) & (end > begin)
                begin, end = begin + quoted, end - quoted
            offset.append(begin)
            length.append((end - begin).astype(np.int32))
        letters = width = length[dialect.sequence]
        if len(quotes):
            begin = offset[dialect.sequence]
            inside = np.searchsorted(quotes, begin + letters) - np.searchsorted(quotes, begin)
            letters = letters - (inside // 2).astype(np.int32)
            width = np.where(inside, np.int32(0), letters)
        if not block.closed and len(start):
            self._check_last(block, text[start[-1] : stop[-1]].tobytes(), int(start[-1]), int(letters[-1]))
        return Table([block.base + begin for begin in offset], length, letters, width, crlf)

    def _quotes(self, block: Block) -> np.ndarray:
        """Find the quotes of a block, and make sure that they enclose whole cells."""
        if not block.has(b'"'):
            return np.empty(0, np.int64)
        text, dialect = block.letters, self.dialect
        quotes = np.flatnonzero(text == _QUOTE)
        neighbours = (_QUOTE, dialect.separator[0], dialect.newline[0])
        opening, closing = quotes[::2], quotes[1::2]
        inside = opening[(opening > 0) & ~np.isin(text[opening - 1], neighbours)]
        after = text[closing + 1]
        line_end = (after == _RETURN) & (text[np.minimum(closing + 2, len(text) - 1)] == dialect.newline[0])
        inside = np.append(inside, closing[~np.isin(after, neighbours) & ~line_end])
        if len(inside):
            raise self._fail(
                block,
                inside.min(),
                "a quote in the middle of a cell: quote the whole cell and double the quotes in it",
            )
        if len(quotes) % 2:
            raise self._fail(block, quotes[-1], "a quote is opened here and never closed: close it")
        return quotes

    def _without_header(self, block: Block, rows: np.ndarray) -> np.ndarray:
        skipped = min(self._header_left, rows.shape[1])
        if skipped and skipped == self._header_left:
            start, stop = rows[:2, skipped - 1]
            self._names = self._cells(block.data[start:stop])
        self._header_left -= skipped
        return rows[:, skipped:]

    def _without_blank(self, block: Block, rows: np.ndarray) -> np.ndarray:
        """Leave out blank lines at the end of the file, and refuse them elsewhere."""
        filled = rows[1] > rows[0]
        first_blank = 0
        if self._blank is None:
            if filled.all():
                return rows
            first_blank = int(np.argmin(filled))
            self._blank = block.base + int(rows[0, first_blank])
        if filled[first_blank:].any():
            raise self._fail(block, self._blank - block.base, "a blank line between records: remove it")
        return rows[:, filled]

    def _check_columns(self, block: Block, rows: np.ndarray) -> None:
        needed = max(self.dialect.columns)
        columns = rows[3] - rows[2] + 1
        if not len(columns) or columns.min() > needed:
            return
        bad = int(np.argmax(columns <= needed))
        has = f"{columns[bad]} column" + "s" * bool(columns[bad] > 1)
        field = self.dialect.fields[self.dialect.columns.index(needed)]
        if not block.closed and bad == len(columns) - 1:
            raise self._fail(
                block, rows[0, bad], f"the file ends inside this line, after {has} of {needed + 1}: copy it again"
            )
        raise self._fail(
            block,
            rows[0, bad],
            f"{has}, where field '{field}' needs {needed + 1} (it is column {needed}, counted from 0): "
            "mend the line, or the column numbers and data_sep",
        )

    def _check_last(self, block: Block, line: bytes, start: int, letters: int) -> None:
        """Notice a file cut short: its last line has no end, and the sequence not the length the line itself names."""
        if self.dialect.header_lines == 0 or _LENGTH_COLUMN not in self._names:
            return
        cells = self._cells(line)
        column = self._names.index(_LENGTH_COLUMN)
        stated = cells[column] if column < len(cells) else ""
        if stated.isdecimal() and int(stated) != letters:
            raise self._fail(
                block, start, f"the file ends inside this line, after {letters} of {stated} letters: copy it again"
            )

    def _cells(self, line: bytes) -> list[str]:
        text = io.StringIO(line.decode(errors="replace"), newline="")
        return next(csv.reader(text, delimiter=self.dialect.separator.decode()), [])

    def _check_utf8(self, block: Block) -> None:
        try:
            block.data[: block.end].decode()
        except UnicodeDecodeError as error:
            raise self._fail(block, error.start, "bytes that are not UTF-8: convert the file to UTF-8") from error

    def _fail(self, block: Block, place: int, problem: str) -> UserError:
        line = line_number(self.path, block.base + int(place), self.dialect.newline)
        return UserError(f"{self.path}:{line}: {problem}")
