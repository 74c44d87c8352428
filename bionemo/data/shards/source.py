# SPDX-License-Identifier: Apache-2.0
"""What every source of sequences offers, and how those kept in text files are opened."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema import SplitConfig, UF90Config
from bionemo.data.shards.columns import CsvLayout, SequenceKind, check_columns
from bionemo.data.shards.csv_shards import CsvSource
from bionemo.data.shards.fasta import FastaSource


class SequenceSource(Protocol):
    """Numbered sequences of letters, read at random.

    Attributes:
        lengths: int32 [n], letters (residues, or bytes of text) of each record.
    """

    lengths: np.ndarray

    def __len__(self) -> int:
        """Give the number of records."""

    def gather(
        self, records: np.ndarray, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, positions: np.ndarray
    ) -> None:
        """Copy letters [start, start + count) of each record into out[position : position + count].

        Args:
            records: integer [k], numbers of the records; any order, repeats allowed.
            starts: integer [k], first letter wanted of each.
            counts: integer [k], how many letters of each.
            out: uint8 [m], contiguous; only the places named are written.
            positions: integer [k], where in `out` each piece goes.
        """

    def text(self, record: int) -> str:
        """Give a whole sequence."""

    def fields(self, record: int) -> dict[str, str]:
        """Give everything known of a record; its sequence is among it."""


def open_source(
    data_impl: str,
    paths: Sequence[str | Path],
    *,
    data_col: int | None = None,
    data_fields: Mapping[str, int] | None = None,
    data_sep: str = ",",
    header_lines: int = 1,
    newline_int: int = 10,
    index_mapping_dir: str | Path | None = None,
    workers: int | None = None,
) -> CsvSource | FastaSource:
    """Open text shards as one source of sequences, indexing those that have no valid index yet.

    Args:
        data_impl: `csv_mmap` (one column), `csv_fields_mmap` (several named columns) or `fasta_fields_mmap`.
        paths: the shards; their records follow one another in this order.
        data_col: csv_mmap: column of the sequence, counted from 0.
        data_fields: csv_fields_mmap: column of each field; the sequence is the field `sequence`, else the first.
        data_sep: one ASCII character between the columns.
        header_lines: lines to leave out at the top of each CSV shard.
        newline_int: code of the character that ends a CSV record.
        index_mapping_dir: where indexes are kept; None: beside the data, or in the user's cache if that is read-only.
        workers: shards opened at a time; None: half of the cores.

    Raises:
        UserError: an unknown `data_impl`, a missing option, or data that cannot be read as described.
    """
    if data_impl == "fasta_fields_mmap":
        return FastaSource(paths, index_mapping_dir=index_mapping_dir, workers=workers)
    if data_impl == "csv_mmap":
        if data_col is None:
            raise UserError("data_impl=csv_mmap needs data_col: say which column (from 0) holds the sequence")
        data_fields = {"sequence": data_col}
    elif data_impl != "csv_fields_mmap":
        raise UserError(f"data_impl={data_impl} is unknown: use csv_mmap, csv_fields_mmap or fasta_fields_mmap")
    elif not data_fields:
        raise UserError("data_impl=csv_fields_mmap needs data_fields: name its columns, as in {sequence: 3, id: 1}")
    return CsvSource(
        paths,
        columns=dict(data_fields),
        separator=data_sep,
        header_lines=header_lines,
        newline=newline_int,
        index_mapping_dir=index_mapping_dir,
        workers=workers,
    )


def open_shards(
    split: SplitConfig | UF90Config,
    paths: list[Path],
    *,
    keys: str,
    kind: SequenceKind | None,
    sequences: Sequence[str] | None = None,
) -> SequenceSource:
    """Open the files of a split with the reader that its configuration names.

    Args:
        split: the configuration.
        paths: of the files.
        keys: where the configuration is, such as `model.data.train`, for messages.
        kind: of the sequences: the header and the first records of each CSV file are compared with it; None: the
            sequences are not read, and nothing is compared.
        sequences: csv_fields_mmap: the fields that hold sequences; None: `sequence`, else the first field.

    Raises:
        UserError: for files that cannot be read as described.
    """
    if split.data_impl == "fasta_fields_mmap":
        return open_source(split.data_impl, paths, index_mapping_dir=split.index_mapping_dir)
    reader = getattr(split.data_impl_kwargs, split.data_impl)
    fields = split.data_impl == "csv_fields_mmap"
    column = {"data_fields": reader.data_fields} if fields else {"data_col": reader.data_col}
    if kind is not None:
        columns = dict(reader.data_fields) if fields else {"sequence": reader.data_col}
        names = sequences or [name for name in columns if name == "sequence"] or list(columns)[:1]
        held = {name: columns[name] for name in names if name in columns}
        key = f"{keys}.data_impl_kwargs.{split.data_impl}"
        layout = CsvLayout(key, held, reader.data_sep, chr(reader.newline_int), reader.header_lines)
        check_columns(paths, layout, kind)
    return open_source(
        split.data_impl,
        paths,
        data_sep=reader.data_sep,
        header_lines=reader.header_lines,
        newline_int=reader.newline_int,
        index_mapping_dir=split.index_mapping_dir,
        workers=reader.workers or None,
        **column,
    )
