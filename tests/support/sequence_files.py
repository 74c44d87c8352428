# SPDX-License-Identifier: Apache-2.0
"""Open sequence files with the readers that `data_impl` names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bionemo.data.shards.csv_shards import CsvSource
from bionemo.data.shards.fasta import FastaSource


def open_sequences(
    data_impl: str,
    paths: Sequence[str | Path],
    *,
    data_col: int = 0,
    data_fields: Mapping[str, int] | None = None,
    data_sep: str = ",",
    newline_int: int = 10,
    **options: Any,
) -> CsvSource | FastaSource:
    if data_impl == "fasta_fields_mmap":
        return FastaSource(paths, **options)
    assert data_impl in ("csv_mmap", "csv_fields_mmap")
    columns = {"sequence": data_col} if data_fields is None else data_fields
    return CsvSource(paths, columns=columns, separator=data_sep, newline=newline_int, **options)
