# SPDX-License-Identifier: Apache-2.0
"""Protein chains in mmCIF and PDB files, read with Biotite. Shape: n residues."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError, optional_dependency

if TYPE_CHECKING:
    from biotite.structure import AtomArray

Floats = NDArray[np.float32]
MMCIF, PDB = (".cif", ".mmcif"), (".pdb", ".ent")
CONTACT = 8.0  # angstroms between C-beta atoms, as in CASP


@dataclass(frozen=True, eq=False)
class Chain:
    """A protein chain.

    Attributes:
        sequence: one letter for each residue.
        positions: [n, 3] coordinates of the C-beta atoms, of C-alpha for glycine, in angstroms; nan if not observed.
    """

    sequence: str
    positions: Floats

    def contacts(self) -> Floats:
        """Return the contact map [n, n]: 1 for positions less than 8 angstroms apart, 0 for others, nan if unknown."""
        from scipy.spatial.distance import cdist

        distances = cdist(self.positions, self.positions)
        return np.where(np.isnan(distances), np.nan, distances < CONTACT).astype(np.float32)


def read_chain(path: Path, chain: str | None = None, sequence: str | None = None) -> Chain:
    """Read a chain of the first model of a structure.

    The sequence of an mmCIF file includes residues that were not observed (`entity_poly_seq`). A PDB file has only the
    observed ones, unless `sequence` is given.

    Args:
        path: an mmCIF or PDB file.
        chain: name of the chain, as authors name it; None: the first protein.
        sequence: full sequence of the chain; residue 1 is its first letter.

    Raises:
        UserError: if the file cannot be read, has no such chain, or the chain does not match the sequence.
    """
    atoms, full = _read_atoms(path)
    parts, name = _select_chain(atoms, chain, path)
    where = f"{path}, chain {name}"
    residues = [(int(part.res_id[0]), _letter(part.res_name[0]), _position(part)) for part in parts]
    if sequence is None and full:
        sequence = full.get(str(parts[0].label_entity_id[0]))
    if sequence is None:
        return Chain("".join(letter for _, letter, _ in residues), np.array([each for *_, each in residues]))
    positions = np.full((len(sequence), 3), np.nan, np.float32)
    for number, letter, position in residues:
        expected = sequence[number - 1] if 1 <= number <= len(sequence) else None
        if expected is None:
            raise UserError(f"{where}: residue {number} is not in the sequence of {len(sequence)} residues")
        if letter != expected and "X" not in (letter, expected):
            raise UserError(f"{where}: residue {number} is {letter}, but {expected} in the sequence")
        positions[number - 1] = position
    return Chain(sequence, positions)


def _read_atoms(path: Path) -> tuple["AtomArray", dict[str, str]]:
    """Return the atoms of the first model, and for mmCIF the sequence of each entity."""
    with optional_dependency("evaluate", "a structure"):
        from biotite.structure.io import pdb, pdbx
    try:
        if path.suffix.lower() in PDB:
            return pdb.PDBFile.read(path).get_structure(model=1), {}
        file = pdbx.CIFFile.read(path)
        fields = ["auth_asym_id", "label_entity_id"]
        atoms = pdbx.get_structure(file, model=1, extra_fields=fields, use_author_fields=False)
        return atoms[atoms.res_id > 0], _read_sequences(file.block)  # others, such as ligands, have no number
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except Exception as error:  # Biotite raises errors of many types for damaged files
        message = " ".join(str(error).split())
        raise UserError(f"{path} is not a valid structure file ({type(error).__name__}: {message})") from error


def _read_sequences(block: Any) -> dict[str, str]:
    """Return the sequence of each entity; of alternative residues at a position, the first."""
    if "entity_poly_seq" not in block:
        return {}
    table = block["entity_poly_seq"]
    found: dict[str, dict[int, str]] = {}
    for entity, number, residue in zip(
        *(table[key].as_array(str) for key in ("entity_id", "num", "mon_id")), strict=True
    ):
        found.setdefault(str(entity), {}).setdefault(int(number), _letter(residue))
    for entity, letters in found.items():
        if sorted(letters) != list(range(1, len(letters) + 1)):
            raise ValueError(f"the residues of entity {entity} are not numbered from 1")
    return {entity: "".join(letters[number] for number in sorted(letters)) for entity, letters in found.items()}


def _select_chain(atoms: "AtomArray", chain: str | None, path: Path) -> tuple[list["AtomArray"], str]:
    """Return the residues of a protein chain and its name."""
    chains: dict[str, dict[tuple[int, str], AtomArray]] = {}
    for residue in _split_residues(atoms):
        if "CA" in residue.atom_name and _is_amino_acid(residue.res_name[0]):
            place = int(residue.res_id[0]), str(residue.ins_code[0])
            # of alternative residues at a place, the first
            chains.setdefault(_chain_name(residue), {}).setdefault(place, residue)
    if not chains:
        raise UserError(f"{path} has no residues of a protein: remove the file")
    name = next(iter(chains)) if chain is None else chain
    if name not in chains:
        raise UserError(f"{path} has no protein chain {name!r}, but {', '.join(chains)}: rename the file")
    return list(chains[name].values()), name


def _split_residues(atoms: "AtomArray") -> Iterator["AtomArray"]:
    from biotite.structure import get_residue_starts

    return (atoms[first:end] for first, end in pairwise([*get_residue_starts(atoms), len(atoms)]))


def _chain_name(residue: "AtomArray") -> str:
    """Return the name that the authors gave to the chain."""
    is_mmcif = "auth_asym_id" in residue.get_annotation_categories()
    return str((residue.auth_asym_id if is_mmcif else residue.chain_id)[0])


def _position(residue: "AtomArray") -> Floats:
    """Return the coordinates [3] of C-beta, of C-alpha for glycine; nan if they are unknown."""
    atom = "CA" if residue.res_name[0] == "GLY" else "CB"
    found: Floats = residue.coord[residue.atom_name == atom]
    return found[0] if len(found) else np.full(3, np.nan, np.float32)


def _letter(residue: str) -> str:
    """Return the letter of a residue; for a modified one, that of its parent; X if it is unknown."""
    from biotite.structure.info import one_letter_code

    return (one_letter_code(residue) or "X").upper()


def _is_amino_acid(residue: str) -> bool:
    from biotite.structure.info import one_letter_code

    return one_letter_code(residue) is not None
