# SPDX-License-Identifier: Apache-2.0
"""Raw text to named sequences, a block at a time, and what is done about records that are not as they should be.

Everything works on whole columns in Arrow's layout (one buffer of bytes, one of offsets): nothing is done per record
in Python unless a record is bad.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import SequencePolicies
from bionemo.data.shards.blocks import Block, blocks
from bionemo.data.shards.fasta import RAN_TOGETHER, mark_in_sequence, whole_records

_NEWLINE, _MARK, _SPACE, _TAB = b"\n> \t"
_A, _Z = b"AZ"
_UPPER = np.arange(256, dtype=np.uint8)
_UPPER[ord("a") : ord("z") + 1] -= 32
_STRIPPED = np.zeros(256, bool)
_STRIPPED[list(b"*-. \t")] = True
_UNFIT = np.zeros(256, bool)  # for a cell of the output: a sequence is never quoted there
_UNFIT[[*b',"\n\r', *range(128, 256)]] = True
_CSV_BLOCK = 32 << 20  # a row must fit


@dataclass
class Records:
    """Some records of an input, one behind the other.

    Attributes:
        path: of the file as the user knows it.
        first: number of the first of them in the input, from 0.
        lines: int64 [n], the line of each, from 1.
        names: binary [n].
        sequences: binary [n].
        kept: bool [n], which of them stay.
        dropped: records that do not, by reason.
        changed: records that are not as they were, by what was done.
        letters: of the sequences as they were read.
        letters_kept: of those that stay, as they are now.
    """

    path: str
    first: int
    lines: NDArray[np.int64]
    names: pa.Array
    sequences: pa.Array
    kept: NDArray[np.bool_] = field(init=False)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Begin with all of them."""
        self.kept = np.ones(len(self.names), bool)

    def __len__(self) -> int:
        """Give the number of records."""
        return len(self.names)

    def fail(self, index: int, problem: str) -> UserError:
        """Make the error that names a record's file and line."""
        name = self.names[index].as_py().decode(errors="replace")[:60]
        return UserError(f"{self.path}:{self.lines[index]}: record {name!r} {problem}")

    def drop(self, bad: NDArray[np.bool_], reason: str) -> None:
        """Take records out of those that stay."""
        self.dropped[reason] += int((self.kept & bad).sum())
        self.kept &= ~bad

    def lengths(self) -> NDArray[np.int32]:
        """Letters of each sequence, int32 [n]."""
        return np.diff(offsets(self.sequences))


def fasta_records(path: Path, shown: str, start: int, stop: int, first: int, line: int) -> Iterator[Records]:
    """Read a stretch of a FASTA file.

    Args:
        path: the file, uncompressed.
        shown: what the user calls it.
        start: place of a record's '>'.
        stop: place of the '>' behind the stretch, or the end of the file.
        first: number of the first record in the input.
        line: number of its line, from 1.

    Raises:
        UserError: a carriage return inside a line, or a '>' inside one of a sequence.
    """
    for block in blocks(path, whole_records, start=start, stop=stop):
        records, lines = _fasta_block(block, shown, first, line)
        yield records
        first, line = first + len(records), line + lines


def _fasta_block(block: Block, shown: str, first: int, line: int) -> tuple[Records, int]:
    data = block.data[: block.end]
    if carriage := b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        if b"\r" in data:
            place = line + data.count(b"\n", 0, data.index(b"\r"))
            raise UserError(f"{shown}:{place}: a carriage return inside a line: write the file with LF line ends")
    text = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(text == _NEWLINE)
    starts = np.append(0, stops[:-1] + 1)
    header = np.flatnonzero(text[starts] == _MARK)  # which of the lines
    if (mark := mark_in_sequence(text, starts, header)) is not None:
        place = line + int(np.searchsorted(stops, mark))
        raise UserError(f"{shown}:{place}: {RAN_TOGETHER}")
    begin, end = starts[header] + 1, stops[header]
    names = column(text, begin, _word_end(text, begin, end, b"\t" in data))

    # where the line ends are taken out, whatever stood in line i stands i places further to the front
    flat = np.frombuffer(data.replace(b"\n", b""), np.uint8)
    behind = np.append(begin[1:] - 1 - header[1:], len(flat))
    sequences = column(flat, end - header, behind)
    records = Records(shown, first, line + header, names, sequences)
    if carriage:
        records.changed["with CR LF line ends"] = len(records)
    return records, len(stops)


