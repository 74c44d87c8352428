# SPDX-License-Identifier: Apache-2.0
"""Protein variants in one-letter code, or as in the HGVS Nomenclature 21, which MaveDB uses."""

import re

_CODES = {
    "Ala": "A", "Arg": "R", "Asn": "N", "Asp": "D", "Cys": "C", "Gln": "Q", "Glu": "E", "Gly": "G", "His": "H",
    "Ile": "I", "Leu": "L", "Lys": "K", "Met": "M", "Phe": "F", "Pro": "P", "Ser": "S", "Thr": "T", "Trp": "W",
    "Tyr": "Y", "Val": "V", "Sec": "U", "Pyl": "O", "Asx": "B", "Glx": "Z", "Xle": "J", "Xaa": "X", "Ter": "*",
}  # fmt: skip
_RESIDUE = rf"(?:{'|'.join(_CODES)}|[A-Z*])"
_WILD_TYPE = ("", "wt", "wild-type", "_wt", "_sy")  # _wt, _sy: wild type and synonymous in MaveDB
_ACCESSION = r"(?:(?:[A-Z]{2}_|ENSP|LRG_)\w+(?:\.\d+)?:)?"  # of RefSeq, Ensembl or LRG
_HGVS = re.compile(_ACCESSION + r"p\.(?:\[\((.+)\)\]|\[(.+)\]|\(([^;]+)\)|([^;]+))")
_SUBSTITUTION = re.compile(rf"({_RESIDUE})(\d{{1,9}})({_RESIDUE}|=)")
_UNCHANGED = re.compile(rf"=|{_RESIDUE}\d+_{_RESIDUE}\d+=")  # all residues, or a range of them
_STOP = re.compile(r"\*-?\d{1,9}\S|\S-?\d{1,9}\*")
_OTHER = re.compile(  # deletions, insertions, frameshifts, extensions, no protein, unknown
    rf"p\.(?:\?|0\??|{_RESIDUE}\d+(?:_{_RESIDUE}\d+)?(?:\?|{_RESIDUE}?(?:del|ins|dup|fs|ext)\S*))"
)


def split_variant(variant: str) -> list[str]:
    """Return the mutations of a variant, [] for the wild type.

    Substitutions in HGVS notation become one-letter code, such as A24G; all others keep the prefix `p.`.
    """
    text = variant.strip()
    if text.lower() in _WILD_TYPE:
        return []
    match = _HGVS.fullmatch(text)
    if not match:
        return [part.strip() for part in re.split("[:,]", text)]
    mutations = map(str.strip, match[match.lastindex or 0].split(";"))
    return [_to_one_letter(mutation) for mutation in mutations if not _UNCHANGED.fullmatch(mutation)]


def _to_one_letter(mutation: str) -> str:
    match = _SUBSTITUTION.fullmatch(mutation)
    if not match:
        return f"p.{mutation}"
    wild, position, mutant = (_CODES.get(part, part) for part in match.groups())
    return f"{wild}{position}{wild if mutant == '=' else mutant}"


def is_no_substitution(mutation: str) -> bool:
    """Return whether a mutation from `split_variant` is a stop codon, a deletion or the like, in valid notation."""
    return bool(_STOP.fullmatch(mutation) or _OTHER.fullmatch(mutation))
