# SPDX-License-Identifier: Apache-2.0
"""Read SMILES files in blocks of lines, and canonicalise SMILES with RDKit."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError, optional_dependency
from bionemo.data.shards.blocks import BYTE_ORDER_MARK, LineBlock
from bionemo.preparation.inputs import notify_dropped_columns, read_line_blocks

with optional_dependency("molecules", "SMILES"):
    from rdkit import Chem, rdBase

rdBase.DisableLog("rdApp.*")  # RDKit's messages contain neither file nor line
_BLOCK_BYTES = 256 << 10  # about 4,000 molecules, half a second of RDKit
_ID_COLUMNS = ("zinc_id", "id")


def canonical_smiles(smiles: str) -> str | None:
    """Return the canonical SMILES of RDKit, or None if RDKit cannot parse the molecule."""
    molecule = Chem.MolFromSmiles(smiles.strip())
    return Chem.MolToSmiles(molecule) or None if molecule else None


def unmapped_smiles(smiles: str) -> str | None:
    """Return the canonical SMILES without atom map numbers, or None if RDKit cannot parse the molecule."""
    molecule = Chem.MolFromSmiles(smiles.strip())
    if not molecule:
        return None
    for atom in molecule.GetAtoms():
        atom.SetAtomMapNum(0)
    # parse again: without map numbers, some atoms are no longer stereo centres and explicit hydrogens are removed
    return canonical_smiles(Chem.MolToSmiles(molecule))


class SmilesColumns(NamedTuple):
    """Columns of a SMILES file."""

    separator: str | None  # None: any white space
    smiles: int
    id: int | None  # None: the id of a molecule is made of the numbers of its file and line


class SmilesBlock(NamedTuple):
    """Consecutive lines of a SMILES file, below its header."""

    file: int  # index of the file
    columns: SmilesColumns
    lines: LineBlock

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Yield line number, SMILES and id of every line that is not blank.

        Raises:
            UserError: if the text is not UTF-8, or a line has no SMILES or, in a file with ids, no id.
        """
        display_path, first_line, data, _ = self.lines
        try:
            lines = data.decode().split("\n")
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            raise UserError(f"{display_path}:{line}: text that is not UTF-8: convert the file with iconv") from error
        separator, smiles, name = self.columns
        for line, text in enumerate(lines, first_line):
            if not text.strip():
                continue
            fields = _split_fields(text, separator)
            if name is None and len(fields) > smiles:
                yield line, fields[smiles], f"{self.file}-{line}"
                continue
            if name is None:
                raise UserError(f"{display_path}:{line}: no SMILES: complete the line, or remove it")
            if len(fields) <= max(smiles, name) or not fields[name]:
                raise UserError(f"{display_path}:{line}: a molecule without an id: add one, or remove the line")
            yield line, fields[smiles], fields[name]


def read_smiles(files: Iterable[tuple[Path, str]]) -> Iterator[SmilesBlock]:
    """Read SMILES files, plain or gzipped.

    The header determines the columns: `smiles`, and `zinc_id` or `id`, in any case and order. In a file without a
    header the SMILES is first and the id second. A file may have no ids. The separator is a tab, comma or space, as in
    the first line.

    `files` are the path of each file, and its path or URL for messages.

    Raises:
        UserError: if a file cannot be read.
    """
    notified: list[list[str]] = []
    for index, (path, display_path) in enumerate(files):
        columns = None
        for block in read_line_blocks(path, display_path, _BLOCK_BYTES):
            lines = block
            if columns is None:
                data = block.data.removeprefix(BYTE_ORDER_MARK)
                first = data.split(b"\n", 1)[0]
                columns, titles = _find_columns(first.decode(errors="replace"))
                if titles:
                    if titles not in notified:  # once for all files with these columns
                        used = [titles[each] for each in (columns.id, columns.smiles) if each is not None]
                        notify_dropped_columns(display_path, titles, used)
                        notified.append(titles)
                    data = data[len(first) + 1 :]
                lines = block._replace(data=data, first_line=1 + bool(titles))
            yield SmilesBlock(index, columns, lines)


def _find_columns(first_line: str) -> tuple[SmilesColumns, list[str]]:
    """Return the columns of a file, and the titles in its header or an empty list if it has none."""
    separator = "\t" if "\t" in first_line else "," if "," in first_line else None
    titles = _split_fields(first_line, separator)
    names = [title.lower() for title in titles]
    if "smiles" not in names:
        return SmilesColumns(separator, 0, 1 if len(titles) > 1 else None), []
    name = next((names.index(name) for name in _ID_COLUMNS if name in names), None)
    return SmilesColumns(separator, names.index("smiles"), name), titles


def _split_fields(line: str, separator: str | None) -> list[str]:
    fields = next(csv.reader([line])) if separator == "," and '"' in line else line.split(separator)
    return [field.strip() for field in fields]
