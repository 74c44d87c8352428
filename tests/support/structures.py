# SPDX-License-Identifier: Apache-2.0
"""Synthetic protein chains, written as mmCIF and PDB files without the library that reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREE = {
    "A": "ALA", "C": "CYS", "D": "ASP", "E": "GLU", "F": "PHE", "G": "GLY", "H": "HIS", "I": "ILE", "K": "LYS",
    "L": "LEU", "M": "MET", "N": "ASN", "P": "PRO", "Q": "GLN", "R": "ARG", "S": "SER", "T": "THR", "V": "VAL",
    "W": "TRP", "Y": "TYR",
}  # fmt: skip
_COLUMNS = """group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id
label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_comp_id auth_asym_id
auth_atom_id pdbx_PDB_model_num"""
_KEYS = _COLUMNS.split()
Atom = tuple[str, str, str, int, str, tuple[float, float, float]]  # record, atom, residue, number, chain, position


def random_walk(length: int, seed: int) -> NDArray[np.float64]:
    """Return positions [n, 3] of a compact random walk with steps of 3.8 A."""
    random, walk = np.random.default_rng(seed), [np.zeros(3)]
    for _ in range(length - 1):
        step = random.normal(size=3) - 0.25 * walk[-1] / 3.8  # towards the origin
        walk.append(walk[-1] + 3.8 * step / np.linalg.norm(step))
    return np.round(walk, 3)


def atoms_of(sequence: str, beta: NDArray[np.float64], chain: str = "A", missing: Sequence[int] = ()) -> list[Atom]:
    """Return C-alpha and C-beta atoms; glycine has a C-alpha only, at the position for C-beta. `missing` from 1."""
    atoms: list[Atom] = []
    for number, (letter, position) in enumerate(zip(sequence, beta, strict=True), 1):
        if number in missing:
            continue
        place = tuple(float(each) for each in position)
        alpha = place if letter == "G" else (place[0] + 1.5, place[1], place[2])
        atoms.append(("ATOM", "CA", THREE[letter], number, chain, alpha))
        if letter != "G":
            atoms.append(("ATOM", "CB", THREE[letter], number, chain, place))
    return atoms


def to_pdb(atoms: Sequence[Atom]) -> str:
    lines = [
        f"{record:6}{serial:5} {atom:^4} {residue:>3} {chain}{number:4}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00"
        f"{'':10}{atom[0]:>2}"
        for serial, (record, atom, residue, number, chain, (x, y, z)) in enumerate(atoms, 1)
    ]
    return "\n".join([*lines, "END", ""])


def to_cif(atoms: Sequence[Atom], sequence: str | None, author_chain: str = "X", offset: int = 100) -> str:
    """Return an mmCIF file; authors name the chain differently and number its residues from `offset`."""
    lines = ["data_test", "#"]
    if sequence is not None:
        lines += ["loop_", *(f"_entity_poly_seq.{key}" for key in ("entity_id", "num", "mon_id", "hetero"))]
        lines += [f"1 {number} {THREE[letter]} n" for number, letter in enumerate(sequence, 1)]
        lines.append("#")
    lines += ["loop_", *(f"_atom_site.{key}" for key in _KEYS)]
    for serial, (record, atom, residue, number, chain, (x, y, z)) in enumerate(atoms, 1):
        label = "." if record == "HETATM" else str(number)
        author = author_chain if chain == "A" else chain
        lines.append(f"{record} {serial} {atom[0]} {atom} . {residue} {chain} 1 {label} ? {x} {y} {z} 1.0 0.0 "
                     f"{number + offset} {residue} {author} {atom} 1")  # fmt: skip
    return "\n".join([*lines, "#", ""])


def write_structures(directory: Path, sequences: Sequence[str], first_seed: int = 0) -> list[NDArray[np.float64]]:
    """Write each sequence as `sN.cif` or `sN.pdb`, in turn; return the positions."""
    directory.mkdir(parents=True, exist_ok=True)
    walks = []
    for number, sequence in enumerate(sequences):
        walk = random_walk(len(sequence), first_seed + number)
        atoms = atoms_of(sequence, walk)
        text = to_pdb(atoms) if number % 2 else to_cif(atoms, sequence)
        (directory / f"s{number}.{'pdb' if number % 2 else 'cif'}").write_text(text)
        walks.append(walk)
    return walks


@dataclass(frozen=True)
class Modelled:
    """A residue with the atoms N, CA, C, O and, except for glycine, CB.

    Attributes:
        name: component.
        number: number that the authors gave.
        place: steps of 3.8 A along the chain; neighbours are bonded.
        label: position in the sequence; None for a ligand.
    """

    name: str
    number: int
    place: float
    label: int | None = None
    record: str = "ATOM"
    insertion: str = " "
    altloc: str = " "
    occupancy: float = 1.0
    chain: str = "A"
    atoms: tuple[str, ...] = ("N", "CA", "C", "O", "CB")

    def positions(self) -> dict[str, NDArray[np.float64]]:
        before, alpha, after = (_helix(self.place + step) for step in (-1, 0, 1))
        n, c = alpha + 0.37 * (before - alpha), alpha + 0.37 * (after - alpha)
        found = {"N": n, "CA": alpha, "C": c, "O": c + np.array([0, 0, 1.2]), "CB": alpha * [1.6, 1.6, 1]}
        found |= dict.fromkeys(("OXT", "OT2", "OC2"), c - np.array([0, 0, 1.2]))  # of a C-terminus
        return {name: np.round(found[name], 3) for name in self.atoms if (name, self.name) != ("CB", "GLY")}


def _helix(place: float) -> NDArray[np.float64]:
    """Return the position of a C-alpha atom in an alpha helix."""
    turn = np.radians(100 * place)
    return np.array([2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * place])


def modelled(names: Sequence[str], start: int = 1, place: float = 0, **fields: Any) -> list[Modelled]:
    """Return bonded residues with consecutive numbers and labels; letters stand for standard residues."""
    return [
        Modelled(THREE.get(name, name), start + step, place + step, **{"label": start + step, **fields})
        for step, name in enumerate(names)
    ]


def pdb_of(*parts: Sequence[Modelled], sequence: Sequence[str] = (), header: str = "") -> str:
    """Return a PDB file with TER between the parts and after the last one, and SEQRES if there is a sequence."""
    names = [THREE.get(name, name) for name in sequence]
    lines = [header] if header else []
    for row, first in enumerate(range(0, len(names), 13), 1):
        lines.append(
            f"SEQRES {row:3} A {len(names):4}  {' '.join(f'{name:>3}' for name in names[first : first + 13])}"
        )
    for part in parts:
        lines += [
            f"{each.record:6}    1 {atom:^4}{each.altloc}{each.name:>3} {each.chain}{each.number:4}{each.insertion}   "
            f"{x:8.3f}{y:8.3f}{z:8.3f}{each.occupancy:6.2f}  0.00{'':10}{atom[0]:>2}"
            for each in part for atom, (x, y, z) in each.positions().items()
        ]  # fmt: skip
        lines.append("TER")
    return "\n".join([*lines, "END", ""])


def without_ter(text: str) -> str:
    return text.replace("TER\n", "")


def cif_of(residues: Sequence[Modelled], sequence: Sequence[str] = ()) -> str:
    """Return an mmCIF file as wwPDB writes it, with entity_poly_seq if there is a sequence."""
    rows = []
    for each in residues:
        chain, entity, label = (each.chain, 1, each.label) if each.label else ("L", 2, ".")
        code, altloc = each.insertion.strip() or "?", each.altloc.strip() or "."
        rows += [
            f"{each.record} 1 {atom[0]} {atom} {altloc} {each.name} {chain} {entity} {label} {code} {x:.3f} {y:.3f} "
            f"{z:.3f} {each.occupancy} 0.0 {each.number} {each.name} {each.chain} {atom} 1"
            for atom, (x, y, z) in each.positions().items()
        ]
    table = [f"1 {number} {THREE.get(name, name)} n" for number, name in enumerate(sequence, 1)]
    keys = ("entity_id", "num", "mon_id", "hetero")
    head = ["loop_", *(f"_entity_poly_seq.{key}" for key in keys), *table, "#"] if table else []
    return "\n".join(["data_test", "#", *head, "loop_", *(f"_atom_site.{key}" for key in _KEYS), *rows, "#", ""])
