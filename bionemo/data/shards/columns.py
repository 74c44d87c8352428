# SPDX-License-Identifier: Apache-2.0
"""Compare the configured columns of CSV files with their headers and first records, before the files are indexed.

Only the first 64 KiB of each file are read. Files that cannot be parsed here are left to the reader, which names the
line.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import BYTE_ORDER_MARK

_BYTES = 64 << 10  # read of each file
_ROWS = 32  # records looked at in each file
_SHOWN = 8  # columns that a message lists
_SHORT = 16  # letters; a longer cell is not the name of a column
_NUMBER = re.compile(r"[-+]?\d*[.,]?\d+(?:[eE][-+]?\d+)?")
_SEPARATORS = {"\t": r'"\t"', ";": '";"', ",": '","', "|": '"|"'}


class SequenceKind(NamedTuple):
    """What a column of sequences is called, and what its cells look like.

    Attributes:
        noun: what the cells are, for messages.
        name: matches the names that state the content; a column of another name is judged by its cells.
        other_names: names, in lower case, that could be mistaken for a cell.
        cell: matches a cell.
    """

    noun: str
    name: re.Pattern[str]
    other_names: frozenset[str]
    cell: re.Pattern[str]

    def is_name(self, text: str) -> bool:
        """Whether a cell of the header states that the column holds such sequences."""
        return self.name.fullmatch(text) is not None

    def is_cell(self, text: str) -> bool:
        """Whether a text can be such a sequence."""
        return self.cell.fullmatch(text) is not None


PROTEINS = SequenceKind(
    "protein sequences",
    re.compile(r"(?:.*[_ ])?(?i:seq(?:uence)?s?)|.*[a-z]Seq(?:uence)?s?"),
    frozenset({"aa", "antigen", "chain", "epitope", "peptide", "primary", "protein", "target"}),
    re.compile(r"[A-Za-z*.\- ]+"),
)
SMILES = SequenceKind(
    "SMILES",
    re.compile(r"(?:.*[_ ])?(?i:smi(?:les?)?)|.*[a-z]Smiles"),
    frozenset(),
    re.compile(r"(?:\[[^\]\s]+\]|Br|Cl|[BCNOPSFI]|[bcnops]|[-=#$:/\\.()*@+%>~]|\d)+"),
)


@dataclass(frozen=True)
class CsvLayout:
    """Which columns of CSV files are read, and which configuration keys say so.

    Attributes:
        reader: key of the reader's settings, such as `model.data.train.data_impl_kwargs.csv_mmap`.
        columns: column of each field that holds sequences, from 0.
        separator: character between columns.
        newline: character that ends a record.
        header_lines: lines above the records.
    """

    reader: str
    columns: Mapping[str, int]
    separator: str = ","
    newline: str = "\n"
    header_lines: int = 1

    def key(self, field: str) -> str:
        """Configuration key of a field's column."""
        return f"{self.reader}.data_col" if self.reader.endswith(".csv_mmap") else f"{self.reader}.data_fields.{field}"


def check_columns(paths: Sequence[Path], layout: CsvLayout, kind: SequenceKind) -> None:
    """Compare the configured columns with the header and the first records of each file.

    A column passes if the header gives it the name of its field or a name such as `sequence` or `smiles`. A column of
    another name passes if no other column has such a name and its first records look like sequences. Numbers never
    pass.

    Raises:
        UserError: a column that does not hold sequences, a header where a record should be or the reverse, or files
            whose headers differ.
    """
    first: list[str] | None = None
    for path in paths:
        rows = _rows(path, layout)
        if not rows or len(rows) < layout.header_lines:
            continue  # the reader says that there are no records
        file = _File(path, layout, kind, rows, headed=first is not None)
        file.check()
        if first is None:
            first = file.names
        elif [name.lower() for name in file.names] != [name.lower() for name in first]:
            raise UserError(
                f"{path} has the columns {_listed(file.names)}, but {paths[0]} has {_listed(first)}: the files of a "
                "split need the same columns; write them again"
            )


def _rows(path: Path, layout: CsvLayout) -> list[list[str]]:
    """The header lines and the first records, each a list of cells; [] where the reader will report an error."""
    try:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            data = file.read(_BYTES + 1)
    except OSError:
        return []
    text = data[:_BYTES].removeprefix(BYTE_ORDER_MARK).decode(errors="replace")
    pieces = text.split(layout.newline)
    if len(data) > _BYTES:
        pieces.pop()  # cut off
    rows: list[list[str]] = []
    record, quotes = list[str](), 0
    for piece in pieces:
        record.append(piece)
        quotes += piece.count('"')
        if quotes % 2:  # the record goes on behind a line end inside quotes
            continue
        line = layout.newline.join(record).removesuffix("\r")
        try:
            rows.append(next(csv.reader([line], delimiter=layout.separator), []))
        except (csv.Error, TypeError):  # a TypeError: not one character, which the reader reports
            return []
        if len(rows) >= _ROWS + layout.header_lines:
            break
        record.clear()
    return [[cell.strip() for cell in row] for row in rows if row]


