# SPDX-License-Identifier: Apache-2.0
"""Parses SMILES and writes canonical and random SMILES with RDKit, which is imported on first use."""

import re
import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.errors import optional_dependency
from bionemo.common.random_stream import draw_runs

Molecule = Any
"""rdkit.Chem.Mol; RDKit has no type annotations."""

MAX_PARSED = 10_000  # letters; RDKit's recursion crashes the process at about 20,000 atoms
_ENTRY_BYTES = 150  # upper bound of the size of a dictionary entry
_MAX_SEED = 2**31 - 1  # largest seed of RDKit's generator; with seed 0, RDKit would not set the seed
_STEREO_DONE = "_StereochemDone"  # RDKit's flag of a molecule whose stereocentres it has checked
_UNUSUAL = re.compile(r"[^A-Za-z0-9()\[\]=#+@.%-]")  # bond stereo, names and rare symbols
_UNUSUAL_CENTRE = re.compile(r"@[A-GI-Z]")  # non-tetrahedral stereocentres
_ATOM = re.compile(r"(\[[^\]]*\]|Br|Cl|[A-Za-z*])")
_BRACKETED = re.compile(r"\[(Br|Cl|[BCNOPSFI]|[bcops])(?:H\d?)?\]|\[(n)\]")  # atoms that may not need their brackets


def parse_smiles(text: str) -> Molecule | None:
    """Parse a SMILES; return None if RDKit rejects it, or if it has no atoms or more than MAX_PARSED letters.

    Text that is not ASCII is rejected: RDKit drops such letters at both ends, and CC with a Cyrillic O behind it is
    ethane.

    RDKit parses, sanitizes, removes hydrogen atoms and checks stereocentres. If a SMILES has no hydrogen atoms and no
    unusual symbols, the last two steps are skipped, which saves a third of the time for molecules with stereocentres.
    `write_canonical` checks stereocentres later; `write_random` does not, so it also writes invalid stereocentres.
    """
    if len(text) > MAX_PARSED or not text.isascii():
        return None
    rdkit = _rdkit()
    hydrogen = "[H" in text or "[#" in text or "[0" in text  # [H], [#1], [0H]
    if not (hydrogen or _UNUSUAL.search(text) or _UNUSUAL_CENTRE.search(text)):
        molecule = rdkit.chem.MolFromSmiles(text, rdkit.parse_only)
        if molecule is None or rdkit.chem.SanitizeMol(molecule, catchErrors=True):
            return None
    elif molecule := rdkit.chem.MolFromSmiles(text):
        molecule = unpack(pack(molecule))  # packing loses some properties; the result must not depend on the cache
    return molecule if molecule and molecule.GetNumAtoms() else None


def is_valid(text: str) -> bool:
    """Return whether RDKit can parse a SMILES, twice as fast as `parse_smiles`."""
    if len(text) > MAX_PARSED or not text.isascii():
        return False
    rdkit = _rdkit()
    molecule = rdkit.chem.MolFromSmiles(text, rdkit.parse_only)
    if molecule is None or not molecule.GetNumAtoms():
        return False
    # the other operations of RDKit do not fail, except that a few complexes need all of them
    failed = rdkit.chem.SanitizeMol(molecule, sanitizeOps=rdkit.checks, catchErrors=True)
    return not failed or parse_smiles(text) is not None


def pack(molecule: Molecule) -> bytes:
    """Serialize a molecule: 1 % of the memory, and unpacking takes a third of the time of parsing."""
    return molecule.ToBinary(_rdkit().all_properties)  # non-tetrahedral stereocentres are properties


def unpack(data: bytes) -> Molecule:
    """Restore a molecule from `pack`."""
    return _rdkit().chem.Mol(data)


def write_canonical(molecule: Molecule) -> str:
    """Return RDKit's canonical SMILES."""
    molecule.ClearProp(_STEREO_DONE)
    return remove_brackets(_rdkit().chem.MolToSmiles(molecule))


def write_random(molecule: Molecule, key: int) -> str:
    """Return a random SMILES as a function of a 64-bit key.

    The order of atoms, branches and fragments is random ("unrestricted" randomized SMILES, Arus-Pous et al. 2019).

    Raises:
        RuntimeError: from RDKit, which in rare cases cannot write a molecule in the selected order.
    """
    molecule.SetIntProp(_STEREO_DONE, 1)  # skips the check of stereocentres, which takes as long as writing
    text = remove_brackets(_rdkit().chem.MolToRandomSmilesVect(molecule, 1, randomSeed=key % _MAX_SEED + 1)[0])
    if "." in text:  # RDKit does not shuffle fragments
        fragments = text.split(".")
        order = draw_runs(np.array([key], np.uint64), np.array([len(fragments)])).argsort()
        text = ".".join(fragments[i] for i in order)
    return text