def _word_end(
    text: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64], tabs: bool
) -> NDArray[np.int64]:
    """Where the first word of each header ends; a header that begins with a space has no name."""
    spaces = np.flatnonzero((text == _SPACE) | (text == _TAB) if tabs else text == _SPACE)
    following = np.append(spaces, len(text))[np.searchsorted(spaces, begin)]
    return np.minimum(following, end)


def csv_records(
    path: Path, shown: str, first: int, name_column: str | int, sequence_column: str | int, separator: str
) -> Iterator[Records]:
    """Read two columns of a CSV file with a header.

    Args:
        path: the file, uncompressed.
        shown: what the user calls it.
        first: number of the first record in the input.
        name_column: its title, or its number from 0.
        sequence_column: likewise.
        separator: between the columns.

    Raises:
        UserError: a column that is not there, or a row with another number of columns.
    """
    read, parse = _options(shown, separator)
    _, columns = csv_columns(path, shown, name_column, sequence_column, separator)
    convert = pyarrow.csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(columns, pa.binary()), strings_can_be_null=False
    )
    line = 2  # below the header
    try:
        with pyarrow.csv.open_csv(path, read, parse, convert) as reader:
            for batch in reader:
                lines = np.arange(line, line + len(batch))
                yield Records(shown, first, lines, _whole(batch.column(0)), _whole(batch.column(1)))
                first, line = first + len(batch), line + len(batch)
    except pa.ArrowInvalid as error:
        raise _malformed(shown, error) from error


def csv_columns(
    path: Path, shown: str, name_column: str | int, sequence_column: str | int, separator: str
) -> tuple[list[str], list[str]]:
    """Find the columns of names and sequences; arguments are those of `csv_records`.

    Returns:
        Titles of all columns, and of these two.

    Raises:
        UserError: as `csv_records`.
    """
    try:
        with pyarrow.csv.open_csv(path, *_options(shown, separator)) as reader:
            titles = reader.schema.names
    except pa.ArrowInvalid as error:
        raise _malformed(shown, error) from error
    columns = [_find_column(titles, wanted, shown) for wanted in (name_column, sequence_column)]
    if columns[0] == columns[1]:
        raise UserError(f"{shown}: id_column and sequence_column are both {columns[0]!r}: set two different ones")
    return titles, columns


def _options(shown: str, separator: str) -> tuple[pyarrow.csv.ReadOptions, pyarrow.csv.ParseOptions]:
    if len(separator.encode()) != 1 or separator in '"\r\n':
        raise UserError(f"separator is {separator!r}: it must be one ASCII character")
    read = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK, use_threads=False)
    return read, pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)


def _malformed(shown: str, error: pa.ArrowInvalid) -> UserError:
    return UserError(f"{shown}: {' '.join(str(error).split())}: correct it, or set separator")


def _find_column(titles: list[str], wanted: str | int, shown: str) -> str:
    if isinstance(wanted, int) or wanted.isdecimal():
        wanted = titles[int(wanted)] if 0 <= int(wanted) < len(titles) else int(wanted)
    if titles.count(str(wanted)) > 1:
        raise UserError(f"{shown} has several columns {wanted!r}: give each a title of its own")
    if wanted in titles:
        return str(wanted)
    raise UserError(f"{shown} has no column {wanted!r}; it has {', '.join(titles)}: set id_column and sequence_column")


def clean(records: Records, policies: SequencePolicies) -> None:
    """Write letters in upper case, and apply the policies to what is wrong with some of the records, in place.

    Raises:
        UserError: a record is wrong in a way whose policy is `error`.
    """
    _check_names(records)
    _check_letters(records, policies)
    lengths = records.lengths()
    name_lengths = np.diff(offsets(records.names))
    for bad, problem in (
        (name_lengths == 0, "no name: write one behind the '>', or set on_empty=skip"),
        (lengths == 0, "no sequence: remove or complete it, or set on_empty=skip"),
    ):
        if (bad & records.kept).any():
            if policies.on_empty == "error":
                raise records.fail(int(np.flatnonzero(bad & records.kept)[0]), f"has {problem}")
            records.drop(bad, "empty")


def _check_names(records: Records) -> None:
    text = values(records.names)
    if not len(text) or (text.max() < 128 and text.min() >= ord(" ")):
        return
    for index, name in enumerate(records.names.to_pylist()):
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise records.fail(index, "has a name that is not UTF-8: convert it, as with iconv -t UTF-8") from error
        if b"\n" in name or b"\r" in name:
            raise records.fail(index, "has a line end in its name: take it out")


