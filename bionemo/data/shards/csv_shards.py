# SPDX-License-Identifier: Apache-2.0
"""CSV shards, with quotes as in RFC 4180 or without, read in place.

A file is indexed with a few array operations per block. Every separator and line end is a delimiter, unless the number
of quotes before it is odd. The sorted offsets of the delimiters give the bounds of all records and columns.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import RecordBlock, line_number, read_blocks
from bionemo.data.shards.index import RecordIndex
from bionemo.data.shards.proteins import contains_any, trim_records
from bionemo.data.shards.text_shards import TextShards
from bionemo.tokenizers.residues import check_letters, trim

_QUOTE, _RETURN = b'"\r'
_LENGTH_COLUMN = "sequence_length"
_FIELD_LIMIT_LOCK = Lock()  # the limit of the csv module belongs to the process; files are indexed in threads
_MAX_RECORD_BYTES = 64 << 20  # an unclosed quote would make the rest of the file one record


@dataclass(frozen=True)
class Dialect:
    """Format of a CSV file, and the columns to index."""

    fields: tuple[str, ...]  # names of the columns
    columns: tuple[int, ...]  # their numbers, from 0
    sequence: int  # index of the field that holds the sequence
    separator: bytes  # byte between columns
    newline: bytes  # byte that ends a record; a CR may precede LF
    header_lines: int  # records to skip at the beginning

    def whole_records(self, data: bytes) -> int:
        """Return the bytes up to the last line end outside quotes, that is, after an even number of them."""
        end = data.rfind(self.newline)
        if b'"' not in data:  # much faster than counting
            return end + 1
        odd = data.count(b'"', 0, max(end, 0)) % 2
        while end >= 0 and odd:
            earlier = data.rfind(self.newline, 0, data.rfind(b'"', 0, end))
            odd ^= data.count(b'"', max(earlier, 0), end) % 2
            end = earlier
        return end + 1


class CsvSource(TextShards):
    """Records of CSV files.

    A quoted cell may contain separators, line ends and doubled quotes. A byte order mark, CR before LF and blank lines
    at the end of a file are ignored. Lengths are in bytes, which are letters in ASCII columns.

    Args:
        paths: the files.
        columns: column of each field, from 0; the sequence is the field `sequence`, else the first.
        separator: one ASCII character between the columns.
        header_lines: lines to skip at the beginning of each file.
        newline: code of the character that ends a record.
        proteins: whether the sequences are proteins: white space and `*` at the end are not part of them.
        index_mapping_dir: directory for indexes; None: next to the data, or the user's cache if that is read-only.
        workers: number of files to index at a time; None: half of the cores.

    Raises:
        UserError: if an option is invalid, or a file cannot be read with these options.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        columns: Mapping[str, int],
        separator: str = ",",
        header_lines: int = 1,
        newline: int = 10,
        proteins: bool = False,
        index_mapping_dir: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        if not columns:
            raise UserError("no column is selected: name at least that of the sequences, counted from 0")
        names, numbers = tuple(columns), tuple(columns.values())
        sequence = names.index("sequence") if "sequence" in names else 0
        separator_byte, newline_byte = _single_byte("data_sep", separator), _single_byte("newline_int", chr(newline))
        self._dialect = Dialect(names, numbers, sequence, separator_byte, newline_byte, int(header_lines))
        if separator == chr(newline):
            raise UserError("data_sep and newline_int are the same character: a record could not have columns")
        for name, column in columns.items():
            if column < 0:
                raise UserError(f"column {column} of field '{name}' is negative: columns are counted from 0")
        self._proteins = proteins
        spec = {"format": "csv", **vars(self._dialect), "separator": separator, "newline": newline}
        spec |= {"proteins": True} if proteins else {}
        super().__init__(paths, spec, index_mapping_dir, workers)

    def fields(self, record: int) -> dict[str, str]:
        """Return the named columns of a record."""
        shard, index = self._locate(record)
        cells = (self._cell(shard, index, i) for i in range(len(self._dialect.fields)))
        found = dict(zip(self._dialect.fields, (_unquote(cell).decode() for cell in cells), strict=True))
        return found | ({self._dialect.fields[self._dialect.sequence]: self.text(record)} if self._proteins else {})

    def _decode(self, raw: bytes) -> bytes:
        return trim(_unquote(raw)) if self._proteins else _unquote(raw)

    def _scan(self, path: Path) -> Iterator[tuple[RecordBlock, RecordIndex]]:
        scanner, dialect = _Scanner(path, self._dialect, self._decode if self._proteins else None), self._dialect
        for block in read_blocks(path, dialect.whole_records, newline=dialect.newline, limit=_MAX_RECORD_BYTES):
            yield block, scanner.index(block)
        if not scanner.records:
            header = f" after its {dialect.header_lines} header line(s)" if dialect.header_lines else ""
            raise UserError(
                f"{path} contains no records{header}: check header_lines, or exclude it from the range of files"
            )


