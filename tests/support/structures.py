# SPDX-License-Identifier: Apache-2.0
"""Synthetic protein chains, written as mmCIF and PDB files without the library that reads them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

THREE = {
    "A": "ALA", "C": "CYS", "D": "ASP", "E": "GLU", "F": "PHE", "G": "GLY", "H": "HIS", "I": "ILE", "K": "LYS",
    "L": "LEU", "M": "MET", "N": "ASN", "P": "PRO", "Q": "GLN", "R": "ARG", "S": "SER", "T": "THR", "V": "VAL",
    "W": "TRP", "Y": "TYR",
}  # fmt: skip
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
    keys = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
            "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_comp_id "
            "auth_asym_id auth_atom_id pdbx_PDB_model_num")  # fmt: skip
    lines += ["loop_", *(f"_atom_site.{key}" for key in keys.split())]
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
