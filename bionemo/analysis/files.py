# SPDX-License-Identifier: Apache-2.0
"""What the commands of `python -m bionemo.analysis` read, and how what they write comes to its name."""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bionemo.data.shards.fasta import FastaSource
from bionemo.errors import UserError


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

    def column(self, name: str, option: str) -> list[str]:
        """Cells of a column.

        Raises:
            UserError: when there is none, with the option that names one.
        """
        if name not in self.columns:
            there = ", ".join(map(repr, self.columns[:8]))
            raise UserError(f"{self.path} has no column {name!r}, but {there}: name one with {option}")
        number = self.columns.index(name)
        return [row[number] for row in self.rows]


def read_table(path: Path) -> Table:
    """Read a CSV file with a header, or a .tsv file; empty lines do not count.

    Raises:
        UserError: when it cannot be read, or a row has other columns than the header.
    """
    rows, places = [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            columns = next(reader, [])
            for row in filter(None, reader):
                if len(row) != len(columns):
                    raise UserError(
                        f"{path}:{reader.line_num}: {len(row)} cells under {len(columns)} columns: a cell that holds "
                        "a ',' is written in double quotes"
                    )
                rows.append(row)
                places.append(f"{path}:{reader.line_num}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no CSV file ({error})") from error
    if not rows:
        raise UserError(f"{path} has no rows below a header: is that the file?")
    return Table(path, columns, rows, places)


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def is_fasta(path: Path) -> bool:
    """Whether a file begins as FASTA files do.

    Raises:
        UserError: when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(1 << 12).lstrip(b"\xef\xbb\xbf\r\n")[:1] == b">"
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error


def read_fasta(path: Path) -> list[dict[str, str]]:
    """Read `id` (its number, if there is none), `sequence` and each `key=value` of the headers.

    Raises:
        UserError: when it cannot be read, or is no FASTA file; when a record begins within a line.
    """
    with TemporaryDirectory() as aside:  # an index beside the file would serve one reading
        source = FastaSource([path], index_mapping_dir=aside)
        records = [source.fields(number) for number in range(len(source))]
    for number, record in enumerate(records, 1):
        record["id"] = record["id"] or str(number)
        record["sequence"] = "".join(record["sequence"].split())
    if any(">" in record["sequence"] for record in records):
        lines = path.read_bytes().split(b"\n")
        line = next(n for n, text in enumerate(lines, 1) if b">" in text and not text.startswith(b">"))
        raise UserError(f"{path}:{line}: a '>' within a sequence: put a line end before the record that begins there")
    return records


def read_sequence(given: str) -> str:
    """Read the one sequence that a command is given, as a FASTA file or as it is.

    Raises:
        UserError: when it is neither, or the file has several.
    """
    path = Path(given).expanduser()
    if len(given) < 256 and path.is_file():
        if not is_fasta(path):
            raise UserError(f"{path} does not begin with '>': give a FASTA file, or the sequence itself")
        records = read_fasta(path)
        if len(records) != 1:
            raise UserError(f"{path} holds {len(records):,} sequences: give a file with the wild type alone")
        return records[0]["sequence"]
    if not re.fullmatch("[A-Za-z]+", given):
        raise UserError(f"{given[:60]!r} is neither a file that is there nor a sequence of letters")
    return given


@contextmanager
def finished(path: Path) -> Iterator[Path]:
    """Give a name beside a file's own, which becomes that when all is written, and goes when something fails.

    Raises:
        UserError: when the file cannot be written, which is found out before anything is computed for it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_dir():
            raise UserError(f"{path} is a directory: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        yield unfinished
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): make room or name another") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
