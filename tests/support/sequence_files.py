# SPDX-License-Identifier: Apache-2.0
"""Open sequence files with the readers that `data_impl` names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bionemo.data.shards.formats import Csv, Fasta
from bionemo.data.shards.records import TextRecords


def open_sequences(
    data_impl: str,
    paths: Sequence[str | Path],
    *,
    data_col: int = 0,
    data_fields: Mapping[str, int] | None = None,
    data_sep: str = ",",
    newline_int: int = 10,
    header_lines: int = 1,
    proteins: bool = False,
    **options: Any,
) -> TextRecords:
    if data_impl == "fasta_fields_mmap":
        return TextRecords(paths, Fasta(), **options)
    assert data_impl in ("csv_mmap", "csv_fields_mmap")
    columns = {"sequence": data_col} if data_fields is None else data_fields
    return TextRecords(paths, Csv(columns, data_sep, header_lines, chr(newline_int), proteins), **options)
