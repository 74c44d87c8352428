# SPDX-License-Identifier: Apache-2.0
"""Divide inputs into chunks that workers read independently, and count their records."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.files import FASTA_EXTENSIONS
from bionemo.data.shards.formats import BYTE_ORDER_MARK, find_first_record
from bionemo.preparation.inputs import read_head
from bionemo.preparation.records import BLOCK_BYTES, InputColumns, Records, read_csv_records, read_fasta_records

_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Chunk:
    """A part of an input that starts and ends between records."""

    path: Path  # the file, uncompressed
    display_path: str  # path or URL of the input file, for messages
    columns: InputColumns | None  # columns of a CSV file; None for FASTA
    start: int  # offset of its first byte
    stop: int  # offset of the byte after its last one
    first_number: int = 0  # index of its first record in the whole input
    first_line: int = 0  # line number of its first record, from 1; 0 if the lines before it have not been counted
    num_records: int = 0  # number of its records

    def read(self) -> Iterator[Records]:
        """Read the records in batches."""
        if self.columns:
            yield from read_csv_records(self.path, self.display_path, self.first_number, self.columns)
        else:
            yield from read_fasta_records(
                self.path, self.display_path, self.start, self.stop, self.first_number, self.first_line
            )


def is_fasta(path: Path, display_path: str, file_format: Literal["auto", "fasta", "csv"]) -> bool:
    """Return whether a file is FASTA; "auto" decides by the suffix and the first letter."""
    if file_format != "auto":
        return file_format == "fasta"
    head = read_head(path, 1 << 16).lstrip(BYTE_ORDER_MARK + b"\r\n")
    return head.startswith(b">") or any(suffix in FASTA_EXTENSIONS for suffix in Path(display_path).suffixes)


def split_into_chunks(path: Path, display_path: str, columns: InputColumns | None) -> list[Chunk]:
    """Divide a FASTA file where records start. A CSV file is one chunk, because quoted fields may contain line ends.

    Raises:
        UserError: if the file is empty, or is a FASTA file that does not start with a record.
    """
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{display_path} is empty: download or write it again")
    if columns:
        return [Chunk(path, display_path, columns, 0, size)]
    head = read_head(path, 1 << 20)
    if b"\r" in head and b"\n" not in head:
        raise UserError(f"{display_path}:1: lines end in CR alone: convert the file, as with tr '\\r' '\\n'")
    first = find_first_record(path, display_path)
    chunks = [Chunk(path, display_path, None, *bounds) for bounds in pairwise(find_bounds(path, first, b">"))]
    return [replace(chunks[0], first_line=1 + head.count(b"\n", 0, first)), *chunks[1:]]


def find_bounds(path: Path, first: int, marker: bytes = b"", parts: int = 1) -> list[int]:
    """Return offsets of lines that begin with a marker, at least 32 MB / `parts` apart.

    The first offset is `first`, the last one is the size of the file.
    """
    bounds, size = [first], path.stat().st_size
    with path.open("rb") as file:
        while bounds[-1] < size:
            file.seek(bounds[-1] + max(1, _CHUNK_BYTES // parts) - 1)
            while file.readline() and not file.peek(1).startswith(marker):
                pass
            bounds.append(min(file.tell(), size))
    return bounds


def count_records(workers: Executor, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Count records and lines, and set the first record number and line of each chunk."""
    counted: list[Chunk] = []
    number, line = 0, 1
    for chunk, (num_records, num_lines) in zip(chunks, workers.map(_count, chunks), strict=True):
        line = chunk.first_line or line
        counted.append(replace(chunk, first_number=number, first_line=line, num_records=num_records))
        number, line = number + num_records, line + num_lines
    return counted


def _count(chunk: Chunk) -> tuple[int, int]:
    if chunk.columns:
        return sum(map(len, chunk.read())), 0
    num_records, num_lines = 1, 0
    with chunk.path.open("rb", buffering=0) as file:
        for offset in range(chunk.start, chunk.stop, BLOCK_BYTES):
            size = min(BLOCK_BYTES + 1, chunk.stop - offset)  # a line that begins in the next block shows its marker
            text = np.frombuffer(os.pread(file.fileno(), size, offset), np.uint8)
            newlines = text == ord("\n")
            num_records += int(np.count_nonzero(newlines[:-1] & (text[1:] == ord(">"))))
            num_lines += int(np.count_nonzero(newlines[:BLOCK_BYTES]))
    return num_records, num_lines
