# SPDX-License-Identifier: Apache-2.0
"""SMILES files, indexed with a few array operations per block and read in place."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import RecordBlock, line_number, read_blocks
from bionemo.data.shards.csv_shards import CsvSource
from bionemo.data.shards.index import RecordIndex
from bionemo.data.shards.smiles_format import (
    CARRIAGE_RETURN,
    HEAD_BYTES,
    Column,
    SmilesFormat,
    find_format,
    remove_extensions,
)
from bionemo.data.shards.text_shards import TextShards

_TAB, _NEWLINE, _RETURN, _SPACE, _COMMENT = b"\t\n\r #"


def open_smiles(
    paths: Sequence[Path],
    key: str | None = None,
    smiles: Column = None,
    name: Column = None,
    index_mapping_dir: str | Path | None = None,
    workers: int | None = None,
) -> "list[SmilesSource | CsvSource]":
    """Open SMILES files with the columns that `find_format` finds; consecutive files with equal columns as one source.

    Raises:
        UserError: if a file cannot be read, or no column has SMILES.
    """
    formats = [find_format(_read_head(path), str(path), key, smiles, name) for path in paths]
    sources: list[SmilesSource | CsvSource] = []
    for columns, pairs in groupby(zip(formats, paths, strict=True), lambda pair: pair[0]):
        group = [path for _, path in pairs]
        if columns.separator in (",", ";"):
            numbers = {"sequence": columns.smiles} | ({} if columns.name is None else {"id": columns.name})
            source: SmilesSource | CsvSource = CsvSource(
                group, columns=numbers, separator=columns.separator, header_lines=columns.skipped,
                index_mapping_dir=index_mapping_dir, workers=workers,
            )  # fmt: skip
        else:
            source = SmilesSource(group, columns, index_mapping_dir=index_mapping_dir, workers=workers)
        sources.append(source)
    return sources


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error


class SmilesSource(TextShards):
    """Records of SMILES files whose columns are separated by white space or tabs.

    Blank lines and, if the SMILES is first, lines that begin with `#` are skipped.

    Raises:
        UserError: if the file cannot be read, has no records, or a line lacks a column.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        columns: SmilesFormat,
        *,
        index_mapping_dir: str | Path | None,
        workers: int | None,
    ) -> None:
        self._format = columns
        layout = columns._replace(titles=())._asdict()
        spec = {"format": "smiles", "fields": ["sequence", "id"], "sequence": 0, **layout}
        super().__init__(paths, spec, index_mapping_dir, workers)

    def fields(self, record: int) -> dict[str, str]:
        """Return `sequence` and `id`, which may be empty."""
        shard, index = self._locate(record)
        smiles, name = (self._cell(shard, index, field).decode().strip() for field in (0, 1))
        return {"sequence": smiles, "id": remove_extensions(name) if self._format.has_rest else name}

    def _decode(self, raw: bytes) -> bytes:
        return raw

    def _scan(self, path: Path) -> Iterator[tuple[RecordBlock, RecordIndex]]:
        skipped, records = self._format.skipped, 0
        for block in read_blocks(path, lambda data: data.rfind(b"\n") + 1):
            index = _index_block(path, block, self._format, skipped)
            skipped, records = max(skipped - block.data.count(b"\n", 0, block.end), 0), records + len(index)
            yield block, index
        if not records:
            raise UserError(f"{path} contains no records: write it again, or exclude it")


def _index_block(path: Path, block: RecordBlock, columns: SmilesFormat, skipped: int) -> RecordIndex:
    """Index the records of a block below its first `skipped` lines."""

    def error(offset: int, problem: str) -> UserError:
        return UserError(f"{path}:{line_number(path, block.base + int(offset))}: {problem}")

    text = block.array
    stop = np.flatnonzero(text == _NEWLINE)
    start = np.append(0, stop[:-1] + 1)
    if block.contains(b"\r"):
        returns = np.flatnonzero(text[:-1] == _RETURN)
        if (inside := returns[text[returns + 1] != _NEWLINE]).size:
            raise error(inside[0], CARRIAGE_RETURN)
        stop = stop - (text[stop - 1] == _RETURN)
    if not block.data.isascii():
        try:
            block.data[: block.end].decode()
        except UnicodeDecodeError as failure:
            raise error(failure.start, "text that is not UTF-8: convert the file with iconv") from failure

    is_space = (text - np.uint8(_TAB) < 5) | (text == _SPACE)  # \t \n \v \f \r
    edges = np.flatnonzero(is_space[1:] != is_space[:-1]) + 1
    edges = edges if is_space[0] else np.append(0, edges)
    word_start, word_stop = edges[::2], edges[1::2]
    first = np.searchsorted(word_start, start)  # word of each line
    last = np.append(first[1:], len(word_start)) - 1
    is_record = last >= first
    is_record[:skipped] = False
    if columns.smiles == 0:
        is_record[is_record] = text[word_start[first[is_record]]] != _COMMENT
    start, stop, first, last = (each[is_record] for each in (start, stop, first, last))
    if columns.separator:  # tabs
        words = word_start, word_stop
        first, word_start, word_stop = _split_at_tabs(text, start, stop)
        last = np.append(first[1:], len(word_start)) - 1
    count = last - first + 1
    if columns.has_rest:
        begin = [word_start[first], np.where(count > 1, word_start[np.minimum(first + 1, last)], word_stop[last])]
        end = [word_stop[first], word_stop[last]]
    else:
        widths, line_of_width = np.unique(count, return_index=True)
        for width, line in zip(widths.tolist(), line_of_width.tolist(), strict=True):
            if problem := columns.problem(width):
                raise error(start[line], problem)
        numbers = [columns.smiles, columns.smiles if columns.name is None else columns.name]
        begin, end = (
            [word_start[first + number] for number in numbers],
            [word_stop[first + number] for number in numbers],
        )
        if columns.name is None:
            end[1] = begin[1]
        if columns.separator:  # a SMILES is the first word of its cell
            word = np.minimum(np.searchsorted(words[1], begin[0], "right"), len(words[1]) - 1)
            end[0] = np.minimum(end[0], words[1][word])
            begin[0] = np.clip(words[0][word], begin[0], end[0])
    length = [(b - a).astype(np.int32) for a, b in zip(begin, end, strict=True)]
    return RecordIndex([block.base + offset for offset in begin], length, length[0], length[0], crlf=False)


def _split_at_tabs(text: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first cell of each line, and begin and end of all cells."""
    tabs = np.flatnonzero(text == _TAB)
    line = np.searchsorted(stop, tabs)
    tabs = tabs[(line < len(stop)) & (tabs >= np.append(start, len(text))[line])]
    cell_start, cell_stop = np.sort(np.append(start, tabs + 1)), np.sort(np.append(stop, tabs))
    return np.searchsorted(cell_start, start), cell_start, cell_stop
