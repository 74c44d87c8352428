# SPDX-License-Identifier: Apache-2.0
"""Read SMILES files in blocks of lines, and canonicalise SMILES with RDKit."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError, optional_dependency
from bionemo.data.molecules.smiles import MAX_PARSED, parse_smiles, write_canonical
from bionemo.data.shards.formats import CARRIAGE_RETURN
from bionemo.data.shards.smiles_format import HEAD_BYTES, Column, SmilesFormat, find_format
from bionemo.preparation.blocks import LineBlock
from bionemo.preparation.inputs import notify_dropped_columns, read_head, read_line_blocks

with optional_dependency("molecules", "SMILES"):
    from rdkit import Chem

_BLOCK_BYTES = 256 << 10  # about 4,000 molecules, half a second of RDKit


def canonical_smiles(smiles: str) -> str | None:
    """Return the canonical SMILES of RDKit, or None if RDKit cannot parse the molecule."""
    molecule = parse_smiles(smiles.strip())
    return write_canonical(molecule) if molecule else None


def unmapped_smiles(smiles: str) -> str | None:
    """Return the canonical SMILES without atom map numbers, or None if RDKit cannot parse the molecule."""
    molecule = Chem.MolFromSmiles(smiles.strip()) if len(smiles) <= MAX_PARSED else None
    if not molecule:
        return None
    for atom in molecule.GetAtoms():
        atom.SetAtomMapNum(0)
    # parse again: without map numbers, some atoms are no longer stereo centres and explicit hydrogens are removed
    return canonical_smiles(Chem.MolToSmiles(molecule))


class SmilesBlock(NamedTuple):
    """Consecutive lines of a SMILES file."""

    file: int  # index of the file
    columns: SmilesFormat
    lines: LineBlock

    def rows(self) -> Iterator[tuple[int, str, str]]:
        """Yield line number, SMILES and id of every record; an id that is missing is made of those of file and line.

        Raises:
            UserError: if the text is not UTF-8, or a line has no SMILES or, in a table with ids, no id.
        """
        display_path, first_line, data, _ = self.lines
        try:
            lines = data.decode("utf-8-sig" if first_line == 1 else "utf-8").split("\n")
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            raise UserError(f"{display_path}:{line}: text that is not UTF-8: convert the file with iconv") from error
        if b"\r" in data and b"\r" in data.replace(b"\r\n", b"").rstrip(b"\r"):
            raise UserError(f"{display_path}:{first_line}: {CARRIAGE_RETURN}")
        for line, text in enumerate(lines, first_line):
            if line <= self.columns.skipped:
                continue
            try:
                record = self.columns.split(text)
            except ValueError as error:
                raise UserError(f"{display_path}:{line}: {error}") from error
            if record is None:
                continue
            if self.columns.name is not None and not record[1]:
                raise UserError(f"{display_path}:{line}: a molecule without an id: add one, or remove the line")
            yield line, record[0], record[1] or f"{self.file}-{line}"


def read_smiles(
    files: Iterable[tuple[Path, str]], smiles: Column = None, name: Column = None
) -> Iterator[SmilesBlock]:
    """Read SMILES files, plain or gzipped; for the columns see `smiles_format`.

    `files` are the path of each file, and its path or URL for messages.

    Raises:
        UserError: if a file cannot be read, or no column has SMILES.
    """
    notified: list[Sequence[str]] = []
    for index, (path, display_path) in enumerate(files):
        columns = find_format(read_head(path, HEAD_BYTES), display_path, "sequence_column", smiles, name)
        titles = columns.titles or [f"column {number + 1}" for number in range(columns.columns)]
        if titles not in notified and not columns.has_rest:  # once for all files with these columns
            used = [titles[each] for each in (columns.name, columns.smiles) if each is not None]
            notify_dropped_columns(display_path, titles, used)
            notified.append(titles)
        for block in read_line_blocks(path, display_path, _BLOCK_BYTES):
            yield SmilesBlock(index, columns, block)
