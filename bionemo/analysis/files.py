# SPDX-License-Identifier: Apache-2.0
"""Input and output files of the commands of `bionemo analysis`."""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.files import replacing
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.data.shards.formats import Fasta
from bionemo.data.shards.records import TextRecords
from bionemo.data.table import Table, read_table
from bionemo.tokenizers.residues import trim


def read_nonempty_table(path: Path) -> Table:
    """Read a table; errors as in `read_table`, also if there are no rows."""
    table = read_table(path)
    if not table.rows:
        raise UserError(f"{path} has no rows below a header: check the path")
    return table


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def is_fasta(path: Path) -> bool:
    """Return whether a file starts with a FASTA header.

    Raises:
        UserError: if it cannot be read or is compressed.
    """
    refuse_compressed(path)
    try:
        with path.open("rb") as file:
            return file.read(1 << 12).lstrip(b"\xef\xbb\xbf\r\n")[:1] == b">"
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error


def read_fasta(path: Path) -> list[dict[str, str]]:
    """Read the `id` (by default the number), the `sequence` and each `key=value` in the header of every record.

    Raises:
        UserError: if it cannot be read or is not a FASTA file.
    """
    with TemporaryDirectory() as index_directory:  # an index beside the file would be used only once
        source = TextRecords([path], Fasta(), index_mapping_dir=index_directory)
        records = [source.fields(number) for number in range(len(source))]
    for number, record in enumerate(records):
        record["id"] = record["id"] or str(number)
    return records


def read_sequence(argument: str) -> str:
    """Return the sequence of a command line argument: that of a FASTA file, or the letters themselves.

    Raises:
        UserError: if it is neither, or the file has several sequences.
    """
    path = Path(argument).expanduser()
    if len(argument) < 256 and path.is_file():
        if not is_fasta(path):
            raise UserError(f"{path} does not begin with '>': give a FASTA file, or the sequence itself")
        records = read_fasta(path)
        if len(records) != 1:
            raise UserError(f"{path} holds {len(records):,} sequences: give a file with the wild type only")
        return records[0]["sequence"]
    if not re.fullmatch(r"[A-Za-z\s*]+", argument):
        raise UserError(f"{argument[:60]!r} is neither an existing file nor a sequence of letters")
    return trim("".join(argument.split()).encode()).decode()


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to `path` at the end, or removed after an error.

    It is created at once, so an output that cannot be written is detected before anything is computed.

    Raises:
        UserError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.touch()
            yield new
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): free disk space or choose another path"
        ) from error


def refuse_existing(paths: Sequence[Path], overwrite: bool, inputs: Sequence[Path | None] = ()) -> None:
    """Raise a UserError if an output is a directory or an input, or exists and `overwrite` is false."""
    for path in paths:
        if path.exists() and any(each and os.path.exists(each) and os.path.samefile(path, each) for each in inputs):
            raise UserError(f"{path} is an input: choose another --output")
        if path.is_dir():
            raise UserError(f"{path} is a directory: name a file in it")
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists: choose another --output, or add --overwrite")
