# SPDX-License-Identifier: Apache-2.0
"""Small CSV files, read as a whole: labelled sequences, variants, annotations of proteins, raw data of tasks."""

import csv
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bionemo.common.errors import UserError, shorten
from bionemo.common.regular import require_regular
from bionemo.config.hints import did_you_mean
from bionemo.data.shards.compressed import refuse_compressed

_MAX_LISTED = 16  # columns in a message
_EXAMINED_LINES = 64  # for the separator of the columns
# Missing values in lower case, as pandas, R, Excel, C libraries and databases write them.
_MISSING = frozenset((
    "", "nan", "-nan", "1.#qnan", "-1.#qnan", "1.#ind", "-1.#ind", "na", "n/a", "#n/a", "#n/a n/a", "#na", "<na>",
    "none", "null", "(null)", "[null]", "\\n",
))  # fmt: skip
_PUNCTUATION = str.maketrans("[](),;", "      ")
# Sodium, and the class of samples without a property: no program writes missing values in this way.
_NOT_MISSING = ("Na", "none")
_PEPTIDES = ("NA", "NAN")  # missing values of amino acids


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value: it is empty, or NaN, NA, N/A, null or None; see `_MISSING`."""
    text = cell.strip()
    return text.lower() in _MISSING and text not in _NOT_MISSING


def is_missing_sequence(text: str) -> bool:
    """Return whether a text is a missing value such as nan; NA and NAN are peptides."""
    return is_missing(text) and text.strip() not in ("", *_PEPTIDES)


def describe_missing(cells: Iterable[str]) -> str:
    """Return how often each missing value occurs, such as `8 empty, 4 NaN`."""
    return ", ".join(f"{count:,} {text}" for text, count in Counter(cell.strip() or "empty" for cell in cells).items())


def parse_number(cell: str) -> float | None:
    """Return the number in a cell, which may be infinite, or None if it is not a number."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return None if math.isnan(number) or "_" in cell else number  # Python reads 1_000 as 1000


def align_labels(cell: str, residues: int) -> str:
    """Return the labels of residues, one letter each.

    Blanks are labels if the cell has as many characters as residues (DSSP); otherwise they separate labels.
    """
    forms = (cell, cell.strip(), "".join(cell.split()))
    return next((form for form in forms if len(form) == residues), cell.strip())


def single_column(key: str, value: str | list[str] | None) -> str | None:
    """Return the only column that a configuration key names, None without one.

    Raises:
        UserError: if there are several.
    """
    names = [value] if isinstance(value, str) else value or []
    if len(names) > 1:
        raise UserError(f"{key}={names}: only one target is supported: start a run for each")
    return names[0] if names else None


def split_labels(cell: str) -> list[str]:
    """Return the items of a cell such as `0.1 0.2`, `[0.1, 0.2]` or `a;b`."""
    return cell.translate(_PUNCTUATION).split()


class Table(NamedTuple):
    """A file with one text per cell."""

    path: Path | str  # for messages
    columns: list[str]  # names of the columns
    rows: list[list[str]]  # cells of each row, as many as columns
    locations: list[str]  # `file:line` of each row, for messages

    def column(self, name: str, advice: str) -> list[str]:
        """Return the cells of a column; `advice` ends the error message.

        Raises:
            UserError: if there is no such column, or several.
        """
        if name not in self.columns:
            columns = ", ".join(map(repr, self.columns[:_MAX_LISTED])) or "nothing"
            columns += f" and {len(self.columns) - _MAX_LISTED:,} more" if len(self.columns) > _MAX_LISTED else ""
            similar = did_you_mean(name, self.columns)
            raise UserError(f"{self.path} has no column {name!r}{similar}, but {columns}: {advice}")
        if self.columns.count(name) > 1:
            raise UserError(f"{self.path} has {self.columns.count(name)} columns {name!r}: remove all but one")
        number = self.columns.index(name)
        return [row[number] for row in self.rows]


