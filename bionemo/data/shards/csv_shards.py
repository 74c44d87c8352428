# SPDX-License-Identifier: Apache-2.0
"""Columns of CSV files, quoted as RFC 4180 has it or not at all, read in place."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.data.shards.csv_scan import Dialect, scan
from bionemo.data.shards.index import Table
from bionemo.data.shards.text_shards import Advance, TextShards


class CsvSource(TextShards):
    """CSV shards as one source.

    A cell may be quoted, and then hold separators, line ends and doubled quotes. A byte order mark, CR before LF and
    blank lines at the end of a file are left out. Lengths count bytes, which are letters in any ASCII column.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        columns: Mapping[str, int],
        separator: str = ",",
        header_lines: int = 1,
        newline: int = 10,
        index_mapping_dir: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        self._dialect = Dialect(
            fields=tuple(columns),
            columns=tuple(columns.values()),
            sequence=list(columns).index("sequence") if "sequence" in columns else 0,
            separator=_single_byte("data_sep", separator),
            newline=_single_byte("newline_int", chr(newline)),
            header_lines=int(header_lines),
        )
        if separator == chr(newline):
            raise UserError("data_sep and newline_int are the same character: a record could not have columns")
        for name, column in columns.items():
            if column < 0:
                raise UserError(f"field '{name}' is said to be in column {column}: columns are counted from 0")
        spec = {
            "format": "csv",
            "fields": list(columns),
            "columns": list(columns.values()),
            "sequence": self._dialect.sequence,
            "separator": separator,
            "newline": newline,
            "header_lines": self._dialect.header_lines,
        }
        super().__init__(paths, spec, index_mapping_dir, workers)

    def fields(self, record: int) -> dict[str, str]:
        """Give the named columns of a record."""
        shard, row = self._locate(record)
        return {name: self._decode(self._cell(shard, row, i)).decode() for i, name in enumerate(self._dialect.fields)}

    def _decode(self, raw: bytes) -> bytes:
        return raw.replace(b'""', b'"')  # the scan lets no other quote into a cell

    def _scan(self, path: Path, advance: Advance) -> Iterator[Table]:
        return scan(path, self._dialect, advance)


def _single_byte(option: str, character: str) -> bytes:
    if len(character) != 1 or not character.isascii() or character in '"\r':
        raise UserError(f"{option} is {character!r}: it must be one ASCII character, neither a quote nor CR")
    return character.encode()
