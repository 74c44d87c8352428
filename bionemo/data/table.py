# SPDX-License-Identifier: Apache-2.0
"""Tables that people write, small enough to be read whole: labelled sequences, variants, what is known of proteins."""

import csv
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular

_SHOWN = 8  # columns that a message lists


class Table(NamedTuple):
    """Rows of a file, every cell as the text it is.

    Attributes:
        path: where it was read from.
        columns: their names.
        rows: as many cells each.
        places: where each row stands, for messages: `file:line`.
    """

    path: Path
    columns: list[str]
    rows: list[list[str]]
    places: list[str]

    def column(self, name: str, advice: str) -> list[str]:
        """Cells of a column.

        Args:
            name: of the column.
            advice: what to do when there is none.

        Raises:
            UserError: when there is none, or several.
        """
        if name not in self.columns:
            there = ", ".join(map(repr, self.columns[:_SHOWN])) or "nothing"
            raise UserError(f"{self.path} has no column {name!r}, but {there}: {advice}")
        if self.columns.count(name) > 1:
            raise UserError(f"{self.path} has {self.columns.count(name)} columns {name!r}: leave one of them")
        number = self.columns.index(name)
        return [row[number] for row in self.rows]


def read_table(path: Path) -> Table:
    """Read a CSV file with a header, or a .tsv file; empty lines do not count, and there may be no rows.

    Raises:
        UserError: when it cannot be read, or a row has other columns than the header.
    """
    rows, places = [], []
    separator = "\t" if path.suffix == ".tsv" else ","
    try:
        require_regular(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            columns = next(reader, [])
            for row in filter(None, reader):
                place = f"{path}:{reader.line_num}"
                if len(row) > len(columns):
                    raise UserError(
                        f"{place}: {len(row)} cells under {len(columns)} columns: a cell that holds a {separator!r} "
                        "is written in double quotes"
                    )
                if len(row) < len(columns):
                    raise UserError(f"{place}: {incomplete(columns)}")
                rows.append(row)
                places.append(place)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read ({error}): give a CSV file in UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file ({error}): check its quotes, or write it again") from error
    return Table(path, columns, rows, places)


def incomplete(columns: list[str]) -> str:
    """What is to be said of a row that lacks a cell."""
    more = ", ..." if len(columns) > _SHOWN else ""
    return f"the row is incomplete: fill in {', '.join(columns[:_SHOWN])}{more}, or remove it"
