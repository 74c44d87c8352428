# SPDX-License-Identifier: Apache-2.0
"""Compare the configured columns of CSV files with their headers and first records, before the files are indexed.

Only the first 64 KiB of each file are read. Files that cannot be parsed here are left to the reader, whose error
message contains the line number.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError, shorten
from bionemo.data.shards.blocks import BYTE_ORDER_MARK
from bionemo.data.table import SMILES_TITLE

_READ_BYTES = 64 << 10  # per file
_MAX_RECORDS = 32  # per file
_MAX_LISTED = 8  # columns in a message
_MIN_SEQUENCE = 16  # letters; a cell of this length is not the name of a column
_NUMBER = re.compile(r"[-+]?\d*[.,]?\d+(?:[eE][-+]?\d+)?")
_SEPARATORS = {"\t": r'"\t"', ";": '";"', ",": '","', "|": '"|"'}


class SequenceFormat(NamedTuple):
    """Column names and cells that a kind of sequence can have."""

    noun: str  # name of the cells in messages
    name: re.Pattern[str]  # matches column names that state the content; for other names, the cells are checked
    other_names: frozenset[str]  # column names, in lower case, that could be mistaken for a cell
    cell: re.Pattern[str]  # matches a cell

    def is_name(self, text: str) -> bool:
        """Return whether a column name states that the column holds such sequences."""
        return self.name.fullmatch(text) is not None

    def is_cell(self, text: str) -> bool:
        """Return whether a text can be such a sequence."""
        return self.cell.fullmatch(text) is not None


PROTEINS = SequenceFormat(
    "protein sequences",
    re.compile(r"(?:.*[_ ])?(?i:seq(?:uence)?s?)|.*[a-z]Seq(?:uence)?s?"),
    frozenset({"aa", "antigen", "chain", "epitope", "peptide", "primary", "protein", "target"}),
    re.compile(r"[A-Za-z*.\- ]+"),
)
SMILES = SequenceFormat(
    "SMILES",
    SMILES_TITLE,
    frozenset(),
    re.compile(r"(?:\[[^\]\s]+\]|Br|Cl|[BCNOPSFI]|[bcnops]|[-=#$:/\\.()*@+%>~]|\d)+"),
)


@dataclass(frozen=True)
class CsvColumns:
    """Configured columns of CSV files, and the configuration keys for messages."""

    reader: str  # key of the reader's settings, such as `model.data.train.data_impl_kwargs.csv_mmap`
    columns: Mapping[str, int]  # column of each field that holds sequences, from 0
    separator: str = ","  # character between columns
    newline: str = "\n"  # character that ends a record
    header_lines: int = 1  # lines before the records

    def key(self, field: str) -> str:
        """Return the configuration key of a field's column."""
        return f"{self.reader}.data_col" if self.reader.endswith(".csv_mmap") else f"{self.reader}.data_fields.{field}"


def check_columns(paths: Sequence[Path], configured: CsvColumns, expected: SequenceFormat) -> None:
    """Compare the configured columns with the header and the first records of each file.

    A column passes if its name is that of its field or one such as `sequence` or `smiles`. A column with another name
    passes if no other column has such a name and its first cells look like sequences. Numbers never pass.

    Raises:
        UserError: if a column does not hold sequences, a header is configured but missing or the reverse, or the files
            have different headers.
    """
    first: list[str] | None = None
    for path in paths:
        rows = _read_rows(path, configured)
        if not any(rows) or len(rows) < configured.header_lines:
            continue  # the reader reports a file without records
        header = max(configured.header_lines, 0)
        names = rows[header - 1] if header else []
        if header and not names:
            raise UserError(
                f"{path}:{header}: the last header line is empty: set {configured.reader}.header_lines to the number "
                "of lines before the first record, including empty ones"
            )
        _FileCheck(path, configured, expected, names, rows[header:], after_header=first is not None).run()
        if first is None:
            first = names
        elif [name.lower() for name in names] != [name.lower() for name in first]:
            raise UserError(
                f"{path} has the columns {_listed(names)}, but {paths[0]} has {_listed(first)}: the files of a "
                "split need the same columns; write them again"
            )


def _read_rows(path: Path, configured: CsvColumns) -> list[list[str]]:
    """Return the cells of the header lines and first records; [] if the reader will report an error."""
    try:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            data = file.read(_READ_BYTES + 1)
    except OSError:
        return []
    text = data[:_READ_BYTES].removeprefix(BYTE_ORDER_MARK).decode(errors="replace")
    lines = text.split(configured.newline)
    if len(data) > _READ_BYTES:
        lines.pop()  # incomplete
    rows: list[list[str]] = []
    record, quotes = list[str](), 0
    for line in lines:
        record.append(line)
        quotes += line.count('"')
        if quotes % 2:  # a line end inside quotes
            continue
        joined = configured.newline.join(record).removesuffix("\r")
        try:
            rows.append(next(csv.reader([joined], delimiter=configured.separator), []))
        except (csv.Error, TypeError):  # TypeError: the separator has several characters; the reader reports it
            return []
        if len(rows) >= _MAX_RECORDS + configured.header_lines:
            break
        record.clear()
    header = max(configured.header_lines, 0)  # lines that are empty count
    return [[cell.strip() for cell in row] for number, row in enumerate(rows) if row or number < header]