def _check_letters(records: Records, policies: SequencePolicies) -> None:
    letters = values(records.sequences)
    if not len(letters) or (letters.min() >= _A and letters.max() <= _Z):
        return
    bounds = offsets(records.sequences)
    owner = np.repeat(np.arange(len(records)), np.diff(bounds))
    upper = _UPPER[letters]
    if (lower := upper != letters).any():
        records.changed["with lower case letters"] += len(np.unique(owner[lower]))
    strange = (upper < _A) | (upper > _Z)
    if policies.on_letters == "strip":
        gone = _STRIPPED[upper]
        if gone.any():
            records.changed["with letters stripped"] += len(np.unique(owner[gone]))
            bounds = bounds - np.append(0, np.cumsum(gone))[bounds]
            upper, owner, strange = upper[~gone], owner[~gone], strange[~gone]
    elif policies.on_letters == "keep":
        strange &= _UNFIT[upper]
    records.sequences = binary(upper, bounds)
    if strange.any():
        first = int(np.flatnonzero(strange)[0])
        if policies.on_letters != "skip":
            shown = repr(chr(upper[first])) if upper[first] < 128 else f"byte 0x{upper[first]:02x}"
            more = "" if _UNFIT[upper[first]] else ", strip (for * - . and spaces) or keep"
            raise records.fail(
                int(owner[first]), f"has {shown} in its sequence: correct it, or set on_letters=skip{more}"
            )
        bad = np.zeros(len(records), bool)
        bad[owner[strange]] = True
        records.drop(bad, "strange letters")


def rows(records: Records) -> pa.Array:
    """Render the records that stay: binary [kept], each `record_id,record_name,sequence_length,sequence`.

    The line end stands in front of each, as that of the row before.
    """
    kept = pa.array(np.flatnonzero(records.kept))
    names, sequences, lengths = records.names, records.sequences, records.lengths()
    numbers = np.arange(records.first + 1, records.first + 1 + len(records))
    if len(kept) < len(records):
        names, sequences = names.take(kept), sequences.take(kept)
        lengths, numbers = lengths[records.kept], numbers[records.kept]
    ids = pc.binary_join_element_wise(b"", _decimal(numbers), b"\n")
    return pc.binary_join_element_wise(ids, _quoted(names), _decimal(lengths), sequences, b",")


def _decimal(numbers: NDArray[np.integer]) -> pa.Array:
    return pc.cast(pc.cast(pa.array(numbers), pa.string()), pa.binary())


def _quoted(names: pa.Array) -> pa.Array:
    """Put names that hold a comma or a quote between quotes (RFC 4180)."""
    text = values(names)
    if not ((text == ord(",")) | (text == ord('"'))).any():
        return names
    quoted = (b'"' + name.replace(b'"', b'""') + b'"' if b"," in name or b'"' in name else name
              for name in names.to_pylist())  # fmt: skip
    return pa.array(quoted, pa.binary())


def binary(text: NDArray[np.uint8], bounds: NDArray[np.integer]) -> pa.Array:
    """Wrap n strings that lie end to end: binary [n] from their bytes and n + 1 bounds."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(bounds, np.int32)), pa.py_buffer(np.ascontiguousarray(text))]
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


def offsets(strings: pa.Array) -> NDArray[np.int32]:
    """Bounds of n strings in their buffer of bytes: int32 [n + 1]."""
    return np.frombuffer(strings.buffers()[1], np.int32, len(strings) + 1, strings.offset * 4)


def values(strings: pa.Array) -> NDArray[np.uint8]:
    """All bytes of some strings, end to end, uint8."""
    bounds = offsets(strings)
    if strings.buffers()[2] is None:
        return np.zeros(0, np.uint8)
    return np.frombuffer(strings.buffers()[2], np.uint8)[bounds[0] : bounds[-1]]


def column(text: NDArray[np.uint8], begin: NDArray[np.int64], end: NDArray[np.int64]) -> pa.Array:
    """Copy the pieces [begin, end) of a text, which follow one another in it: binary [n], packed."""
    bounds = np.empty(2 * len(begin), np.int32)
    bounds[0::2], bounds[1::2] = begin, end
    return binary(text, bounds).take(pa.array(np.arange(0, len(bounds), 2)))


def _whole(strings: pa.Array) -> pa.Array:
    """Make the offsets begin at 0."""
    bounds = offsets(strings)
    return binary(values(strings), bounds - bounds[0])
