# SPDX-License-Identifier: Apache-2.0
"""Molecules as RDKit reads and writes them: canonical, or with their atoms in random order.

RDKit is loaded when the first molecule is read; other models never pay for it.
"""

import re
import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from bionemo.common.random_stream import draw_runs

Molecule = Any
"""An rdkit.Chem.Mol; RDKit has no types."""

_ENTRY = 150  # bytes that a dictionary takes for an entry, at most
_SEEDS = 2**31 - 1  # of RDKit's generator; 0 would leave it as it is
_STEREO_DONE = "_StereochemDone"  # RDKit's own mark of a molecule whose stereo centres it has looked through
_ODD = re.compile(r"[^A-Za-z0-9()\[\]=#+.@%-]")  # bonds with sides, names, whatever is rare
_ODD_CENTRE = re.compile(r"@[A-GI-Z]")  # other than tetrahedral


def read(text: str) -> Molecule | None:
    """Read a SMILES; None if RDKit refuses it, or if it has no atoms.

    RDKit parses, sanitises, removes hydrogen atoms and looks for false stereo centres. Of a simple text, which most
    are, the last two are left out: it has no hydrogen atoms, and to write a molecule in random order no centre need be
    looked at. Where there are centres, that is a third less time. A false one keeps its mark in random forms.
    """
    rdkit = _rdkit()
    hydrogen = "[H" in text or "[#" in text or "[0" in text  # [H], [#1], [0H]
    if not (hydrogen or _ODD.search(text) or _ODD_CENTRE.search(text)):
        molecule = rdkit.chem.MolFromSmiles(text, rdkit.parse_only)
        if molecule is None or rdkit.chem.SanitizeMol(molecule, catchErrors=True):
            return None
    elif molecule := rdkit.chem.MolFromSmiles(text):
        molecule = restored(remembered(molecule))  # some notes get lost; so both lack the same, and write the same
    return molecule if molecule and molecule.GetNumAtoms() else None


def remembered(molecule: Molecule) -> bytes:
    """Pack a molecule; it takes a hundredth of the memory, and unpacking a third of the time of reading."""
    return molecule.ToBinary(_rdkit().all_notes)  # centres that are not tetrahedral are among them


def restored(data: bytes) -> Molecule:
    """Unpack what `remembered` has packed."""
    return _rdkit().chem.Mol(data)


def canonical(molecule: Molecule) -> str:
    """Write a molecule the one way that RDKit chooses, whatever SMILES it was read from."""
    molecule.ClearProp(_STEREO_DONE)
    return _rdkit().chem.MolToSmiles(molecule)


def randomised(molecule: Molecule, key: int) -> str:
    """Write a molecule with its atoms, branches and fragments in random order, as a pure function of a 64-bit key.

    It may begin at any atom and take the neighbours of each in any order ("unrestricted" randomised SMILES, Arus-Pous
    et al. 2019).

    Raises:
        RuntimeError: by RDKit, which in rare cases cannot write a molecule in some order.
    """
    molecule.SetIntProp(_STEREO_DONE, 1)  # or false centres would be looked for, which costs as much as writing
    text: str = _rdkit().chem.MolToRandomSmilesVect(molecule, 1, randomSeed=key % _SEEDS + 1)[0]
    if "." in text:  # RDKit keeps the order of fragments
        fragments = text.split(".")
        order = draw_runs(np.array([key], np.uint64), np.array([len(fragments)])).argsort()
        text = ".".join(fragments[i] for i in order)
    return text


def same_molecule(written: str, wanted: str) -> bool | None:
    """Say whether two SMILES are of the same molecule; None if RDKit refuses the first."""
    molecule = read(written)
    if molecule is None:
        return None
    if written == wanted:
        return True
    other = read(wanted)
    return other is not None and canonical(molecule) == canonical(other)


class Molecules:
    """Writes SMILES anew, and remembers of those it has read what is costly, as long as there is room.

    Nothing is thrown out for something new: when every molecule comes once in an epoch, what came last comes again
    last, and throwing out the oldest would throw out what is wanted next.
    """

    def __init__(self, room: int = 64 << 20) -> None:
        """`room`: bytes for what is remembered, in each process."""
        self._room = room
        self._packed: dict[str, bytes] = {}
        self._canonical: dict[str, str] = {}
        self._last: tuple[str, Molecule | None] = "", None  # for a second form of the same molecule

    def canonical(self, text: str) -> str | None:
        """Write a SMILES as RDKit does; None if RDKit refuses it."""
        written = self._canonical.get(text)
        if written is None:
            molecule = self._molecule(text)
            written = canonical(molecule) if molecule else ""
            if self._fits(text, written):
                self._canonical[text] = written
        return written or None

    def randomised(self, text: str, key: int) -> str | None:
        """Write a SMILES in an order drawn by a key; None if RDKit refuses it."""
        molecule = self._molecule(text)
        if self._room > 0 and text not in self._packed:
            packed = remembered(molecule) if molecule else b""
            if self._fits(text, packed):
                self._packed[text] = packed
        try:
            return randomised(molecule, key) if molecule else None
        except RuntimeError:
            return canonical(molecule)

    def _molecule(self, text: str) -> Molecule | None:
        if text != self._last[0]:
            packed = self._packed.get(text)
            self._last = text, read(text) if packed is None else restored(packed) if packed else None
        return self._last[1]

    def _fits(self, *new: str | bytes) -> bool:
        """Say whether something new is to be remembered, and count it."""
        self._room -= sum(map(sys.getsizeof, new)) + _ENTRY
        return self._room >= 0


class _RDKit(NamedTuple):
    chem: Any
    parse_only: Any
    all_notes: int


@cache
def _rdkit() -> _RDKit:
    from rdkit import Chem, rdBase

    rdBase.DisableLog("rdApp.*")  # RDKit's complaints name neither file nor record; ours do
    parse_only: Any = Chem.SmilesParserParams()
    parse_only.sanitize = parse_only.removeHs = False
    return _RDKit(Chem, parse_only, int(Chem.PropertyPickleOptions.AllProps))


def rdkit_version() -> str:
    """Which RDKit writes: with another one, forms may differ."""
    from rdkit import rdBase

    return str(rdBase.rdkitVersion)
