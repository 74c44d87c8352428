# SPDX-License-Identifier: Apache-2.0
"""What the commands of `python -m bionemo.analysis` read, and how what they write comes to its name."""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.data.shards.fasta import FastaSource
from bionemo.data.table import Table, read_table


def read_filled(path: Path) -> Table:
    """Read a table that has rows.

    Raises:
        UserError: as `read_table`, and when there are none.
    """
    table = read_table(path)
    if not table.rows:
        raise UserError(f"{path} has no rows below a header: is that the file?")
    return table


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
        UserError: when it cannot be read, or is no FASTA file.
    """
    with TemporaryDirectory() as aside:  # an index beside the file would serve one reading
        source = FastaSource([path], index_mapping_dir=aside)
        records = [source.fields(number) for number in range(len(source))]
    for number, record in enumerate(records, 1):
        record["id"] = record["id"] or str(number)
        record["sequence"] = "".join(record["sequence"].split())
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.touch()
            yield new
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): make room or name another") from error


def refuse_existing(paths: Sequence[Path], overwrite: bool) -> None:
    """Refuse outputs that exist, unless they are to be replaced.

    Raises:
        UserError: naming the first.
    """
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path} is a directory: name a file in it")
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists: name another --output, or give --overwrite")
