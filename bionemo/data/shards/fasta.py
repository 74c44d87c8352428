# SPDX-License-Identifier: Apache-2.0
"""Sequences in FASTA files, on one line each or wrapped, read in place."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import BYTE_ORDER_MARK, Block, blocks, line_number
from bionemo.data.shards.index import Table
from bionemo.data.shards.text_shards import Advance, TextShards

_NEWLINE, _RETURN, _MARK = b"\n\r>"
RAN_TOGETHER = "a '>' within a sequence: put a line end before the record that begins there"
_TOP = 1 << 20  # bytes in which the first record must begin
_NOTE = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")  # `n=3 Tax=Bacillus subtilis TaxID=1423`


class FastaSource(TextShards):
    """FASTA shards as one source.

    A record begins with a line whose first byte is '>'; the rest of that line is its header, the header's first word
    its id. Line ends, LF or CR LF, and blank lines do not count as letters.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        index_mapping_dir: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(
            paths, {"format": "fasta", "fields": ["header", "sequence"], "sequence": 1}, index_mapping_dir, workers
        )

    def header(self, record: int) -> str:
        """Give the header line of a record, less its '>'."""
        return self._cell(*self._locate(record), 0).decode()

    def fields(self, record: int) -> dict[str, str]:
        """Give `id`, `sequence`, and each `key=value` of the header; a value runs up to the next key."""
        name, *rest = self.header(record).split(None, 1) or [""]
        notes = dict(_NOTE.findall(rest[0])) if rest else {}
        return {**notes, "id": name, "sequence": self.text(record)}

    def _decode(self, raw: bytes) -> bytes:
        return raw.translate(None, b"\r\n")

    def _scan(self, path: Path, advance: Advance) -> Iterator[Table]:
        crlf = None
        for block in blocks(path, whole_records, start=first_record(path)):
            if crlf is None:
                crlf = block.data[block.data.index(b"\n") - 1] == _RETURN
            yield _table(path, block, crlf)
            advance(block.end)


def whole_records(data: bytes) -> int:
    """Say how many of some bytes, the first of which begins a record, are whole records; 0 if none is."""
    return data.rfind(b"\n>") + 1


def first_record(path: Path, shown: str | None = None) -> int:
    """Find the first '>', which nothing but blank lines may precede.

    Args:
        path: the file.
        shown: what the user calls it, if that is not the path.

    Raises:
        UserError: there is none, or text before it.
    """
    with path.open("rb") as file:
        top = file.read(_TOP)
    text = top.removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n")
    place = len(top) - len(text)
    if top and not text:
        raise UserError(f"{shown or path} holds no records: write it again, or leave it out of the range of files")
    if text and not text.startswith(b">"):
        line = line_number(path, place)
        raise UserError(f"{shown or path}:{line}: text before the first '>': is this a FASTA file?")
    return place


def mark_in_sequence(
    text: np.ndarray, start: np.ndarray, header: np.ndarray, scratch: np.ndarray | None = None
) -> int | None:
    """Find a '>' within a line of a sequence: the line end before its record is missing.

    Args:
        text: uint8 [n], whole lines.
        start: integer [k], where each begins.
        header: integer [h], which of them are headers; these may hold more of them.
        scratch: bool [n] to write over, which spares fresh memory.

    Returns:
        Place of the first; None: there is none.
    """
    marks = np.equal(text, _MARK, out=scratch)
    marks[start[header]] = False
    if not marks.any():
        return None
    places = np.flatnonzero(marks)
    line = np.searchsorted(start, places, side="right") - 1
    inside = places[~np.isin(line, header)]
    return int(inside[0]) if len(inside) else None


def _table(path: Path, block: Block, crlf: bool) -> Table:
    """Find the records of a block; everything is computed per line, and there is one line in about 60 bytes."""

    def fail(place: int, problem: str) -> UserError:
        return UserError(f"{path}:{line_number(path, block.base + int(place))}: {problem}")

    text = block.letters
    found = text == _NEWLINE
    stop = np.flatnonzero(found)
    start = np.empty_like(stop)
    start[0], start[1:] = 0, stop[:-1] + 1
    is_header = text[start] == _MARK
    if block.has(b"\r"):
        returns = (text[stop - 1] == _RETURN) & (stop > start)
        if returns.sum() != np.count_nonzero(text == _RETURN):
            inside = text == _RETURN
            inside[stop[returns] - 1] = False
            raise fail(np.flatnonzero(inside)[0], "a carriage return inside a line: write the file with LF line ends")
        stop = stop - returns
    else:
        returns = np.zeros(1, bool)
    size = stop - start

    header = np.flatnonzero(is_header)
    if (place := mark_in_sequence(text, start, header, found)) is not None:
        raise fail(place, RAN_TOGETHER)
    del found  # its memory is taken again below
    after = np.append(header[1:], len(start))  # line of the next header
    total = np.cumsum(size)
    letters = total[after - 1] - total[header]
    if not letters.all():
        raise fail(
            start[header[np.flatnonzero(letters == 0)[0]]], "a record without a sequence: remove or complete it"
        )
    if text.max() >= 128:
        _check_bytes(text, block, start, is_header, fail)

    # Lines are even if each is as long as the one before it, or shorter and the last of its record.
    inner = ~(is_header[1:] | is_header[:-1])
    last = np.append(is_header[2:], True)
    shorter = last & (size[1:] < size[:-1]) & (size[1:] > 0)
    uneven = inner & (size[1:] != size[:-1]) & ~shorter
    if crlf or returns.any():
        uneven |= inner & (np.broadcast_to(returns, start.shape)[:-1] != crlf)
    width = size[header + 1]
    width[np.searchsorted(header, np.flatnonzero(uneven), side="right") - 1] = 0

    begin = start[header + 1]
    return Table(
        offset=[block.base + start[header] + 1, block.base + begin],
        length=[(size[header] - 1).astype(np.int32), (stop[after - 1] - begin).astype(np.int32)],
        letters=letters.astype(np.int32),
        width=width.astype(np.int32),
        crlf=crlf,
    )


def _check_bytes(
    text: np.ndarray, block: Block, start: np.ndarray, is_header: np.ndarray, fail: Callable[[int, str], UserError]
) -> None:
    """Allow bytes beyond ASCII in headers, as UTF-8, and nowhere else."""
    beyond = np.flatnonzero(text >= 128)
    in_header = is_header[np.searchsorted(start, beyond, side="right") - 1]
    if not in_header.all():
        place = int(beyond[~in_header][0])
        raise fail(place, f"byte 0x{text[place]:02x} in a sequence: only ASCII letters stand for residues")
    try:
        block.data[: block.end].decode()
    except UnicodeDecodeError as error:
        raise fail(error.start, "a header that is not UTF-8: convert the file, as with iconv -t UTF-8") from error
