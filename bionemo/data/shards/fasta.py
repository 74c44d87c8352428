# SPDX-License-Identifier: Apache-2.0
"""FASTA shards: sequences on one line or wrapped, read in place."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import BYTE_ORDER_MARK, RecordBlock, line_number, read_blocks
from bionemo.data.shards.index import RecordIndex
from bionemo.data.shards.proteins import trim_records
from bionemo.data.shards.text_shards import TextShards
from bionemo.tokenizers.residues import check_letters, trim

_NEWLINE, _RETURN, _MARKER = b"\n\r>"
MARKER_IN_SEQUENCE = "a '>' within a sequence: put a line end before the record that begins there"
_PIR = re.compile(rb">(?:P1|F1|DL|DC|RL|RC|N1|N3|XX);")
_TOP_BYTES = 1 << 20  # size of the beginning of a file that must contain the start of the first record
_HEADER_ENTRY = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")  # `n=3 Tax=Bacillus subtilis TaxID=1423`


class FastaSource(TextShards):
    """Records of FASTA files.

    A record begins with a line whose first byte is '>'. The rest of that line is the header, whose first word is the
    id. White space, line ends (LF or CR LF), blank lines and `*` at the end are not part of the sequence.
    """

    def __init__(
        self, paths: Sequence[str | Path], *, index_mapping_dir: str | Path | None = None, workers: int | None = None
    ) -> None:
        spec = {"format": "fasta", "fields": ["header", "sequence"], "sequence": 1}
        super().__init__(paths, spec, index_mapping_dir, workers)

    def header(self, record: int) -> str:
        """Return the header line of a record, without its '>'."""
        return self._cell(*self._locate(record), 0).decode()

    def fields(self, record: int) -> dict[str, str]:
        """Return `id`, `sequence` and each `key=value` of the header; a value ends at the next key."""
        name, *rest = self.header(record).split(None, 1) or [""]
        entries = dict(_HEADER_ENTRY.findall(rest[0])) if rest else {}
        return {**entries, "id": name, "sequence": self.text(record)}

    def _decode(self, raw: bytes) -> bytes:
        return trim(raw)

    def _scan(self, path: Path) -> Iterator[tuple[RecordBlock, RecordIndex]]:
        crlf = None
        for block in read_blocks(path, whole_records, start=find_first_record(path)):
            if crlf is None:
                crlf = block.data[block.data.index(b"\n") - 1] == _RETURN
            yield block, _index_block(path, block, crlf)


def whole_records(data: bytes) -> int:
    """Return how many bytes of `data`, which begins with a record, are in whole records."""
    return data.rfind(b"\n>") + 1


def find_first_record(path: Path, display_path: str | None = None) -> int:
    """Return the offset of the first '>', which may follow blank lines only.

    `display_path` is the name of the file in error messages; None: the path.

    Raises:
        UserError: if there is no '>', or there is text before it.
    """
    with path.open("rb") as file:
        top = file.read(_TOP_BYTES)
    text = top.removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n")
    offset = len(top) - len(text)
    if top and not text:
        raise UserError(
            f"{display_path or path} contains no records: write it again, or exclude it from the range of files"
        )
    if text and not text.startswith(b">"):
        line = line_number(path, offset)
        raise UserError(f"{display_path or path}:{line}: text before the first '>': is this a FASTA file?")
    if _PIR.match(text):
        raise UserError(f"{display_path or path} is a PIR file, in which titles follow the names: convert it to FASTA")
    return offset


def find_marker_in_sequence(
    text: np.ndarray, starts: np.ndarray, headers: np.ndarray, scratch: np.ndarray | None = None
) -> int | None:
    """Return the offset of the first '>' within a sequence line, where a line end is missing; None if there is none.

    The text, uint8 [n], consists of whole lines that start at `starts`, integer [k]. `headers`, integer [h], are the
    indices of the header lines, which may contain '>'. `scratch`, bool [n], is overwritten to avoid an allocation.
    """
    markers = np.equal(text, _MARKER, out=scratch)
    markers[starts[headers]] = False
    if not markers.any():
        return None
    offsets = np.flatnonzero(markers)
    lines = np.searchsorted(starts, offsets, side="right") - 1
    inside = offsets[~np.isin(lines, headers)]
    return int(inside[0]) if len(inside) else None


def _index_block(path: Path, block: RecordBlock, crlf: bool) -> RecordIndex:
    """Index the records of a block with array operations per line, not per byte."""

    def error(offset: int, problem: str) -> UserError:
        return UserError(f"{path}:{line_number(path, block.base + int(offset))}: {problem}")

    text = block.array
    scratch = text == _NEWLINE
    stop = np.flatnonzero(scratch)
    start = np.empty_like(stop)
    start[0], start[1:] = 0, stop[:-1] + 1
    is_header = text[start] == _MARKER
    if block.contains(b"\r"):
        returns = (text[stop - 1] == _RETURN) & (stop > start)
        if returns.sum() != np.count_nonzero(text == _RETURN):
            inside = text == _RETURN
            inside[stop[returns] - 1] = False
            raise error(np.flatnonzero(inside)[0], "a carriage return inside a line: write the file with LF line ends")
        stop = stop - returns
    else:
        returns = np.zeros(1, bool)
    size = stop - start

    header = np.flatnonzero(is_header)
    if (offset := find_marker_in_sequence(text, start, header, scratch)) is not None:
        line = start[np.searchsorted(start, offset, side="right") - 1]
        check_letters(text[line : offset + 1].tobytes(), f"{path}:{line_number(path, block.base + offset)}")
        raise error(offset, MARKER_IN_SEQUENCE)
    del scratch  # frees its memory for the arrays below
    next_header = np.append(header[1:], len(start))
    total = np.cumsum(size)
    letters = total[next_header - 1] - total[header]
    if letters.all():
        begin, end = start[header + 1], stop[next_header - 1]
        letters, spaced, stops = trim_records(block, begin, end, letters, trim)
    if not letters.all():
        empty = start[header[np.flatnonzero(letters == 0)[0]]]
        raise error(empty, "a record without a sequence: remove or complete it")
    if text.max() >= 128:
        _check_non_ascii(text, block, start, is_header, error)

    # Lines are even if each is as long as the previous one, or shorter and the last of its record.
    inner = ~(is_header[1:] | is_header[:-1])
    last = np.append(is_header[2:], True)
    shorter = last & (size[1:] < size[:-1]) & (size[1:] > 0)
    uneven = inner & (size[1:] != size[:-1]) & ~shorter
    if crlf or returns.any():
        uneven |= inner & (np.broadcast_to(returns, start.shape)[:-1] != crlf)
    width = size[header + 1]
    width[np.searchsorted(header, np.flatnonzero(uneven), side="right") - 1] = 0
    width = np.where(spaced, 0, np.minimum(width, letters))  # a stop codon is not part of the only line

    return RecordIndex(
        offset=[block.base + start[header] + 1, block.base + begin],
        length=[(size[header] - 1).astype(np.int32), (end - begin).astype(np.int32)],
        letters=letters.astype(np.int32),
        width=width.astype(np.int32),
        crlf=crlf,
        stops=stops,
    )


def _check_non_ascii(
    text: np.ndarray,
    block: RecordBlock,
    start: np.ndarray,
    is_header: np.ndarray,
    error: Callable[[int, str], UserError],
) -> None:
    """Raise an error for non-ASCII bytes, except UTF-8 in headers."""
    beyond = np.flatnonzero(text >= 128)
    in_header = is_header[np.searchsorted(start, beyond, side="right") - 1]
    if not in_header.all():
        offset = int(beyond[~in_header][0])
        raise error(offset, f"byte 0x{text[offset]:02x} in a sequence: residues must be ASCII letters")
    try:
        block.data[: block.end].decode()
    except UnicodeDecodeError as failure:
        raise error(failure.start, "a header that is not UTF-8: convert the file, as with iconv -t UTF-8") from failure