def remove_brackets(text: str) -> str:
    """Remove the brackets that RDKit writes around the neighbours of metals since 2025.3, as in `[Mg+][c]1ccccc1`.

    The vocabularies of models are older. Brackets remain around atoms that would have other hydrogen atoms or radicals
    without them, and around atoms with hydrogen atoms and an unusual valence.
    """
    if not _BRACKETED.search(text):
        return text
    pieces = _ATOM.split(text)  # atoms are at odd positions
    atoms, plain = _describe_atoms(text), list(pieces)
    for number, atom in enumerate(atoms):
        if atom.is_usual:
            plain[2 * number + 1] = _BRACKETED.sub(r"\1\2", pieces[2 * number + 1])
    for _ in range(2):
        found = _describe_atoms("".join(plain))
        if found == atoms:
            return "".join(plain)
        if len(found) != len(atoms):
            break
        for number in (number for number, atom in enumerate(atoms) if atom != found[number]):
            plain[2 * number + 1] = pieces[2 * number + 1]
    return text


class _Atom(NamedTuple):
    hydrogens: int
    radical_electrons: int
    is_aromatic: bool
    is_usual: bool  # no hydrogen atoms, or the lowest valence of the element


def _describe_atoms(text: str) -> list[_Atom]:
    """Return the atoms of a SMILES in the order of the text; [] if it is invalid."""
    chem = _rdkit().chem
    molecule = chem.MolFromSmiles(text, _rdkit().keep_hydrogens)
    lowest = chem.GetPeriodicTable().GetDefaultValence
    return [
        _Atom(
            hydrogens := atom.GetTotalNumHs(), atom.GetNumRadicalElectrons(), atom.GetIsAromatic(),
            not hydrogens or atom.GetTotalValence() == lowest(atom.GetAtomicNum()),
        )
        for atom in (molecule.GetAtoms() if molecule else ())
    ]  # fmt: skip


def same_molecule(generated: str, target: str) -> bool | None:
    """Return whether two SMILES denote the same molecule; None if RDKit rejects the first."""
    molecule = parse_smiles(generated)
    if molecule is None:
        return None
    if generated == target:
        return True
    other = parse_smiles(target)
    return other is not None and write_canonical(molecule) == write_canonical(other)


class SmilesRewriter:
    """Rewrites SMILES, with a cache of parsed molecules.

    When the cache is full, nothing is evicted: every molecule occurs once per epoch, so the least recently used
    entry is the one needed next.
    """

    def __init__(self, cache_bytes: int = 64 << 20) -> None:
        """Set the size of the cache in each process."""
        self._free_bytes = cache_bytes
        self._packed: dict[str, bytes] = {}
        self._canonical: dict[str, str] = {}
        self._last: tuple[str, Molecule | None] = "", None  # often rewritten twice, for encoder and decoder

    def canonicalize(self, text: str) -> str | None:
        """Return the canonical SMILES; None if RDKit rejects it."""
        written = self._canonical.get(text)
        if written is None:
            molecule = self._parse(text)
            written = write_canonical(molecule) if molecule else ""
            if self._reserve(text, written):
                self._canonical[text] = written
        return written or None

    def randomize(self, text: str, key: int) -> str | None:
        """Return a random SMILES, or the canonical one if RDKit fails to write it; None if RDKit rejects it."""
        molecule = self._parse(text)
        if self._free_bytes > 0 and text not in self._packed:
            packed = pack(molecule) if molecule else b""
            if self._reserve(text, packed):
                self._packed[text] = packed
        try:
            return write_random(molecule, key) if molecule else None
        except RuntimeError:
            return write_canonical(molecule)

    def _parse(self, text: str) -> Molecule | None:
        if text != self._last[0]:
            packed = self._packed.get(text)
            self._last = text, parse_smiles(text) if packed is None else unpack(packed) if packed else None
        return self._last[1]

    def _reserve(self, *objects: str | bytes) -> bool:
        """Reserve memory in the cache; return False if it is full."""
        self._free_bytes -= sum(map(sys.getsizeof, objects)) + _ENTRY_BYTES
        return self._free_bytes >= 0


class _RDKit(NamedTuple):
    chem: Any
    parse_only: Any
    keep_hydrogens: Any
    checks: int
    all_properties: int


@cache
def _rdkit() -> _RDKit:
    with optional_dependency("molecules", "SMILES"):
        from rdkit import Chem, rdBase

    rdBase.DisableLog("rdApp.*")  # its messages contain neither file nor record
    parse_only: Any = Chem.SmilesParserParams()
    keep_hydrogens: Any = Chem.SmilesParserParams()
    parse_only.sanitize = parse_only.removeHs = keep_hydrogens.removeHs = False
    operations = Chem.SanitizeFlags
    checks = operations.SANITIZE_CLEANUP | operations.SANITIZE_PROPERTIES | operations.SANITIZE_KEKULIZE
    return _RDKit(Chem, parse_only, keep_hydrogens, checks, int(Chem.PropertyPickleOptions.AllProps))


def rdkit_version() -> str:
    """Return the version of RDKit; rewritten SMILES may differ between versions."""
    with optional_dependency("molecules", "SMILES"):
        from rdkit import rdBase

    return str(rdBase.rdkitVersion)
