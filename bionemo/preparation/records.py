# SPDX-License-Identifier: Apache-2.0
"""Read names and sequences from FASTA and CSV files, and apply the policies for invalid records.

All operations are vectorized over columns in Arrow's layout (a buffer of bytes and a buffer of offsets). Only invalid
records are processed one by one in Python.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import SequencePolicies
from bionemo.data.shards.formats import MARKER_IN_SEQUENCE
from bionemo.data.table import find_separator, is_missing_sequence
from bionemo.preparation.inputs import notify_dropped_columns

_NEWLINE, _MARK, _SPACE, _TAB = b"\n> \t"
_A, _Z = b"AZ"
_STRIPPED = r"[*\-. \t]"
_INNER_STOP = r"\*[^A-Z]*[A-Z]"
_NOT_A_LETTER = "[^A-Z]"
_NOT_IN_CSV = r'[,"\n\r\x80-\xff]'  # bytes not allowed in the output, where sequences are never quoted
BLOCK_BYTES = 1 << 20  # arrays computed from a block of this size stay in the CPU cache
_CSV_BLOCK = 32 << 20  # bytes; larger than any row
_LONGEST_MISSING = 9  # letters of a missing value


@dataclass
class Records:
    """Consecutive records of an input."""

    display_path: str  # path or URL of the file, for messages
    first_number: int  # index of the first record in the input
    lines: NDArray[np.int64]  # [n], line number of each record, from 1
    names: pa.Array  # binary [n]
    sequences: pa.Array  # binary [n]
    kept: NDArray[np.bool_] = field(init=False)  # [n], whether each record is kept
    dropped: Counter[str] = field(default_factory=Counter)  # number of dropped records by reason
    changed: Counter[str] = field(default_factory=Counter)  # number of changed records by the kind of change

    def __post_init__(self) -> None:
        self.kept = np.ones(len(self.names), bool)

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self) -> NDArray[np.int64]:
        """Return the index of each record in the input, int64 [n]."""
        return self.first_number + np.arange(len(self))

    def lengths(self) -> NDArray[np.int32]:
        """Return the length of each sequence, int32 [n]."""
        return np.diff(get_offsets(self.sequences))

    def drop(self, condition: NDArray[np.bool_], reason: str) -> None:
        """Drop the records that satisfy a condition and count those that were kept until now."""
        self.dropped[reason] += int((self.kept & condition).sum())
        self.kept &= ~condition

    def error(self, index: int, problem: str) -> UserError:
        """Create an error message with the file, line and name of a record."""
        name = self.names[index].as_py().decode(errors="replace")[:60]
        return UserError(f"{self.display_path}:{self.lines[index]}: record {name!r} {problem}")


def read_fasta_records(
    path: Path, display_path: str, start: int, stop: int, first_number: int, first_line: int
) -> Iterator[Records]:
    """Read a part of an uncompressed FASTA file: from the '>' at offset `start` to that at `stop`, or to the end.

    `first_number` and `first_line` are the index in the input and the line number, from 1, of the first record.

    Raises:
        UserError: if the file shrinks while it is read, a record is too long, or there is a carriage return inside a
            line, or a '>' inside a line of a sequence.
    """
    with path.open("rb", buffering=0) as file:
        size = BLOCK_BYTES
        while start < stop:
            # reading the last, incomplete record again is cheaper than copying its first part
            data = os.pread(file.fileno(), min(size, stop - start), start)
            if not data:
                raise UserError(f"{path} was truncated while it was read: wait until it is complete, then start again")
            end = len(data) if start + len(data) == stop else data.rfind(b"\n>") + 1
            if end:
                records, num_lines = _parse_fasta(data[:end], display_path, first_number, first_line)
                yield records
                first_number, first_line = first_number + len(records), first_line + num_lines
                start, size = start + end, BLOCK_BYTES
            elif size >= 1 << 31:  # what int32 can count
                raise UserError(f"{path}: a record of over {size:,} bytes begins at byte {start:,}: split it")
            else:
                size *= 2


def _parse_fasta(data: bytes, display_path: str, first_number: int, first_line: int) -> tuple[Records, int]:
    """Parse whole records; also return the number of lines."""
    if not data.endswith(b"\n"):
        data += b"\n"
    if has_carriage_returns := b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        if b"\r" in data:
            line = first_line + data.count(b"\n", 0, data.index(b"\r"))
            raise UserError(
                f"{display_path}:{line}: a carriage return inside a line: write the file with LF line ends"
            )
    text = np.frombuffer(data, np.uint8)
    line_stops = np.flatnonzero(text == _NEWLINE)
    line_starts = np.append(0, line_stops[:-1] + 1)
    headers = np.flatnonzero(text[line_starts] == _MARK)  # line indices
    lines_with_marks = np.searchsorted(line_stops, np.flatnonzero(text == _MARK))
    if len(lines_with_marks) > len(headers) and len(wrong := np.setdiff1d(lines_with_marks, headers)):
        raise UserError(f"{display_path}:{first_line + wrong[0]}: {MARKER_IN_SEQUENCE}")
    begin, end = line_starts[headers] + 1, line_stops[headers]
    # a name ends at the first space of the header; that of a header that begins with a space is empty
    spaces = np.flatnonzero((text == _SPACE) | (text == _TAB) if b"\t" in data else text == _SPACE)
    stops = np.minimum(np.append(spaces, len(text))[np.searchsorted(spaces, begin)], end)
    names = gather_slices(text, begin, stops)

    # removing the line ends moves the bytes of line i forward by i positions
    joined = np.frombuffer(data.replace(b"\n", b""), np.uint8)
    stops = np.append(begin[1:] - 1 - headers[1:], len(joined))
    sequences = gather_slices(joined, end - headers, stops)
    records = Records(display_path, first_number, first_line + headers, names, sequences)
    if has_carriage_returns:
        records.changed["with CR LF line ends"] = len(records)
    return records, len(line_stops)


@dataclass(frozen=True)
class InputColumns:
    """Titles or indices of the columns of a CSV input, and its separator."""

    name: str | int
    sequence: str | int
    separator: str

    def options(self) -> tuple[pyarrow.csv.ReadOptions, pyarrow.csv.ParseOptions]:
        """Return the options of `pyarrow.csv.open_csv`.

        Raises:
            UserError: if the separator is not a single ASCII character.
        """
        if len(self.separator.encode()) != 1 or self.separator in '"\r\n':
            raise UserError(f"separator is {self.separator!r}: it must be one ASCII character, or \\t for a tab")
        read = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False)
        return read, pyarrow.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True)

    def resolve(self, path: Path, display_path: str) -> "InputColumns":
        """Find the separator and the titles of both columns, and log which other columns are not written.

        Raises:
            UserError: if a column is missing or ambiguous.
        """
        separator = find_separator(path) if self.separator == "," else self.separator.replace("\\t", "\t")
        try:
            with pyarrow.csv.open_csv(path, *replace(self, separator=separator).options()) as reader:
                titles = reader.schema.names
        except pa.ArrowInvalid as error:
            raise _malformed(display_path, error) from error
        name, sequence = (_find_column(titles, column, display_path) for column in (self.name, self.sequence))
        if name == sequence:
            raise UserError(f"{display_path}: id_column and sequence_column are both {name!r}: set two different ones")
        notify_dropped_columns(display_path, titles, [name, sequence])
        return InputColumns(name, sequence, separator)


def read_csv_records(path: Path, display_path: str, first_number: int, columns: InputColumns) -> Iterator[Records]:
    """Read names and sequences from a CSV file with a header; for the parameters see `read_fasta_records`.

    Raises:
        UserError: if a row has another number of columns.
    """
    titles = [str(columns.name), str(columns.sequence)]
    convert = pyarrow.csv.ConvertOptions(
        include_columns=titles, column_types=dict.fromkeys(titles, pa.binary()), strings_can_be_null=False
    )
    line = 2  # below the header
    try:
        with pyarrow.csv.open_csv(path, *columns.options(), convert) as reader:
            for batch in reader:
                lines = np.arange(line, line + len(batch))
                names, sequences = batch.columns
                yield Records(display_path, first_number, lines, names, _empty_missing(sequences))
                first_number, line = first_number + len(batch), line + len(batch)
    except pa.ArrowInvalid as error:
        raise _malformed(display_path, error) from error


def _empty_missing(sequences: pa.Array) -> pa.Array:
    """Replace missing values such as nan by empty sequences."""
    short = np.flatnonzero(np.diff(get_offsets(sequences)) <= _LONGEST_MISSING).tolist()
    missing = [row for row in short if is_missing_sequence(sequences[row].as_py().decode(errors="replace"))]
    if not missing:
        return sequences
    return pc.if_else(pa.array(np.isin(np.arange(len(sequences)), missing)), b"", sequences)


def _malformed(display_path: str, error: pa.ArrowInvalid) -> UserError:
    return UserError(f"{display_path}: {' '.join(str(error).split())}: correct it, or set separator")


def _find_column(titles: list[str], column: str | int, display_path: str) -> str:
    if isinstance(column, int) or column.isdecimal():
        column = titles[int(column)] if 0 <= int(column) < len(titles) else int(column)
    if titles.count(str(column)) > 1:
        raise UserError(f"{display_path} has several columns {column!r}: give them different titles")
    if column in titles:
        return str(column)
    raise UserError(
        f"{display_path} has no column {column!r}; it has {', '.join(titles)}: set id_column and sequence_column"
    )


def clean_records(records: Records, policies: SequencePolicies) -> None:
    """Convert sequences to upper case and apply the policies for invalid records, in place.

    Raises:
        UserError: if a record is invalid and its policy is `error`.
    """
    _check_names(records)
    _clean_letters(records, policies)
    for is_empty, problem in (
        (np.diff(get_offsets(records.names)) == 0, "has no name: write one after the '>', or set on_empty=skip"),
        (records.lengths() == 0, "has no sequence: remove or complete it, or set on_empty=skip"),
    ):
        if (is_empty & records.kept).any():
            if policies.on_empty == "error":
                raise records.error(int(np.flatnonzero(is_empty & records.kept)[0]), problem)
            records.drop(is_empty, "empty")


def _check_names(records: Records) -> None:
    text = get_bytes(records.names)
    if not len(text) or (text.max() < 128 and text.min() >= ord(" ")):
        return
    for index, name in enumerate(records.names.to_pylist()):
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise records.error(index, "has a name that is not UTF-8: convert it, as with iconv -t UTF-8") from error
        if b"\n" in name or b"\r" in name:
            raise records.error(index, "has a line end in its name: remove it")


def _clean_letters(records: Records, policies: SequencePolicies) -> None:
    letters = get_bytes(records.sequences)
    if not len(letters) or (letters.min() >= _A and letters.max() <= _Z):
        return
    upper = pc.ascii_upper(records.sequences.view(pa.string())).view(pa.binary())
    records.changed["with lower case letters"] += pc.sum(pc.not_equal(upper, records.sequences)).as_py()
    records.sequences = upper
    if policies.on_letters == "strip":
        if (is_joined := pc.match_substring_regex(upper, _INNER_STOP).to_numpy(zero_copy_only=False)).any():
            first = int(np.argmax(is_joined))
            raise records.error(
                first, "has a stop codon inside its sequence: correct it, or set on_letters=skip or keep"
            )
        records.sequences = pc.replace_substring_regex(upper, _STRIPPED, "")
        records.changed["with letters stripped"] += pc.sum(pc.not_equal(upper, records.sequences)).as_py()
    pattern = _NOT_IN_CSV if policies.on_letters == "keep" else _NOT_A_LETTER
    is_invalid = pc.match_substring_regex(records.sequences, pattern).to_numpy(zero_copy_only=False)
    if policies.on_letters != "skip" and is_invalid.any():
        first = int(np.argmax(is_invalid))
        [letter] = re.findall(pattern.encode(), records.sequences[first].as_py())[0]
        name = repr(chr(letter)) if letter < 128 else f"byte 0x{letter:02x}"
        more = (
            ""
            if re.match(_NOT_IN_CSV.encode(), bytes([letter]))
            else ", strip (for * at the end, - . and spaces) or keep"
        )
        raise records.error(first, f"has {name} in its sequence: correct it, or set on_letters=skip{more}")
    records.drop(is_invalid, "invalid letters")


def format_rows(records: Records) -> pa.Array:
    r"""Format the kept records as `\nrecord_id,record_name,sequence_length,sequence`: binary [number of kept records].

    Each row starts with the line end of the previous one.
    """
    names, sequences = (each.filter(pa.array(records.kept)) for each in (records.names, records.sequences))
    lengths, numbers = records.lengths()[records.kept], records.numbers()[records.kept] + 1
    ids = pc.binary_join_element_wise(b"", _format_integers(numbers), b"\n")
    return pc.binary_join_element_wise(ids, _quote(names), _format_integers(lengths), sequences, b",")


def _format_integers(numbers: NDArray[np.integer]) -> pa.Array:
    return pc.cast(pc.cast(pa.array(numbers), pa.string()), pa.binary())


def _quote(names: pa.Array) -> pa.Array:
    """Quote names that contain a comma or a quote (RFC 4180)."""
    text = get_bytes(names)
    if not ((text == ord(",")) | (text == ord('"'))).any():
        return names
    quoted = (b'"' + name.replace(b'"', b'""') + b'"' if b"," in name or b'"' in name else name
              for name in names.to_pylist())  # fmt: skip
    return pa.array(quoted, pa.binary())


def get_offsets(strings: pa.Array) -> NDArray[np.int32]:
    """Return the bounds of n strings in their buffer of bytes, int32 [n + 1]."""
    return np.frombuffer(strings.buffers()[1], np.int32, len(strings) + 1, strings.offset * 4)


def get_bytes(strings: pa.Array) -> NDArray[np.uint8]:
    """Return the concatenated bytes of all strings, uint8."""
    bounds = get_offsets(strings)
    if strings.buffers()[2] is None:
        return np.zeros(0, np.uint8)
    return np.frombuffer(strings.buffers()[2], np.uint8)[bounds[0] : bounds[-1]]


def gather_slices(text: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64]) -> pa.Array:
    """Copy the ascending, disjoint slices [begin, end) of a text to an Arrow array, binary [n]."""
    bounds = np.empty(2 * len(begin), np.int32)
    bounds[0::2], bounds[1::2] = begin, end
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers).take(pa.array(np.arange(0, len(bounds), 2)))
