# SPDX-License-Identifier: Apache-2.0
"""Records of the input of a prediction: FASTA, CSV and SMILES files, read through an index and in order."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.config.schema import InferDataConfig
from bionemo.data.columns import find_id_column, find_sequence_columns
from bionemo.data.files import FASTA_EXTENSIONS, SMILES_EXTENSIONS
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.data.shards.formats import Csv, Fasta, TextFormat
from bionemo.data.shards.index import user_cache
from bionemo.data.shards.ranges import expand_range
from bionemo.data.shards.records import TextRecords
from bionemo.data.shards.smiles_format import SmilesFormat, find_formats
from bionemo.data.shards.source import read_prefixes
from bionemo.data.table import find_separator

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
        column: the column of the sequences in the first file, and its key, for messages; "" if this is not known.
        lengths: int32 [n], number of letters of each record; of proteins, without white space and `*` at the end.

    Args:
        config: `model.data`.
        proteins: whether the model reads proteins, which the sequences of CSV files are then, or molecules; None: it
            reads other text.

    Raises:
        UserError: if a file is missing, of an unknown format or unreadable.
    """

    def __init__(self, config: InferDataConfig, proteins: bool | None = True) -> None:
        self.paths = find_files(config)
        formats = [_find_format(path, config, proteins) for path in self.paths]
        self.column = _describe_column(self.paths[0], formats[0], config)
        self._source = TextRecords(
            self.paths,
            formats,
            index_mapping_dir=config.index_mapping_dir or user_cache(),
            workers=config.data_impl_kwargs.csv_fields_mmap.workers or None,
        )
        self.lengths = self._source.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def letters(self, size: int = 1 << 22) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]:
        """Yield the letters of all records, uint8, in parts of about `size` bytes, and the lengths of the records."""
        ends = self.lengths.cumsum(dtype=np.int64)
        edges = [*np.searchsorted(ends, np.arange(0, int(ends[-1]), size)), len(ends)]
        for first, last in pairwise(edges):
            yield read_prefixes(self._source, np.arange(first, last))[0], self.lengths[first:last]

    def read(self, first: int, last: int) -> Iterator[Record]:
        """Yield records [first, last); the name of a record without one is its number."""
        for number in range(first, last):
            fields = self._source.fields(number)
            yield Record(fields.get("id") or str(number), fields["sequence"], fields.get("target"))


def find_files(config: InferDataConfig) -> list[Path]:
    """Return the files in the order in which they are read. Errors as in `Records`, of names and headers."""
    names = [config.dataset_path] if isinstance(config.dataset_path, str) else config.dataset_path
    paths = [path for name in names for path in _expand(name)]
    if not paths:
        raise UserError(
            "model.data.dataset_path names no file: set it to a file, a range such as x[000..004].csv, or a list"
        )
    formats = [_find_format(path, config, proteins=None) for path in paths]
    sort = config.data_impl_kwargs.csv_fields_mmap.sort_dataset_paths and Fasta() not in formats
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


def _find_format(path: Path, config: InferDataConfig, proteins: bool | None) -> TextFormat:
    """Return the format of a file: from the configuration if `data_impl` is set, else from its ending and header.

    `proteins` is also None before the model is loaded.
    """
    ending, reader = path.suffix.lower(), config.data_impl_kwargs.csv_fields_mmap
    if config.data_impl == "fasta_fields_mmap" or (not config.data_impl and ending in FASTA_EXTENSIONS):
        return Fasta()
    if not config.data_impl and ending in SMILES_EXTENSIONS:
        columns = (config.data_fields_map.get(field) for field in ("sequence", "id"))
        return find_formats([path], f"{_MAP}.sequence", *columns)[0]
    if not config.data_impl and ending not in _CSV:
        known = ", ".join(FASTA_EXTENSIONS + _CSV + SMILES_EXTENSIONS)
        raise UserError(
            f"{path}: unknown file format, expected {known}: rename the file, or set model.data.data_impl to "
            "csv_fields_mmap or fasta_fields_mmap"
        )
    separator = reader.data_sep
    if not config.data_impl and separator == ",":  # the default
        separator = find_separator(path)
    titles, numbers = _read_titles(path, separator, reader.header_lines), reader.data_fields
    if config.data_impl:
        _check_column(path, titles, config)
    elif reader.header_lines:
        numbers = _find_columns(path, titles, config, proteins)
    if target := config.data_fields_map.get("target"):
        if target not in titles:
            raise UserError(f"{path} has no column {target!r}: set {_MAP}.target to the column of the targets")
        numbers = {**numbers, "target": titles.index(target)}
    return Csv(numbers, separator, reader.header_lines, chr(reader.newline_int), bool(proteins))


def _check_column(path: Path, titles: list[str], config: InferDataConfig) -> None:
    """Check the configured column of the sequences against the header."""
    key, columns = "model.data.data_impl_kwargs.csv_fields_mmap.data_fields", config.data_impl_kwargs.csv_fields_mmap
    if "sequence" not in columns.data_fields:
        raise UserError(f"{key} has no field 'sequence': set its column, counted from 0, as in {{id: 0, sequence: 1}}")
    name, column = config.data_fields_map.get("sequence", "sequence"), columns.data_fields["sequence"]
    if name in titles and titles.index(name) != column:
        found = repr(titles[column]) if 0 <= column < len(titles) else "missing"
        raise UserError(
            f"{path}: column {column} is {found}, and the sequences are in column {titles.index(name)}, {name!r}: set "
            f"{key}.sequence={titles.index(name)}, or model.data.data_fields_map.sequence to the column name"
        )


def _describe_column(path: Path, found: TextFormat, config: InferDataConfig) -> str:
    """Return the column of the sequences and its key, for messages; note that there is no column of ids."""
    titles: Sequence[str] = []
    number, name = 0, None
    if isinstance(found, SmilesFormat) and not found.has_rest:
        titles, number, name = found.titles, found.smiles, found.name
    elif isinstance(found, Csv) and not config.data_impl and found.header_lines:
        titles = _read_titles(path, found.separator, found.header_lines)
        number, name = found.columns["sequence"], found.columns.get("id")
    if titles and name is None:
        notify(f"{path}: no column of ids is known, and rows are numbered from 0: {_MAP}.id selects a column")
    return f"column {titles[number]!r}, which {_MAP}.sequence selects" if titles else ""


def _find_columns(path: Path, titles: list[str], config: InferDataConfig, proteins: bool | None) -> dict[str, int]:
    """Find the columns of sequences and, optionally, ids in the header."""
    wanted, name = (config.data_fields_map.get(field, field) for field in ("sequence", "id"))
    kinds = (True, False) if proteins is None else (proteins,)
    usual = next((found for kind in kinds if len(found := find_sequence_columns(titles, kind)) == 1), None)
    if wanted == "sequence" and usual:
        wanted = titles[usual[0]]
    if wanted not in titles:
        raise UserError(
            f"{path} has no column {wanted!r}, but {', '.join(map(repr, titles[:8])) or 'no header'}: set "
            f"{_MAP}.sequence to the column of the sequences"
        )
    number = titles.index(name) if name in titles else find_id_column(titles)
    return {"sequence": titles.index(wanted)} | ({} if number is None else {"id": number})


def _read_titles(path: Path, separator: str, lines: int) -> list[str]:
    """Return the cells of the last header line; [] if there is none or it is not text."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = list(islice(csv.reader(file, delimiter=separator), lines))
    except (TypeError, csv.Error):  # a separator that is not one character, a NUL byte, a cell without end
        return []
    return rows[-1] if rows and len(rows) == lines else []