class _Scanner:
    """Indexes a file block by block; `decode` converts the cell of a protein to its letters, None: other texts."""

    def __init__(self, path: Path, dialect: Dialect, decode: Callable[[bytes], bytes] | None) -> None:
        self.path = path
        self.dialect = dialect
        self.decode = decode
        self.records = 0
        self._header_left = dialect.header_lines
        self._names: list[str] = []
        self._blank: int | None = None  # offset in the file of the first blank line

    def index(self, block: RecordBlock) -> RecordIndex:
        """Index the records of a block."""
        dialect, text = self.dialect, block.array
        quotes = self._find_quotes(block)
        delimiters = np.flatnonzero((text == dialect.newline[0]) | (text == dialect.separator[0]))
        if len(quotes):
            delimiters = delimiters[np.searchsorted(quotes, delimiters) % 2 == 0]
        if not block.data.isascii():
            self._check_utf8(block)

        # bounds of each record, and indices of its first and last delimiter
        last = np.flatnonzero(text[delimiters] == dialect.newline[0])
        first = np.append(0, last[:-1] + 1)
        stop = delimiters[last]
        start = np.append(0, stop[:-1] + 1)
        crlf = False
        if dialect.newline == b"\n" and block.contains(b"\r"):
            returns = (text[stop - 1] == _RETURN) & (stop > start)
            stop, crlf = stop - returns, bool(returns.any())
        bounds = self._skip_blank(block, self._skip_header(block, np.stack([start, stop, first, last])))
        self._check_columns(block, bounds)
        self.records += bounds.shape[1]

        offset, length = [], []
        start, stop, first, last = bounds
        for column in dialect.columns:
            begin = delimiters[first + column - 1] + 1 if column else start
            end = np.minimum(delimiters[first + column], stop)  # excludes CR from the last column
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
            self._check_last_line(block, text[start[-1] : stop[-1]].tobytes(), int(start[-1]), int(letters[-1]))
        stops = 0
        if self.decode is not None:
            begin = offset[dialect.sequence]
            end = begin + length[dialect.sequence]
            self._check_letters(block, begin, end)
            letters, spaced, stops = trim_records(block, begin, end, letters, self.decode)
            width = np.where(spaced, np.int32(0), np.minimum(width, letters))
        return RecordIndex([block.base + begin for begin in offset], length, letters, width, crlf, stops)

    def _check_letters(self, block: RecordBlock, begin: np.ndarray, end: np.ndarray) -> None:
        """Refuse proteins with special tokens and letters beyond ASCII."""
        if block.contains(b"<") or not block.data.isascii():
            text = block.array
            for i in np.flatnonzero(contains_any((text == ord("<")) | (text >= 128), begin, end)):
                line = line_number(self.path, block.base + int(begin[i]), self.dialect.newline)
                check_letters(block.data[begin[i] : end[i]], f"{self.path}:{line}")

    def _find_quotes(self, block: RecordBlock) -> np.ndarray:
        """Return the offsets of all quotes, which must enclose whole cells."""
        if not block.contains(b'"'):
            return np.empty(0, np.int64)
        text, dialect = block.array, self.dialect
        quotes = np.flatnonzero(text == _QUOTE)
        neighbours = (_QUOTE, dialect.separator[0], dialect.newline[0])
        opening, closing = quotes[::2], quotes[1::2]
        inside = opening[(opening > 0) & ~np.isin(text[opening - 1], neighbours)]
        after = text[closing + 1]
        line_end = (after == _RETURN) & (text[np.minimum(closing + 2, len(text) - 1)] == dialect.newline[0])
        inside = np.append(inside, closing[~np.isin(after, neighbours) & ~line_end])
        if len(inside):
            problem = "a quote in the middle of a cell: quote the whole cell and double the quotes in it"
            raise self._error(block, inside.min(), problem)
        if len(quotes) % 2:
            raise self._error(block, quotes[-1], "a quote is opened here and never closed: close it")
        return quotes

    def _skip_header(self, block: RecordBlock, bounds: np.ndarray) -> np.ndarray:
        skipped = min(self._header_left, bounds.shape[1])
        if skipped and skipped == self._header_left:
            start, stop = bounds[:2, skipped - 1]
            self._names = self._split_cells(block.data[start:stop])
        self._header_left -= skipped
        return bounds[:, skipped:]

    def _skip_blank(self, block: RecordBlock, bounds: np.ndarray) -> np.ndarray:
        """Skip blank lines at the end of the file; elsewhere they are an error."""
        filled = bounds[1] > bounds[0]
        first_blank = 0
        if self._blank is None:
            if filled.all():
                return bounds
            first_blank = int(np.argmin(filled))
            self._blank = block.base + int(bounds[0, first_blank])
        if filled[first_blank:].any():
            raise self._error(block, self._blank - block.base, "a blank line between records: remove it")
        return bounds[:, filled]

    def _check_columns(self, block: RecordBlock, bounds: np.ndarray) -> None:
        needed = max(self.dialect.columns)
        columns = bounds[3] - bounds[2] + 1
        if not len(columns) or columns.min() > needed:
            return
        bad = int(np.argmax(columns <= needed))
        has = f"{columns[bad]} column" + "s" * bool(columns[bad] > 1)
        field = self.dialect.fields[self.dialect.columns.index(needed)]
        if not block.closed and bad == len(columns) - 1:
            problem = f"the file ends inside this line, after {has} of {needed + 1}: copy it again"
        else:
            problem = (
                f"{has}, where field '{field}' needs {needed + 1} (it is column {needed}, counted from 0): "
                "correct the line, or the column numbers and data_sep"
            )
        raise self._error(block, bounds[0, bad], problem)

    def _check_last_line(self, block: RecordBlock, line: bytes, start: int, letters: int) -> None:
        """Detect a truncated file: its last line has no line end, and its sequence is not as long as stated."""
        if self.dialect.header_lines == 0 or _LENGTH_COLUMN not in self._names:
            return
        cells = self._split_cells(line)
        column = self._names.index(_LENGTH_COLUMN)
        stated = cells[column] if column < len(cells) else ""
        if stated.isdecimal() and int(stated) != letters:
            problem = f"the file ends inside this line, after {letters} of {stated} letters: copy it again"
            raise self._error(block, start, problem)

    def _split_cells(self, line: bytes) -> list[str]:
        text = io.StringIO(line.decode(errors="replace"), newline="")
        with _FIELD_LIMIT_LOCK:
            limit = csv.field_size_limit(max(len(line), csv.field_size_limit()))  # 128 KiB by default
            try:
                return next(csv.reader(text, delimiter=self.dialect.separator.decode()), [])
            finally:
                csv.field_size_limit(limit)

    def _check_utf8(self, block: RecordBlock) -> None:
        try:
            block.data[: block.end].decode()
        except UnicodeDecodeError as error:
            raise self._error(block, error.start, "bytes that are not UTF-8: convert the file to UTF-8") from error

    def _error(self, block: RecordBlock, offset: int, problem: str) -> UserError:
        line = line_number(self.path, block.base + int(offset), self.dialect.newline)
        return UserError(f"{self.path}:{line}: {problem}")


def _unquote(raw: bytes) -> bytes:
    return raw.replace(b'""', b'"')  # the scanner refuses any other quote in a cell


def _single_byte(option: str, character: str) -> bytes:
    if len(character) != 1 or not character.isascii() or character in '"\r':
        raise UserError(f"{option} is {character!r}: it must be one ASCII character, neither a quote nor CR")
    return character.encode()