@dataclass(frozen=True)
class _FileCheck:
    """Checks the beginning of one file."""

    path: Path
    configured: CsvColumns
    expected: SequenceFormat
    names: list[str]  # cells of the last header line; [] without header lines
    records: list[list[str]]  # cells of the first records
    after_header: bool  # whether a previous file has a header

    def run(self) -> None:
        """Check every configured column; see `check_columns`."""
        for field, column in self.configured.columns.items():
            cells = [row[column] for row in self.records if len(row) > column and row[column]]
            if self.configured.header_lines > 0:
                self._check_header(field, column, cells)
            else:
                self._check_first_record(column, cells)
            self._check_cells(field, column, cells)

    def _check_header(self, field: str, column: int, cells: list[str]) -> None:
        names, key = self.names, self.configured.key(field)
        if column < len(names):
            self._check_not_a_record(column, cells)
            if self._name_states_content(field, names[column]):
                return
        found = f" is the column {shorten(names[column])}" if column < len(names) else ""
        others = [i for i, name in enumerate(names) if self._name_states_content(field, name)]
        if others or column >= len(names):
            raise UserError(
                f"{self.path}: {key}={column}{found}, but the header has {_listed(names)}: "
                + (f"set {key}={others[0]}" if others else self._advice(column))
            )

    def _name_states_content(self, field: str, name: str) -> bool:
        """Return whether the name of a column states that it holds this field."""
        fields = {each.lower() for each in self.configured.columns} - {"sequence"}
        if field.lower() in fields and field.lower() in (each.lower() for each in self.names):
            return name.lower() == field.lower()
        return name.lower() not in fields and self.expected.is_name(name)

    def _check_not_a_record(self, column: int, cells: list[str]) -> None:
        """Raise an error if the last header line looks like a record, which would be skipped."""
        name, expected = self.names[column], self.expected
        if expected.is_name(name) or name.lower() in expected.other_names or not expected.is_cell(name):
            return
        if not all(map(expected.is_cell, cells)) or _NUMBER.fullmatch(name):
            return
        similar_length = len(name) >= _MIN_SEQUENCE or (cells and 2 * len(name) >= min(map(len, cells)))
        similar_letters = expected is SMILES or name.isupper() or len(name) > 2 * _MIN_SEQUENCE
        if similar_length and similar_letters:
            lines, key = self.configured.header_lines, f"{self.configured.reader}.header_lines"
            advice = "add the header to this file, as in the others" if self.after_header else f"set {key}={lines - 1}"
            rename = "smiles" if expected is SMILES else "sequence"
            raise UserError(
                f"{self.path}:{lines}: {key}={lines} skips a line that looks like a record ({shorten(name)} in "
                f"column {column}): {advice}; if it is a header, rename this column to {rename!r}"
            )

    def _check_first_record(self, column: int, cells: list[str]) -> None:
        """Raise an error if the first record looks like a header, but none is configured."""
        if not cells or not self.records or len(self.records[0]) <= column:
            return
        name, *rest = self.records[0][column], *cells[1:]
        sequences = [cell for cell in rest if self.expected.is_cell(cell)]
        different = bool(rest) and 2 * len(sequences) >= len(rest) and not self.expected.is_cell(name)
        if self.expected is PROTEINS and sequences and all(cell.isupper() for cell in sequences):
            different |= not name.isupper()
        if self.expected.is_name(name) or different:
            key = f"{self.configured.reader}.header_lines"
            columns = _listed(self.records[0])
            raise UserError(f"{self.path}:1: this line is a header ({columns}), but {key}=0: set {key}=1")

    def _check_cells(self, field: str, column: int, cells: list[str]) -> None:
        """Raise an error if the cells are not sequences; if the column name states the content, only for numbers."""
        if not cells:
            return  # empty sequences are counted later
        numbers = all(map(_NUMBER.fullmatch, cells))
        name = self.names[column] if self.names else None
        if not numbers and name is not None and self._name_states_content(field, name):
            return
        others = [cell for cell in cells if not self.expected.is_cell(cell)]
        key = self.configured.key(field)
        found = f"is the column {shorten(name)}, which holds" if name else "holds"
        if numbers or 2 * len(others) > len(cells):
            columns = _listed(self.names or self.records[0])
            raise UserError(
                f"{self.path}: {key}={column} {found} {shorten((others or cells)[0])} instead of "
                f"{self.expected.noun}; the columns are {columns}: {self._advice(column)}"
            )
        if longer := self._find_longer_column(column, max(map(len, cells))):
            rename = f", or rename the column {shorten(name)} to 'sequence'" if name else ""
            raise UserError(
                f"{self.path}: {key}={column} {found} {shorten(cells[0])}, but column {longer} holds longer "
                f"sequences: set {key}={longer}{rename}"
            )

    def _find_longer_column(self, column: int, length: int) -> int | None:
        """Return a column of much longer sequences if the cells of the configured one are as short as labels."""
        if length >= _MIN_SEQUENCE:
            return None
        for other in range(min(map(len, self.records))):
            cells = [row[other] for row in self.records if row[other]]
            sequences = cells and all(map(self.expected.is_cell, cells)) and not any(map(_NUMBER.fullmatch, cells))
            if other != column and sequences and min(map(len, cells)) >= 4 * length:
                return other
        return None

    def _advice(self, column: int) -> str:
        field = next(field for field, number in self.configured.columns.items() if number == column)
        line = self.configured.separator.join(self.names or self.records[0])
        if len(self.names or self.records[0]) == 1:
            for separator, written in _SEPARATORS.items():
                if separator in line:
                    return f"set {self.configured.reader}.data_sep={written}"
        return f"set {self.configured.key(field)} to the column of the {self.expected.noun}, counted from 0"


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(f"{number} {shorten(name)}" for number, name in enumerate(names[:_MAX_LISTED]))
    return listed + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
