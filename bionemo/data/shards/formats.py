# SPDX-License-Identifier: Apache-2.0
"""Formats of text files: where their records are, and what a record contains. See `smiles_format` for SMILES files."""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.tokenizers.residues import trim

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NEWLINE = b"\n"
CARRIAGE_RETURN = "a carriage return inside a line: write the file with LF line ends"
MARKER_IN_SEQUENCE = "a '>' within a sequence: put a line end before the record that begins there"
_PIR = re.compile(rb">(?:P1|F1|DL|DC|RL|RC|N1|N3|XX);")
_INNER_RETURN = re.compile(rb"\r(?!\n|\Z)")
_TOP_BYTES = 1 << 20  # size of the beginning of a file that must contain the start of the first record
# `[gene=abcA] [protein=a [b] c]` of NCBI, `n=3 Tax=Bacillus subtilis TaxID=1423` and `ID=1_1;partial=10`.
_HEADER_ENTRY = re.compile(r"\[(\w+)=((?:[^][]|\[[^]]*\])*)\]|(\w+)=(.*?)(?=[;\s]+\[?\w+=|[;\s]*$)")
_LENGTH_COLUMN = "sequence_length"
_MAX_QUOTED_BYTES = 1 << 20  # of a record with line ends; an unclosed quote would make the rest of the file one record
ENTRY = np.dtype([("start", "<i8"), ("sequence", "<i8"), ("size", "<i4"), ("letters", "<i4")])
"""Entry of an index, see `RecordIndex`."""
csv.field_size_limit(1 << 30)  # 128 KiB by default


