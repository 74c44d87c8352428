# SPDX-License-Identifier: Apache-2.0
"""Usual titles of the columns of tables, and checks of configured columns before CSV files are indexed."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError, shorten

_SMILES_TITLE = re.compile(
    r"(?:.*[_ ])?(?i:(?:canonical|iso(?:meric)?)?smi(?:les?)?(?:[_ ]str(?:ing)?)?)|.*[a-z](?:Smiles|SMILES)"
)
_PROTEIN_TITLE = re.compile(r"(?:.*[_ ])?(?i:seq(?:uence)?s?)|.*[a-z]Seq(?:uence)?s?")
# usual titles of sequences, in lower case
_PROTEIN_TITLES = ("sequence", "seq", "protein", "protein_sequence", "aa_sequence", "mutated_sequence")
_BINDINGDB_TITLE = "bindingdb target chain sequence 1"  # the columns of further chains have other numbers
_TDC_TITLES = ("drug", "target", "y")  # SMILES, proteins and labels of Therapeutics Data Commons
# usual titles of ids, the first ones preferred, without spaces, underscores and other punctuation
_ID_TITLES = (
    "id", "zincid", "recordname", "chemblid", "moleculechemblid", "cid", "pubchemcid", "compoundid", "drugid",
    "molid", "idnumber", "catalogid",
)  # fmt: skip
_PROTEIN_ID_TITLES = (
    "entry", "accession", "uniprotid", "uniprotaccession", "uniprotkb", "proteinid", "sequenceid", "seqid",
    "recordid", "targetid", "bindingdbreactantsetid", "pdbid", "entryname", "proteinname",
)  # fmt: skip
_NAME_TITLES = ("compoundname", "moleculename", "molname", "name", "title", "iupac")
# titles of proteins that could be mistaken for a peptide, in lower case
_SHORT_TITLES = ("aa", "antigen", "chain", "epitope", "peptide", "primary", "protein", "target")
_RECORDS = 32  # examined in each file
_MAX_LISTED = 8  # columns in a message
_MIN_SEQUENCE = 16  # letters; a cell of this length is not the title of a column
_NUMBER = re.compile(r"[-+]?\d*[.,]?\d+(?:[eE][-+]?\d+)?")


def find_sequence_columns(titles: Sequence[str], proteins: bool | None = None) -> list[int]:
    """Return the numbers of the columns whose titles are usual for sequences or, if there are none, state SMILES.

    If there are columns of proteins and of SMILES, `proteins` says which are returned.
    """
    smiles, others = find_smiles_columns(titles), find_protein_columns(titles)
    if proteins is not None and smiles and others:
        return others if proteins else smiles
    usual = (*_PROTEIN_TITLES, "smiles")
    return [number for number, title in enumerate(titles) if title.strip().lower() in usual] or smiles


def find_smiles_columns(titles: Sequence[str]) -> list[int]:
    """Return the numbers of the columns whose titles state SMILES.

    Only that of `smiles` if there is one, else only those of isomeric SMILES.
    """
    names = [title.strip() for title in titles]
    exact = [number for number, name in enumerate(names) if name.lower() == "smiles"]
    found = [number for number, name in enumerate(names) if _SMILES_TITLE.fullmatch(name)]
    isomeric = [number for number in found if "iso" in names[number].lower()]
    return exact or isomeric or found or _find_tdc_column(titles, "drug")


def find_protein_columns(titles: Sequence[str]) -> list[int]:
    """Return the numbers of the columns whose titles state proteins; only those of usual titles if there are any."""
    names = [" ".join(title.split()) for title in titles]
    usual = [number for number, name in enumerate(names) if name.lower() in (*_PROTEIN_TITLES, _BINDINGDB_TITLE)]
    found = [number for number, name in enumerate(names) if _PROTEIN_TITLE.fullmatch(name)]
    return usual or found or _find_tdc_column(titles, "target")


def _find_tdc_column(titles: Sequence[str], title: str) -> list[int]:
    """Return the number of this column of a table of Therapeutics Data Commons; [] for other tables."""
    names = [name.strip().lower() for name in titles]
    return [names.index(title)] if {*_TDC_TITLES} <= {*names} else []


def find_id_column(titles: Sequence[str], proteins: bool = True) -> int | None:
    """Return the number of the column whose title is the most usual one for ids; None if there is none.

    `proteins` is whether it may have the ids of proteins.
    """
    known = (*_ID_TITLES, *(_PROTEIN_ID_TITLES if proteins else ()), *_NAME_TITLES)
    names = [re.sub(r"[\W_]+", "", title.lower()) for title in titles]
    return next((names.index(name) for name in known if name in names), None)


class SequenceKind(NamedTuple):
    """Titles and cells that a kind of sequence can have."""

    noun: str  # name of the cells in messages
    title: re.Pattern[str]  # matches titles that state the content; for other titles, the cells are checked
    cell: re.Pattern[str]  # matches a cell


PROTEINS = SequenceKind("protein sequences", _PROTEIN_TITLE, re.compile(r"[A-Za-z*.\- ]+"))
SMILES = SequenceKind(
    "SMILES", _SMILES_TITLE, re.compile(r"(?:\[[^\]\s]+\]|Br|Cl|[BCNOPSFI]|[bcnops]|[-=#$:/\\.()*@+%>~]|\d)+")
)


@dataclass(frozen=True)
class CsvColumns:
    """Configured columns of CSV files, and the configuration key for messages."""

    reader: str  # key of the reader's settings, such as `model.data.train.data_impl_kwargs.csv_mmap`
    columns: Mapping[str, int]  # column of each field that holds sequences, from 0
    separator: str = ","  # character between columns
    newline: str = "\n"  # character that ends a record
    header_lines: int = 1  # lines before the records

    def key(self, field: str) -> str:
        """Return the configuration key of a field's column."""
        return f"{self.reader}.data_col" if self.reader.endswith(".csv_mmap") else f"{self.reader}.data_fields.{field}"


