# SPDX-License-Identifier: Apache-2.0
"""The sequences of FASTA, CSV and SMILES files, read in place and in order."""

import csv
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bionemo.common.errors import UserError
from bionemo.config.schema import InferDataConfig
from bionemo.config.schema.data import CsvFieldsConfig
from bionemo.data.shards.csv_shards import CsvSource
from bionemo.data.shards.fasta import FastaSource
from bionemo.data.shards.ranges import expand_range

FASTA = (".fasta", ".fa", ".faa", ".fas")
_CSV, _SMILES = (".csv", ".tsv"), (".smi", ".smiles")


class Record(NamedTuple):
    """A sequence with its name."""

    id: str
    text: str


class Records:
    """What a configuration names, as one list.

    Args:
        config: `model.data`.

    Attributes:
        paths: the files, in the order in which they are read.
        lengths: int32 [n], letters of each record.

    Raises:
        UserError: for files that are missing, of no known kind, or cannot be read.
    """

    def __init__(self, config: InferDataConfig) -> None:
        asked = [config.dataset_path] if isinstance(config.dataset_path, str) else config.dataset_path
        paths = [path for each in asked for path in _files(each)]
        if not paths:
            raise UserError(
                "model.data.dataset_path names no file: give one, a range such as x[000..004].csv, or a list"
            )
        sort = config.data_impl_kwargs.csv_fields_mmap.sort_dataset_paths and not _all_fasta(config, paths)
        self.paths = sorted(paths) if sort else paths
        self._sources = _open(config, self.paths)
        self._bounds = np.cumsum([0, *map(len, self._sources)])
        self.lengths: np.ndarray = np.concatenate([source.lengths for source in self._sources])
        if not len(self.lengths):
            raise UserError(f"{self.paths[0]} holds no sequences: check model.data.dataset_path")

    def __len__(self) -> int:
        """Number of records."""
        return len(self.lengths)

    def read(self, first: int, last: int) -> Iterator[Record]:
        """Give records [first, last); one without a name has its number for one."""
        for number in range(first, last):
            source = int(np.searchsorted(self._bounds, number, "right")) - 1
            fields = self._sources[source].fields(number - int(self._bounds[source]))
            yield Record(fields.get("id") or str(number), fields["sequence"])


def _files(asked: str) -> list[Path]:
    """A file, or those of a range."""
    path = Path(asked).expanduser()
    paths = [path] if path.exists() else [Path(name) for name in expand_range(str(path), "")]
    for each in paths:
        if not each.is_file():
            what = "is a directory: name files in it, as in x[000..004].csv" if each.is_dir() else "is missing"
            raise UserError(f"{each} {what} (model.data.dataset_path)")
    return paths


class _Layout(NamedTuple):
    """How a text file is laid out.

    Attributes:
        columns: name and number, from 0, of each column that is read.
        separator: between columns.
        header_lines: lines before the first record.
    """

    columns: dict[str, int]
    separator: str
    header_lines: int


def _open(config: InferDataConfig, paths: list[Path]) -> list[CsvSource | FastaSource]:
    """Open the files: each text file by its own header, consecutive files of the same layout as one source."""
    endings = {path.suffix.lower() for path in paths}
    if _all_fasta(config, paths):
        return [FastaSource(paths, index_mapping_dir=config.index_mapping_dir)]
    if not (config.data_impl or endings <= {*_CSV} or endings <= {*_SMILES}):
        known = ", ".join(FASTA + _CSV + _SMILES)
        raise UserError(
            f"{paths[0]}: what kind of file is that? Known are {known}, all of one kind; otherwise set "
            "model.data.data_impl to csv_fields_mmap or fasta_fields_mmap"
        )
    reader = config.data_impl_kwargs.csv_fields_mmap
    layouts = [_layout(path, config, reader) for path in paths]
    return [
        CsvSource(
            [path for path, _ in group], columns=layout.columns, separator=layout.separator,
            header_lines=layout.header_lines, newline=reader.newline_int,
            index_mapping_dir=config.index_mapping_dir, workers=reader.workers or None,
        )
        for layout, group in groupby(zip(paths, layouts, strict=True), lambda pair: pair[1])
    ]  # fmt: skip


def _all_fasta(config: InferDataConfig, paths: list[Path]) -> bool:
    named = {path.suffix.lower() for path in paths} <= {*FASTA}
    return config.data_impl == "fasta_fields_mmap" or (not config.data_impl and named)


def _layout(path: Path, config: InferDataConfig, reader: CsvFieldsConfig) -> _Layout:
    """How one file is laid out: as `data_impl` says, else by its ending and its header.

    Raises:
        UserError: when it has no column of sequences, or the header names another one than the configuration.
    """
    ending, separator = path.suffix.lower(), reader.data_sep
    if config.data_impl:
        _check_columns(path, config, reader)
        return _Layout(reader.data_fields, separator, reader.header_lines)
    if ending in _SMILES:
        named = _between_smiles(path)
        return _Layout({"sequence": 0, "id": 1} if named else {"sequence": 0}, named or "\t", 0)
    separator = "\t" if ending == ".tsv" else separator
    columns = _columns(path, separator, config.data_fields_map) if reader.header_lines else reader.data_fields
    return _Layout(columns, separator, reader.header_lines)


def _check_columns(path: Path, config: InferDataConfig, reader: CsvFieldsConfig) -> None:
    """Compare the configured column of the sequences with the header.

    Raises:
        UserError: when the header names another column.
    """
    key, name = "model.data.data_impl_kwargs.csv_fields_mmap.data_fields", _name_of("sequence", config.data_fields_map)
    if "sequence" not in reader.data_fields:
        raise UserError(
            f"{key} has no field 'sequence': give its column, counted from 0, as in {{id: 0, sequence: 1}}"
        )
    header, column = _header(path, reader.data_sep, reader.header_lines), reader.data_fields["sequence"]
    if name in header and header.index(name) != column:
        found = repr(header[column]) if 0 <= column < len(header) else "missing"
        raise UserError(
            f"{path}: column {column} is {found}, and the sequences are in column {header.index(name)}, {name!r}: set "
            f"{key}.sequence={header.index(name)}, or model.data.data_fields_map.sequence to the name of the column "
            "that is meant"
        )


def _columns(path: Path, separator: str, names: dict[str, str]) -> dict[str, int]:
    """Where the columns are that a header names; a column of ids may be missing."""
    header, wanted = _header(path, separator), _name_of("sequence", names)
    if wanted not in header:
        raise UserError(
            f"{path} has no column {wanted!r}, but {', '.join(map(repr, header[:8])) or 'no header'}: name it, as in "
            "model.data.data_fields_map.sequence=smiles"
        )
    columns = {"sequence": header.index(wanted)}
    if (name := _name_of("id", names)) in header:
        columns["id"] = header.index(name)
    return columns


def _name_of(field: str, names: dict[str, str]) -> str:
    """Column name of a field in headers: the field's own name unless `data_fields_map` gives another."""
    return names.get(field, field)


def _header(path: Path, separator: str, lines: int = 1) -> list[str]:
    """Cells of the last header line; none where there is no header, or it is no line of text."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = list(islice(csv.reader(file, delimiter=separator), lines))
    except (TypeError, csv.Error):  # a separator that is not one character, a NUL byte, an endless cell
        return []
    return rows[-1] if rows and len(rows) == lines else []


def _between_smiles(path: Path) -> str | None:
    """What stands between a SMILES and its name; None: there are no names."""
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    return next((mark for mark in ("\t", " ") if mark.encode() in first.strip()), None)
