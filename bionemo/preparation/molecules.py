# SPDX-License-Identifier: Apache-2.0
"""SMILES files of any make, read some thousand lines at a time, and molecules as RDKit writes them."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rdkit import Chem, rdBase

from bionemo.common.errors import UserError
from bionemo.data.shards.blocks import BYTE_ORDER_MARK
from bionemo.preparation.inputs import note_dropped_columns, whole_lines

rdBase.DisableLog("rdApp.*")  # RDKit's complaints name neither file nor line; ours do
_PIECE = 256 << 10  # bytes: about 4,000 molecules, half a second of RDKit
_IDS = ("zinc_id", "id")


def canonical_smiles(smiles: str) -> str | None:
    """Write a molecule as RDKit writes it, whatever SMILES it was given by; None if RDKit cannot read it."""
    molecule = Chem.MolFromSmiles(smiles.strip())
    return Chem.MolToSmiles(molecule) or None if molecule else None


def unmapped_smiles(smiles: str) -> str | None:
    """Write a molecule as RDKit writes it, without the numbers that map atoms to those of other molecules."""
    molecule = Chem.MolFromSmiles(smiles.strip())
    if not molecule:
        return None
    for atom in molecule.GetAtoms():
        atom.SetAtomMapNum(0)
    # read again: numbered atoms can be stereo centres, and numbered hydrogens are kept, that are not without numbers
    return canonical_smiles(Chem.MolToSmiles(molecule))


class Columns(NamedTuple):
    """Where a file of SMILES has what."""

    separator: str | None  # None: any white space
    smiles: int
    id: int


class Lines(NamedTuple):
    """Some whole lines of a file.

    Attributes:
        file: number of the file, from 0.
        shown: what the user calls the file.
        line: number of the first line, from 1.
        columns: of the file.
        data: the lines.
        size: bytes of the file, as it lies on the disk, that are done with these.
    """

    file: int
    shown: str
    line: int
    columns: Columns
    data: bytes
    size: int

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Give line number, SMILES and id of every row; blank lines are none.

        Raises:
            UserError: text that is not UTF-8, or a row without an id.
        """
        try:
            lines = self.data.decode().split("\n")
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise UserError(f"{self.shown}:{line}: text that is not UTF-8: convert the file with iconv") from error
        separator, smiles, name = self.columns
        for line, text in enumerate(lines, self.line):
            if not text.strip():
                continue
            fields = _fields(text, separator)
            if len(fields) <= max(smiles, name) or not fields[name]:
                raise UserError(f"{self.shown}:{line}: a molecule without an id: give it one, or remove the line")
            yield line, fields[smiles], fields[name]


def smiles_lines(files: Iterable[tuple[Path, str]]) -> Iterator[Lines]:
    """Read files of SMILES, plain or gzipped, one after the other.

    The columns are found by the header, `smiles` and `zinc_id` or `id` in any case and order; a file without one has
    the SMILES first and the id next. They are separated by tabs, commas or spaces, whichever the first line has.

    Args:
        files: path of each, and what the user calls it.

    Raises:
        UserError: a file that cannot be read, or a header that lacks a column.
    """
    noted: list[list[str]] = []
    for number, (path, shown) in enumerate(files):
        columns, line = None, 1
        for data, size in whole_lines(path, _PIECE):
            start = 0
            if columns is None:
                start = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
                first = data[start:].split(b"\n", 1)[0]
                columns, titles = _columns(first.decode(errors="replace"), shown)
                if titles:
                    if titles not in noted:  # once for all files that have these columns
                        note_dropped_columns(shown, titles, [titles[columns.id], titles[columns.smiles]])
                        noted.append(titles)
                    start, line = start + len(first) + 1, 2
            yield Lines(number, shown, line, columns, data[start:], size)
            line += data.count(b"\n", start)


def _columns(first: str, shown: str) -> tuple[Columns, list[str]]:
    """Find the columns by a file's first line, and the titles in it; none when it is not a header."""
    separator = "\t" if "\t" in first else "," if "," in first else None
    titles = _fields(first, separator)
    names = [field.lower() for field in titles]
    if "smiles" not in names:
        return Columns(separator, 0, 1), []
    for name in _IDS:
        if name in names:
            return Columns(separator, names.index("smiles"), names.index(name)), titles
    raise UserError(f"{shown}:1: no column {' or '.join(_IDS)} beside smiles: name the molecules' column so")


def _fields(line: str, separator: str | None) -> list[str]:
    fields = next(csv.reader([line])) if separator == "," and '"' in line else line.split(separator)
    return [field.strip() for field in fields]