def check_columns(paths: Sequence[Path], configured: CsvColumns, kind: SequenceKind) -> None:
    """Compare the configured columns with the last header line and the first records of each file.

    A column passes if its title is that of its field or one such as `sequence` or `smiles`. A column with another
    title passes if no other column has such a title and most of its first cells look like sequences.

    Raises:
        UserError: if a column does not hold sequences, or a header is configured but missing or the reverse.
    """
    for path in paths:
        rows = _read_rows(path, configured)
        header, records = rows[: configured.header_lines], rows[configured.header_lines :]
        for field, column in configured.columns.items() if records else ():
            cells = [row[column] for row in records if len(row) > column and row[column]]
            _check_titles(path, configured, kind, field, header[-1] if header else records[0], cells)
            unlike = [cell for cell in cells if not kind.cell.fullmatch(cell) or _NUMBER.fullmatch(cell)]
            stated = header and _states(header[-1][column], field, kind) and not all(map(_NUMBER.fullmatch, cells))
            if 2 * len(unlike) > len(cells) and not stated:
                raise UserError(
                    f"{path}: {configured.key(field)}={column} holds {shorten(unlike[0])} instead of {kind.noun}; the "
                    f"columns are {_listed((header or records)[-1 if header else 0])}: set {configured.key(field)} to "
                    f"the column of the {kind.noun}, counted from 0"
                )


def _check_titles(
    path: Path, configured: CsvColumns, kind: SequenceKind, field: str, titles: Sequence[str], cells: Sequence[str]
) -> None:
    """Check the last header line; without one, that the first record is none."""
    key, column, lines = configured.key(field), configured.columns[field], configured.header_lines
    title = titles[column] if column < len(titles) else ""
    if lines <= 0:
        is_lower = kind is PROTEINS and not title.isupper() and all(map(str.isupper, cells[1:]))
        if _states(title, field, kind) or (cells[1:] and (is_lower or not kind.cell.fullmatch(title))):
            raise UserError(
                f"{path}:1: this line is a header ({_listed(titles)}), but {configured.reader}.header_lines=0: set "
                f"{configured.reader}.header_lines=1"
            )
        return
    others = [number for number, name in enumerate(titles) if _states(name, field, kind)]
    named = [number for number, name in enumerate(titles) if name.lower() == field.lower()]
    if column not in (others := named or others) and (others or column >= len(titles)):
        remedy = f"set {key}={others[0]}" if others else f"correct {key}, or set {configured.reader}.data_sep"
        found = f" is the column {shorten(title)}" if title else ""
        raise UserError(f"{path}: {key}={column}{found}, but the header has {_listed(titles)}: {remedy}")
    is_cell = kind.cell.fullmatch(title) and not _NUMBER.fullmatch(title) and title.lower() not in _SHORT_TITLES
    is_long = len(title) >= _MIN_SEQUENCE or 2 * len(title) >= min(map(len, cells), default=len(title))
    is_like_cells = is_cell and is_long and (kind is SMILES or title.isupper() or len(title) > 2 * _MIN_SEQUENCE)
    if not others and is_like_cells and all(map(kind.cell.fullmatch, cells)):
        raise UserError(
            f"{path}:{lines}: {configured.reader}.header_lines={lines} skips a line that looks like a record "
            f"({shorten(title)} in column {column}): set {configured.reader}.header_lines={lines - 1}; if it is a "
            f"header, rename this column to {'smiles' if kind is SMILES else 'sequence'!r}"
        )


def _states(title: str, field: str, kind: SequenceKind) -> bool:
    """Return whether a title states that the column holds a field of sequences."""
    return title.lower() == field.lower() or kind.title.fullmatch(title) is not None


def _read_rows(path: Path, configured: CsvColumns) -> list[list[str]]:
    """Return the cells of the header lines and first records; [] if the reader of the records reports an error."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = file if configured.newline == "\n" else iter(file.read(1 << 16).split(configured.newline))
            rows = csv.reader(lines, delimiter=configured.separator)
            found = [[cell.strip() for cell in row] for row in islice(rows, _RECORDS + configured.header_lines)]
    except (OSError, TypeError, csv.Error):  # TypeError: the separator has several characters
        return []
    return [row for number, row in enumerate(found) if row or number < configured.header_lines]


def _listed(titles: Sequence[str]) -> str:
    listed = ", ".join(f"{number} {shorten(title)}" for number, title in enumerate(titles[:_MAX_LISTED]))
    return listed + (f" and {len(titles) - _MAX_LISTED} more" if len(titles) > _MAX_LISTED else "")
