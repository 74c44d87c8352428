# SPDX-License-Identifier: Apache-2.0
"""Components of structures: their letters, and which are amino acids."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gemmi

_FORCE_FIELDS = {"H": "HSD HSE HSP HID HIE HIP HIN", "C": "CYX CYM CYN", "D": "ASH", "E": "GLH", "K": "LYN LYP LSN",
                 "R": "ARN", "Y": "TYM"}  # fmt: skip
_CAPS = {"NME", "NMA", "NH2", "NHE"}  # of the C-terminus
_LETTERS = {name: letter for letter, names in _FORCE_FIELDS.items() for name in names.split()}
# gemmi gives the first of several letters, and another parent of pyroglutamate than the component dictionary
_LETTERS |= {"PCA": "Q"} | dict.fromkeys(("CR2", "CR8", "CRF", "CRO", "CRQ", "CSH", "GYS", "MDO", "NRQ"), "X")


@lru_cache(maxsize=4096)
def _is_known(name: str) -> bool:
    import gemmi

    return name in _LETTERS or gemmi.find_tabulated_residue(name).is_amino_acid()


def is_amino_acid(residue: "gemmi.Residue") -> bool:
    """Return whether the name or the backbone is that of an amino acid."""
    return _is_known(residue.name) or all(residue.find_atom(name, "*") is not None for name in ("N", "CA", "C"))


def is_anchor(residue: "gemmi.Residue") -> bool:
    """Return whether a residue is an ATOM record of an amino acid."""
    return residue.het_flag != "H" and _is_known(residue.name)


def is_modified(residue: "gemmi.Residue") -> bool:
    """Return whether a residue is a modified amino acid with the letter of its parent."""
    import gemmi

    return not gemmi.find_tabulated_residue(residue.name).is_standard() and letter_of(residue.name) != "X"


@lru_cache(maxsize=4096)
def letter_of(name: str) -> str:
    """Return the letter of an amino acid; for a modified one that of its parent; X if unknown, or of several."""
    import gemmi

    info = gemmi.find_tabulated_residue(name)
    if name in _LETTERS:
        return _LETTERS[name]
    if info.found():
        return (info.one_letter_code.strip() or "X").upper() if info.is_amino_acid() else "X"
    from biotite.structure.info import one_letter_code

    letter = one_letter_code(name) or ""
    return letter if len(letter) == 1 and letter.isalpha() else "X"


def ends_molecule(residue: "gemmi.Residue") -> bool:
    """Return whether a residue is a C-terminus: a cap, or with the second oxygen that programs name differently."""
    return residue.name in _CAPS or any(residue.find_atom(name, "*") for name in ("OXT", "OT2", "OC2"))