class _File:
    """The beginning of one file.

    Attributes:
        names: the cells of the last header line; [] without header lines.
        records: the cells of the first records.
        headed: whether a file before this one has a header.
    """

    def __init__(
        self, path: Path, layout: CsvLayout, kind: SequenceKind, rows: list[list[str]], *, headed: bool
    ) -> None:
        self.path, self.layout, self.kind, self.headed = path, layout, kind, headed
        self.names = rows[layout.header_lines - 1] if layout.header_lines > 0 else []
        self.records = rows[max(layout.header_lines, 0) :]

    def check(self) -> None:
        """Check every configured column; see `check_columns`."""
        for field, column in self.layout.columns.items():
            if column < 0:
                continue  # the reader refuses it
            cells = [row[column] for row in self.records if len(row) > column and row[column]]
            if self.layout.header_lines > 0:
                self._check_header(field, column, cells)
            else:
                self._refuse_header_as_record(column, cells)
            self._check_cells(field, column, cells)

    def _check_header(self, field: str, column: int, cells: list[str]) -> None:
        names, key = self.names, self.layout.key(field)
        if column < len(names):
            self._refuse_record_as_header(column, cells)
            if self._states(field, names[column]):
                return
        found = f" is the column {_shown(names[column])}" if column < len(names) else ""
        others = [i for i, name in enumerate(names) if self._states(field, name)]
        if others or column >= len(names):
            raise UserError(
                f"{self.path}: {key}={column}{found}, but the header has {_listed(names)}: "
                + (f"set {key}={others[0]}" if others else self._advice(column))
            )

    def _states(self, field: str, name: str) -> bool:
        """Whether the name of a column says that it holds this field."""
        fields = {each.lower() for each in self.layout.columns} - {"sequence"}
        if field.lower() in fields and field.lower() in (each.lower() for each in self.names):
            return name.lower() == field.lower()
        return name.lower() not in fields and self.kind.is_name(name)

    def _refuse_record_as_header(self, column: int, cells: list[str]) -> None:
        """Refuse a last header line that looks like the records: it would be left out."""
        name, kind = self.names[column], self.kind
        if kind.is_name(name) or name.lower() in kind.other_names or not kind.is_cell(name):
            return
        if not all(map(kind.is_cell, cells)) or _NUMBER.fullmatch(name):
            return
        as_long = len(name) >= _SHORT or (cells and 2 * len(name) >= min(map(len, cells)))
        as_written = kind is SMILES or name.isupper() or len(name) > 2 * _SHORT
        if as_long and as_written:
            lines, key = self.layout.header_lines, f"{self.layout.reader}.header_lines"
            advice = "add the header to this file, as the others have it" if self.headed else f"set {key}={lines - 1}"
            rename = "smiles" if kind is SMILES else "sequence"
            raise UserError(
                f"{self.path}:{lines}: {key}={lines} leaves out a line that looks like a record ({_shown(name)} in "
                f"column {column}): {advice}; if it is a header, rename this column to {rename!r}"
            )

    def _refuse_header_as_record(self, column: int, cells: list[str]) -> None:
        """Refuse a first record that looks like a header, where the configuration says that there is none."""
        if not cells or not self.records or len(self.records[0]) <= column:
            return
        name, *rest = self.records[0][column], *cells[1:]
        sequences = [cell for cell in rest if self.kind.is_cell(cell)]
        unlike = bool(rest) and 2 * len(sequences) >= len(rest) and not self.kind.is_cell(name)
        if self.kind is PROTEINS and sequences and all(cell.isupper() for cell in sequences):
            unlike |= not name.isupper()
        if self.kind.is_name(name) or unlike:
            key = f"{self.layout.reader}.header_lines"
            columns = _listed(self.records[0])
            raise UserError(f"{self.path}:1: this line is a header ({columns}), but {key}=0: set {key}=1")

    def _check_cells(self, field: str, column: int, cells: list[str]) -> None:
        """Refuse cells that are no sequences; a name that states the content is believed, unless they are numbers."""
        if not cells:
            return  # empty sequences are counted later
        numbers = all(map(_NUMBER.fullmatch, cells))
        name = self.names[column] if self.names else None
        if not numbers and name is not None and self._states(field, name):
            return
        others = [cell for cell in cells if not self.kind.is_cell(cell)]
        key = self.layout.key(field)
        found = (
            f"{key}={column} is the column {_shown(name)}, which holds"
            if name
            else f"{key}={column}: the column holds"
        )
        if numbers or 2 * len(others) > len(cells):
            raise UserError(
                f"{self.path}: {found} {_shown((others or cells)[0])} instead of {self.kind.noun}; the columns are "
                f"{_listed(self.names or self.records[0])}: {self._advice(column)}"
            )
        if longer := self._longer_column(column, max(map(len, cells))):
            rename = f", or rename the column {_shown(name)} to 'sequence'" if name else ""
            raise UserError(
                f"{self.path}: {found} {_shown(cells[0])}, but column {longer} holds longer sequences: set "
                f"{key}={longer}{rename}"
            )

    def _longer_column(self, column: int, length: int) -> int | None:
        """A column of much longer sequences than the configured one, whose cells are as short as labels."""
        if length >= _SHORT:
            return None
        for other in range(min(map(len, self.records))):
            cells = [row[other] for row in self.records if row[other]]
            sequences = cells and all(map(self.kind.is_cell, cells)) and not any(map(_NUMBER.fullmatch, cells))
            if other != column and sequences and min(map(len, cells)) >= 4 * length:
                return other
        return None

    def _advice(self, column: int) -> str:
        field = next(field for field, number in self.layout.columns.items() if number == column)
        line = self.layout.separator.join(self.names or self.records[0])
        if len(self.names or self.records[0]) == 1:
            for separator, written in _SEPARATORS.items():
                if separator in line:
                    return f"set {self.layout.reader}.data_sep={written}"
        return f"set {self.layout.key(field)} to the column of the {self.kind.noun}, counted from 0"


def _listed(names: Sequence[str]) -> str:
    """Columns with their numbers."""
    listed = ", ".join(f"{number} {_shown(name)}" for number, name in enumerate(names[:_SHOWN]))
    return listed + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 30 else text[:27] + "...")