class TextFormat(Protocol):
    """Format of a text file. A problem of a record is a ValueError that says what is wrong and how to correct it."""

    @property
    def proteins(self) -> bool:
        """Whether sequences are proteins: white space and `*` at the end are not part of them."""

    @property
    def spec(self) -> dict[str, Any]:
        """What determines the records of a file, as JSON values."""

    def find_start(self, data: mmap, path: Path) -> int:
        """Return the offset of the first record; `path` is the name of the file in messages."""

    def records(self, data: mmap, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of each record from `start`, where a record begins, to `stop`, where one ends."""

    def find_boundary(self, data: mmap) -> bytes | None:
        """Return bytes after the first of which a record begins, wherever they are; None: it must be parsed."""

    def index_block(self, block: bytes) -> NDArray[Any] | None:
        """Index whole records with array operations, many times as fast as one by one: ENTRY [n].

        Returns None if this is not possible, as for an error.
        """

    def sequence(self, record: bytes) -> bytes | None:
        """Return the sequence of a record as it is in the file; None if there is no record, as in a blank line."""

    def fields(self, record: bytes) -> dict[str, str]:
        """Return the fields of a record by name."""


def _find_others(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the offsets of all bytes that are not ASCII letters."""
    return np.flatnonzero((text | np.uint8(32)) - np.uint8(ord("a")) > ord("z") - ord("a"))


def location(path: Path, data: mmap | bytes, start: int) -> str:
    """Return `file:line` of the record at an offset, for messages."""
    blocks = range(0, start, _TOP_BYTES)  # a copy of all bytes could exceed the memory
    return f"{path}:{1 + sum(data[begin : min(begin + _TOP_BYTES, start)].count(NEWLINE) for begin in blocks)}"


def record_error(path: Path, data: mmap | bytes, start: int, error: ValueError) -> UserError:
    """Return the error for a problem of the record at an offset."""
    problem = str(error)
    if isinstance(error, UnicodeDecodeError):
        problem = "text that is not UTF-8: convert the file, as with iconv -t UTF-8"
    return UserError(f"{location(path, data, start)}: {problem}")


@dataclass(frozen=True)
class Fasta:
    """FASTA: sequences on one line or wrapped.

    A record begins with a line whose first byte is '>'. The rest of that line is the header, whose first word is the
    id.
    """

    proteins: ClassVar[bool] = True
    spec: ClassVar[dict[str, Any]] = {"format": "fasta"}

    def find_start(self, data: mmap, path: Path) -> int:
        """See TextFormat."""
        return find_first_record(path)

    def find_boundary(self, data: mmap) -> bytes:
        """See TextFormat."""
        return b"\n>"

    def index_block(self, block: bytes) -> NDArray[Any] | None:
        """See TextFormat; all sequences must consist of letters, on one line or several."""
        text = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(text == ord("\n"))
        starts = np.append(0, ends[:-1] + 1)
        is_header = text[starts] == ord(">")
        others = np.diff(_find_others(text).searchsorted(np.append(starts, len(text))))  # in each line
        if not block.isascii() or not block.endswith(b"\n") or (others[~is_header] != 1).any():
            return None
        headers = np.flatnonzero(is_header)
        following = np.append(headers[1:], len(starts))
        total = np.append(0, (ends - starts).cumsum())
        table = np.empty(len(headers), ENTRY)
        table["start"], begin = starts[headers], ends[headers] + 1
        table["size"] = np.diff(table["start"], append=len(block))
        table["letters"] = total[following] - total[headers + 1]
        table["sequence"] = np.where(following - headers == 2, begin, ~begin)
        return table if table["letters"].all() else None

    def records(self, data: mmap | bytes, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """See TextFormat."""
        while start < stop:
            end = data.find(b"\n>", start, stop) + 1 or stop
            record = data[start:end]
            if problem := self._find_problem(record):
                raise record_error(path, data, start + problem[0], problem[1])
            yield start, record
            start = end

    def sequence(self, record: bytes) -> bytes:
        """See TextFormat."""
        return record[record.find(b"\n") + 1 :]

    def _find_problem(self, record: bytes) -> tuple[int, ValueError] | None:
        """Return where the line of a problem is in a record, and the problem; None if there is none."""
        header, _, sequence = record.partition(b"\n")
        try:
            header.decode()
        except UnicodeDecodeError as error:
            return 0, error
        if b">" in sequence and b"<" not in sequence:  # not a special token
            return record.index(b">", len(header)), ValueError(MARKER_IN_SEQUENCE)
        if found := _INNER_RETURN.search(record, len(header)):
            return found.start(), ValueError(CARRIAGE_RETURN)
        if not sequence.strip(b"* \t\r\n"):
            return 0, ValueError("a record without a sequence: remove or complete it")
        return None

    def fields(self, record: bytes) -> dict[str, str]:
        """Return `id` and each `[key=value]` and `key=value` of the header; the latter ends at the next key."""
        header = record[1:].partition(b"\n")[0].decode().rstrip("\r")
        name, *rest = header.split(None, 1) or [""]
        entries = _HEADER_ENTRY.findall(rest[0]) if rest else []
        return {**{key or other: value or text for key, value, other, text in entries}, "id": name}


def find_first_record(path: Path, display_path: str | None = None) -> int:
    """Return the offset of the first '>', which may follow blank lines only.

    `display_path` is the name of the file in error messages; None: the path.

    Raises:
        UserError: if there is no '>', or there is text before it.
    """
    with path.open("rb") as file:
        top = file.read(_TOP_BYTES)
    text = top.removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n")
    offset = len(top) - len(text)
    if top and not text:
        raise UserError(
            f"{display_path or path} contains no records: write it again, or exclude it from the range of files"
        )
    if text and not text.startswith(b">"):
        line = 1 + top[:offset].count(b"\n")
        raise UserError(f"{display_path or path}:{line}: text before the first '>': is this a FASTA file?")
    if _PIR.match(text):
        raise UserError(f"{display_path or path} is a PIR file, in which titles follow the names: convert it to FASTA")
    return offset


@dataclass(frozen=True)
class Csv:
    """CSV, with quotes as in RFC 4180 or without. Blank lines are skipped.

    A quoted cell may contain separators, line ends and doubled quotes.
    """

    columns: Mapping[str, int]  # column of each field, from 0; the sequence is the field `sequence`, else the first
    separator: str = ","  # one ASCII character between the columns
    header_lines: int = 1  # lines to skip at the beginning of a file
    newline: str = "\n"  # one ASCII character that ends a record; a CR may precede LF
    proteins: bool = False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UserError: if an option is invalid.
        """
        if not self.columns:
            raise UserError("no column is selected: name at least that of the sequences, counted from 0")
        for option, character in (("data_sep", self.separator), ("newline_int", self.newline)):
            if len(character) != 1 or not character.isascii() or character in '"\r':
                raise UserError(f"{option} is {character!r}: it must be one ASCII character, neither a quote nor CR")
        if self.separator == self.newline:
            raise UserError("data_sep and newline_int are the same character: a record could not have columns")
        for name, column in self.columns.items():
            if column < 0:
                raise UserError(f"column {column} of field '{name}' is negative: columns are counted from 0")

    def find_start(self, data: mmap, path: Path) -> int:
        """See TextFormat."""
        start, titles = len(BYTE_ORDER_MARK) if data[:3] == BYTE_ORDER_MARK else 0, list[str]()
        for offset, record in islice(self.records(data, path, start, len(data)), self.header_lines):
            start = offset + len(record)
            try:
                titles = self._split(record.rstrip(b"\r\n").decode(errors="replace"))
            except ValueError as error:
                raise record_error(path, data, offset, error) from error
        last = data[data.rfind(self._newline) + 1 :]
        if start < len(data) and last and last.count(b'"') % 2 == 0:  # not the end of a quoted cell
            try:
                self._check_last_line(last, titles)
            except ValueError as error:
                raise record_error(path, data, len(data) - len(last), error) from error
        return start

    def find_boundary(self, data: mmap) -> bytes | None:
        """See TextFormat."""
        return None if data.find(b'"') >= 0 else self._newline

    def index_block(self, block: bytes) -> NDArray[Any] | None:
        """See TextFormat; proteins must consist of letters, and line ends must be LF."""
        text = np.frombuffer(block, np.uint8)
        delimiters = np.flatnonzero((text == ord(self.newline)) | (text == ord(self.separator)))
        last = np.flatnonzero(text[delimiters] == ord(self.newline))
        first = np.append(0, last[:-1] + 1)
        is_usual = block.isascii() and block.endswith(self._newline) and b"\r" not in block and b'"' not in block
        has_blank_lines = block.startswith(self._newline) or 2 * self._newline in block
        if not is_usual or has_blank_lines or (last - first).min() < self._needed:
            return None
        table = np.empty(len(last), ENTRY)
        table["start"] = np.append(0, delimiters[last[:-1]] + 1)
        table["size"] = np.diff(table["start"], append=len(block))
        begin = delimiters[first + self._column - 1] + 1 if self._column else table["start"]
        end = delimiters[first + self._column]
        table["sequence"], table["letters"] = begin, end - begin
        others = _find_others(text) if self.proteins else np.zeros(0, np.int64)
        return table if (others.searchsorted(begin) == others.searchsorted(end)).all() else None

    def records(self, data: mmap, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """See TextFormat; a record ends at a line end after an even number of quotes."""
        while start < stop:
            end = data.find(self._newline, start, stop) + 1 or stop
            record = data[start:end]
            while record.count(b'"') % 2 and end < stop and len(record) < _MAX_QUOTED_BYTES:
                end = data.find(self._newline, end, stop) + 1 or stop
                record = data[start:end]
            yield start, record
            start = end

    def sequence(self, record: bytes) -> bytes | None:
        """See TextFormat."""
        line = record.removesuffix(self._newline).removesuffix(b"\r")
        if not line:
            return None
        if b'"' in line or not line.isascii():
            cells = [cell.encode() for cell in self._split(line.decode())]
        else:
            cells = line.split(self._separator)
        if len(cells) <= self._needed:
            field = next(name for name, column in self.columns.items() if column == self._needed)
            has = f"{len(cells)} column" + "s" * (len(cells) > 1)
            raise ValueError(
                f"{has}, where field '{field}' needs {self._needed + 1} (it is column {self._needed}, counted from "
                "0): correct the line, or the column numbers and data_sep"
            )
        sequence = cells[self._column]
        if self.proteins and _INNER_RETURN.search(sequence):
            raise ValueError(CARRIAGE_RETURN)
        return sequence

    def fields(self, record: bytes) -> dict[str, str]:
        """See TextFormat."""
        cells = self._split(record.removesuffix(self._newline).removesuffix(b"\r").decode())
        return {name: cells[column] for name, column in self.columns.items()}

    @property
    def spec(self) -> dict[str, Any]:
        """See TextFormat."""
        return {"format": "csv", **asdict(self)}

    @cached_property
    def _newline(self) -> bytes:
        return self.newline.encode()

    @cached_property
    def _separator(self) -> bytes:
        return self.separator.encode()

    @cached_property
    def _column(self) -> int:
        """Column of the sequences."""
        return self.columns.get("sequence", next(iter(self.columns.values())))

    @cached_property
    def _needed(self) -> int:
        """The last column that is read."""
        return max(self.columns.values())

    def _split(self, line: str) -> list[str]:
        if '"' not in line:
            return line.split(self.separator)
        try:
            (cells,) = csv.reader(io.StringIO(line, newline=""), delimiter=self.separator, strict=True)
        except (ValueError, csv.Error) as error:
            problem = "a quote in the middle of a cell, or one that is not closed"
            raise ValueError(f"{problem}: quote the whole cell and double the quotes in it") from error
        return cells

    def _check_last_line(self, record: bytes, titles: list[str]) -> None:
        """Detect a truncated file: its last line has no line end, and it lacks columns or letters that it states."""
        try:
            cells = self._split(record.decode(errors="replace"))
        except ValueError:
            return  # reported with the line when it is indexed
        if len(cells) <= self._needed:
            raise ValueError("the file ends inside this line, which lacks columns: copy it again")
        cell = cells[self._column]
        stated, letters = dict(zip(titles, cells, strict=False)).get(_LENGTH_COLUMN, ""), len(cell)
        if stated.isdecimal() and int(stated) not in (letters, len(trim(cell.encode())) if self.proteins else letters):
            raise ValueError(f"the file ends inside this line, after {letters} of {stated} letters: copy it again")