def read_table(path: Path) -> Table:
    """Read a .tsv or CSV file with a header, a parquet file, or JSON with an object on each line.

    There may be no rows. Lines without any text are skipped. For the separator of the columns see `find_separator`. A
    list in a parquet or JSON file becomes its items, separated by blanks.

    Raises:
        UserError: if the file cannot be read, or the header and a row have different numbers of columns.
    """
    try:
        require_regular(path)
        refuse_compressed(path)
        if path.suffix.lower() in (".parquet", ".json", ".jsonl"):
            return _read_records(path)
        separator = find_separator(path)
        with path.open("rb") as file:
            return parse_table(file, path, separator)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error


def _read_records(path: Path) -> Table:
    """Read a parquet file, or JSON with an object on each line.

    Raises:
        UserError: if the file holds something else.
        OSError: if it cannot be read.
    """
    from pyarrow import json, parquet

    try:
        table = parquet.read_table(path) if path.suffix.lower() == ".parquet" else json.read_json(path)
    except ValueError as error:
        raise UserError(
            f"{path} cannot be read ({shorten(str(error), 200)}): give parquet, or JSON with an object on each line"
        ) from error
    rows = [[_text(value) for value in row.values()] for row in table.to_pylist()]
    return Table(path, table.column_names, rows, [f"{path}:{number}" for number in range(1, len(rows) + 1)])


def _text(value: object) -> str:
    """Return the text of a value; a list becomes its items, separated by blanks."""
    return (
        " ".join(_text(each) or "nan" for each in value)
        if isinstance(value, list)
        else str("" if value is None else value)
    )


def find_separator(path: Path) -> str:
    """Return the separator of the columns: one that gives the header and the first row the same number of cells.

    Commas come first, then semicolons and tabs; in a .tsv file, tabs.

    Raises:
        OSError: if the file cannot be read.
    """
    separators = "\t,;" if path.suffix.lower() == ".tsv" else ",;\t"
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = list(islice((line for line in file if line.strip()), _EXAMINED_LINES))
    found = []
    for separator in separators:
        with suppress(csv.Error):
            sizes = [len(row) for row in islice(csv.reader(lines, delimiter=separator), 2)]
            found.append((sizes, separator))
    usable = [(sizes, separator) for sizes, separator in found if sizes and sizes[0] > 1]
    same = (separator for sizes, separator in usable if len({*sizes}) == 1)
    return next(same, usable[0][1] if usable else separators[0])


def parse_table(file: BinaryIO, path: Path | str, separator: str) -> Table:
    """Parse an open file, see `read_table`; `path` is its name in messages."""
    rows, locations = [], []
    try:
        reader = csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=separator, strict=True)
        columns = next((row for row in reader if any(map(str.strip, row))), [])
        for row in reader:
            if not any(map(str.strip, row)):
                continue
            location = f"{path}:{reader.line_num}"
            if len(row) > len(columns) == 1:
                raise UserError(
                    f"{path}: the first line, {shorten(columns[0])}, has one cell and {location} has {len(row)}: "
                    "quote a cell that contains a comma, or remove the lines above the titles of the columns"
                )
            if len(row) > len(columns):
                raise UserError(
                    f"{location}: {len(row)} cells under {len(columns)} columns: put cells that contain "
                    f"{separator!r} in double quotes"
                )
            if len(row) < len(columns):
                raise UserError(f"{location}: {incomplete_row(columns)}")
            rows.append(row)
            locations.append(location)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read ({error}): give a CSV file in UTF-8") from error
    except csv.Error as error:
        raise UserError(
            f"{path} is not a valid CSV file (line {reader.line_num}: {error}): check its quotes, or write it again"
        ) from error
    return Table(path, columns, rows, locations)


def incomplete_row(columns: list[str]) -> str:
    """Return the error message for a row without all of these columns."""
    more = ", ..." if len(columns) > _MAX_LISTED else ""
    return f"the row is incomplete: fill in {', '.join(columns[:_MAX_LISTED])}{more}, or remove it"
