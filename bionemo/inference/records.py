# SPDX-License-Identifier: Apache-2.0
"""The sequences of FASTA, CSV and SMILES files, read in place and in order."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bionemo.config.schema import InferDataConfig
from bionemo.data.shards.csv_shards import CsvSource
from bionemo.data.shards.fasta import FastaSource
from bionemo.data.shards.ranges import expand_range
from bionemo.errors import UserError

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
        paths: the files.
        lengths: int32 [n], letters of each record.

    Raises:
        UserError: for files that are missing, of no known kind, or cannot be read.
    """

    def __init__(self, config: InferDataConfig) -> None:
        asked = [config.dataset_path] if isinstance(config.dataset_path, str) else config.dataset_path
        self.paths = [path for each in asked for path in _files(each)]
        self._source = _open(config, self.paths)
        self.lengths: np.ndarray = self._source.lengths
        if not len(self.lengths):
            raise UserError(f"{self.paths[0]} holds no sequences: check model.data.dataset_path")

    def __len__(self) -> int:
        """Number of records."""
        return len(self.lengths)

    def read(self, first: int, last: int) -> Iterator[Record]:
        """Give records [first, last); one without a name has its number for one."""
        for number in range(first, last):
            fields = self._source.fields(number)
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


def _open(config: InferDataConfig, paths: list[Path]) -> CsvSource | FastaSource:
    endings = {path.suffix.lower() for path in paths}
    fasta = config.data_impl == "fasta_fields_mmap" or (not config.data_impl and endings <= {*FASTA})
    if fasta:
        return FastaSource(paths, index_mapping_dir=config.index_mapping_dir)
    reader = config.data_impl_kwargs.csv_fields_mmap
    columns, separator, header = reader.data_fields, reader.data_sep, reader.header_lines
    if not config.data_impl:
        if endings <= {*_SMILES}:
            named = _between_smiles(paths[0])
            columns = {"sequence": 0, "id": 1} if named else {"sequence": 0}
            separator, header = named or "\t", 0
        elif endings <= {*_CSV}:
            separator = "\t" if endings == {".tsv"} else separator
            columns = _columns(paths[0], separator, config.data_fields_map) if header else columns
        else:
            known = ", ".join(FASTA + _CSV + _SMILES)
            raise UserError(
                f"{paths[0]}: what kind of file is that? Known are {known}, all of one kind; otherwise set "
                "model.data.data_impl to csv_fields_mmap or fasta_fields_mmap"
            )
    return CsvSource(
        sorted(paths) if reader.sort_dataset_paths else paths, columns=columns, separator=separator,
        header_lines=header, newline=reader.newline_int, index_mapping_dir=config.index_mapping_dir,
        workers=reader.workers or None,
    )  # fmt: skip


def _columns(path: Path, separator: str, names: dict[str, str]) -> dict[str, int]:
    """Where the columns are that a header names; a column of ids may be missing."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header = next(csv.reader(file, delimiter=separator), [])
    wanted = names.get("sequence", "sequence")
    if wanted not in header:
        raise UserError(
            f"{path} has no column {wanted!r}, but {', '.join(map(repr, header[:8])) or 'no header'}: name it, as in "
            "model.data.data_fields_map.sequence=smiles"
        )
    columns = {"sequence": header.index(wanted)}
    if (name := names.get("id", "id")) in header:
        columns["id"] = header.index(name)
    return columns


def _between_smiles(path: Path) -> str | None:
    """What stands between a SMILES and its name; None: there are no names."""
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    return next((mark for mark in ("\t", " ") if mark.encode() in first.strip()), None)
