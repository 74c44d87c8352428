# SPDX-License-Identifier: Apache-2.0
"""Cut inputs into stretches that workers read independently of each other, and count what is in them."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import BLOCK, line_number
from bionemo.data.shards.fasta import first_record
from bionemo.preparation.records import Records, csv_records, fasta_records

_STRETCH = 32 << 20  # bytes
_WINDOW = 1 << 16


@dataclass(frozen=True)
class Columns:
    """How a CSV input is laid out: titles, or numbers from 0, of its columns."""

    name: str | int
    sequence: str | int
    separator: str


@dataclass(frozen=True)
class Stretch:
    """A part of an input that begins and ends between records.

    Attributes:
        path: the file, uncompressed.
        shown: what the user calls it.
        columns: of a CSV file; None for FASTA.
        start: its first byte.
        stop: the byte behind it.
        first: number of its first record in the whole input, from 0.
        line: number of its first line in the file, from 1; 0 for one that goes on and is not counted yet.
        records: how many it holds.
    """

    path: Path
    shown: str
    columns: Columns | None
    start: int
    stop: int
    first: int = 0
    line: int = 1
    records: int = 0

    def read(self) -> Iterator[Records]:
        """Read its records, some at a time."""
        if self.columns:
            yield from csv_records(self.path, self.shown, self.first, *astuple(self.columns))
        else:
            yield from fasta_records(self.path, self.shown, self.start, self.stop, self.first, self.line)


def is_fasta(path: Path, shown: str, wanted: Literal["auto", "fasta", "csv"]) -> bool:
    """Whether a file is FASTA: as the user says, else by its name or its first letter."""
    if wanted != "auto":
        return wanted == "fasta"
    with path.open("rb") as file:
        top = file.read(_WINDOW).lstrip(b"\xef\xbb\xbf\r\n")
    suffixes = Path(shown).suffixes
    return top.startswith(b">") or any(suffix in (".fasta", ".fa", ".faa", ".fas") for suffix in suffixes)


def cut(path: Path, shown: str, columns: Columns | None) -> list[Stretch]:
    """Cut a file where records begin; a CSV file, whose quotes may hold anything, stays whole.

    Raises:
        UserError: an empty file, or a FASTA file that does not begin with a record.
    """
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{shown} is empty: download or write it again")
    if columns:
        return [Stretch(path, shown, columns, 0, size)]
    edges = [first_record(path, shown)]
    with path.open("rb", buffering=0) as file:
        top = os.pread(file.fileno(), 1 << 20, 0)
        if b"\r" in top and b"\n" not in top:
            raise UserError(f"{shown}:1: lines end in CR alone: convert the file, as with tr '\\r' '\\n'")
        while edges[-1] < size:
            edges.append(next_place(file.fileno(), b"\n>", edges[-1] + _STRETCH, size))
    stretches = [Stretch(path, shown, None, start, stop, line=0) for start, stop in pairwise(edges)]
    return [replace(stretches[0], line=line_number(path, edges[0])), *stretches[1:]]


def next_place(handle: int, edge: bytes, place: int, size: int) -> int:
    r"""Find the first byte, at or behind a place, in front of which an edge begins (`\n` or `\n>`); else the size."""
    place -= 1
    while place < size:
        window = os.pread(handle, _WINDOW, place)
        if (found := window.find(edge)) >= 0:
            return place + found + 1
        place += max(1, len(window) - 1)
    return size


def count(pool: Executor, stretches: Sequence[Stretch]) -> list[Stretch]:
    """Number records and lines through."""
    counted: list[Stretch] = []
    first, line = 0, 1
    for stretch, (records, lines) in zip(stretches, pool.map(_count, stretches), strict=True):
        line = stretch.line or line
        counted.append(replace(stretch, first=first, line=line, records=records))
        first, line = first + records, line + lines
    return counted


def _count(stretch: Stretch) -> tuple[int, int]:
    if stretch.columns:
        return sum(map(len, stretch.read())), 0
    records = lines = 0
    last = ord("\n")
    with stretch.path.open("rb", buffering=0) as file:
        for place in range(stretch.start, stretch.stop, BLOCK):
            text = np.frombuffer(os.pread(file.fileno(), min(BLOCK, stretch.stop - place), place), np.uint8)
            ends, marks = text == ord("\n"), text == ord(">")
            records += int(np.count_nonzero(ends[:-1] & marks[1:])) + int(last == ord("\n") and bool(marks[0]))
            lines += int(np.count_nonzero(ends))
            last = text[-1]
    return records, lines
