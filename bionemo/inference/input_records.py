# SPDX-License-Identifier: Apache-2.0
"""Records of the input of a prediction: FASTA, CSV and SMILES files, read through an index and in order."""

import csv
from collections.abc import Iterator
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema import InferDataConfig
from bionemo.config.schema.data import CsvFieldsConfig
from bionemo.data.files import SMILES_EXTENSIONS
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.data.shards.csv_shards import CsvSource
from bionemo.data.shards.fasta import FastaSource
from bionemo.data.shards.index_store import user_cache
from bionemo.data.shards.ranges import expand_range
from bionemo.data.shards.smiles_shards import SmilesSource, open_smiles
from bionemo.data.shards.source import read_prefixes
from bionemo.data.table import find_id_column, find_separator, find_sequence_columns

FASTA = (".fasta", ".fa", ".faa", ".fas")
_CSV = (".csv", ".tsv")
_MAP = "model.data.data_fields_map"


class Record(NamedTuple):
    """Name and text of a sequence, and the target with which generated molecules are compared."""

    id: str
    text: str
    target: str | None = None


class Records:
    """All records of the files of `model.data`.

    Attributes:
        paths: the files, in the order in which they are read.
        lengths: int32 [n], number of letters of each record; of proteins, without white space and `*` at the end.

    Args:
        config: `model.data`.
        proteins: whether the sequences of CSV files are proteins; those of FASTA files are.

    Raises:
        UserError: if a file is missing, of an unknown format or unreadable.
    """

    def __init__(self, config: InferDataConfig, proteins: bool = True) -> None:
        self.paths = find_files(config)
        self._sources = _open_sources(config, self.paths, proteins)
        self._bounds = np.cumsum([0, *map(len, self._sources)])
        self.lengths: np.ndarray = np.concatenate([source.lengths for source in self._sources])
        if not len(self.lengths):
            raise UserError(f"{self.paths[0]} has no sequences: check model.data.dataset_path")

    def __len__(self) -> int:
        return len(self.lengths)

    def letters(self, size: int = 1 << 22) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]:
        """Yield the letters of all records, uint8, in parts of about `size` bytes, and the lengths of the records."""
        for source in self._sources:
            ends = source.lengths.cumsum(dtype=np.int64)
            edges = [*np.searchsorted(ends, np.arange(0, int(ends[-1]), size)), len(ends)]
            for first, last in pairwise(edges):
                yield read_prefixes(source, np.arange(first, last))[0], source.lengths[first:last]

    def read(self, first: int, last: int) -> Iterator[Record]:
        """Yield records [first, last); the name of a record without one is its number."""
        for number in range(first, last):
            source = int(np.searchsorted(self._bounds, number, "right")) - 1
            fields = self._sources[source].fields(number - int(self._bounds[source]))
            yield Record(fields.get("id") or str(number), fields["sequence"], fields.get("target"))


def find_files(config: InferDataConfig) -> list[Path]:
    """Return the files in the order in which they are read. Errors as in `Records`, of names and headers."""
    names = [config.dataset_path] if isinstance(config.dataset_path, str) else config.dataset_path
    paths = [path for name in names for path in _expand(name)]
    if not paths:
        raise UserError(
            "model.data.dataset_path names no file: set it to a file, a range such as x[000..004].csv, or a list"
        )
    sort = config.data_impl_kwargs.csv_fields_mmap.sort_dataset_paths and not _all_fasta(config, paths)
    _text_formats(config, paths)
    return sorted(paths) if sort else paths


def _expand(name: str) -> list[Path]:
    """Return a file, or the files of a range."""
    path = Path(name).expanduser()
    paths = [path] if path.exists() else [Path(each) for each in expand_range(str(path), "")]
    for each in paths:
        if not each.is_file():
            problem = "is a directory: name files in it, as in x[000..004].csv" if each.is_dir() else "is missing"
            raise UserError(f"{each} {problem} (model.data.dataset_path)")
        refuse_compressed(each)
    return paths


class _TextFormat(NamedTuple):
    columns: dict[str, int]  # name and index of each column that is read
    separator: str
    header_lines: int


def _open_sources(
    config: InferDataConfig, paths: list[Path], proteins: bool
) -> list[CsvSource | FastaSource | SmilesSource]:
    """Open the files: each text file by its own header, consecutive files of the same format as one source."""
    reader, index_directory = config.data_impl_kwargs.csv_fields_mmap, config.index_mapping_dir or user_cache()
    if _all_fasta(config, paths):
        return [FastaSource(paths, index_mapping_dir=index_directory)]
    if _all_smiles(config, paths):
        smiles, name = (config.data_fields_map.get(field) for field in ("sequence", "id"))
        return [*open_smiles(paths, f"{_MAP}.sequence", smiles, name, index_directory)]
    return [
        CsvSource(
            [path for path, _ in group], columns=text_format.columns, separator=text_format.separator,
            header_lines=text_format.header_lines, newline=reader.newline_int, proteins=proteins,
            index_mapping_dir=index_directory, workers=reader.workers or None,
        )
        for text_format, group in groupby(
            zip(paths, _text_formats(config, paths), strict=True), lambda pair: pair[1]
        )
    ]  # fmt: skip


def _text_formats(config: InferDataConfig, paths: list[Path]) -> list[_TextFormat]:
    """Return the format of each text file; [] for FASTA and SMILES files."""
    if _all_fasta(config, paths) or _all_smiles(config, paths):
        return []
    if not config.data_impl and not {path.suffix.lower() for path in paths} <= {*_CSV}:
        known = ", ".join(FASTA + _CSV + SMILES_EXTENSIONS)
        raise UserError(
            f"{paths[0]}: unknown file format, expected {known}, all of one kind: rename the files, or set "
            "model.data.data_impl to csv_fields_mmap or fasta_fields_mmap"
        )
    return [_text_format(path, config, config.data_impl_kwargs.csv_fields_mmap) for path in paths]


def _all_fasta(config: InferDataConfig, paths: list[Path]) -> bool:
    by_name = {path.suffix.lower() for path in paths} <= {*FASTA}
    return config.data_impl == "fasta_fields_mmap" or (not config.data_impl and by_name)


def _all_smiles(config: InferDataConfig, paths: list[Path]) -> bool:
    return not config.data_impl and {path.suffix.lower() for path in paths} <= {*SMILES_EXTENSIONS}


def _text_format(path: Path, config: InferDataConfig, reader: CsvFieldsConfig) -> _TextFormat:
    """Return the format of a file: from the configuration if `data_impl` is set, else from its ending and header."""
    separator = reader.data_sep
    if config.data_impl:
        _check_columns(path, config, reader)
        header = _read_header(path, separator, reader.header_lines)
        return _TextFormat(reader.data_fields | _find_target(path, header, config), separator, reader.header_lines)
    if separator == ",":  # the default
        separator = find_separator(path)
    columns = _find_columns(path, separator, config) if reader.header_lines else reader.data_fields
    return _TextFormat(columns, separator, reader.header_lines)


def _check_columns(path: Path, config: InferDataConfig, reader: CsvFieldsConfig) -> None:
    """Check the configured column of the sequences against the header."""
    key, name = "model.data.data_impl_kwargs.csv_fields_mmap.data_fields", _header_name("sequence", config)
    if "sequence" not in reader.data_fields:
        raise UserError(f"{key} has no field 'sequence': set its column, counted from 0, as in {{id: 0, sequence: 1}}")
    header, column = _read_header(path, reader.data_sep, reader.header_lines), reader.data_fields["sequence"]
    if name in header and header.index(name) != column:
        found = repr(header[column]) if 0 <= column < len(header) else "missing"
        raise UserError(
            f"{path}: column {column} is {found}, and the sequences are in column {header.index(name)}, {name!r}: set "
            f"{key}.sequence={header.index(name)}, or model.data.data_fields_map.sequence to the column name"
        )


def _find_columns(path: Path, separator: str, config: InferDataConfig) -> dict[str, int]:
    """Find the columns of sequences and, optionally, ids in the header."""
    header, wanted = _read_header(path, separator), _header_name("sequence", config)
    usual = find_sequence_columns(header)
    if "sequence" == wanted not in header and len(usual) == 1:
        wanted = header[usual[0]]
    if wanted not in header:
        raise UserError(
            f"{path} has no column {wanted!r}, but {', '.join(map(repr, header[:8])) or 'no header'}: set "
            f"{_MAP}.sequence to the column of the sequences"
        )
    name = _header_name("id", config)
    number = header.index(name) if name in header else find_id_column(header)
    columns = {"sequence": header.index(wanted)} | ({} if number is None else {"id": number})
    return columns | _find_target(path, header, config)


def _find_target(path: Path, header: list[str], config: InferDataConfig) -> dict[str, int]:
    """Find the column of the targets, if one is configured."""
    target = config.data_fields_map.get("target")
    if target and target not in header:
        raise UserError(f"{path} has no column {target!r}: set {_MAP}.target to the column of the targets")
    return {"target": header.index(target)} if target else {}


def _header_name(field: str, config: InferDataConfig) -> str:
    return config.data_fields_map.get(field, field)


def _read_header(path: Path, separator: str, lines: int = 1) -> list[str]:
    """Return the cells of the last header line; [] if there is none or it is not text."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = list(islice(csv.reader(file, delimiter=separator), lines))
    except (TypeError, csv.Error):  # a separator that is not one character, a NUL byte, a cell without end
        return []
    return rows[-1] if rows and len(rows) == lines else []
