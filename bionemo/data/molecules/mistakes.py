# SPDX-License-Identifier: Apache-2.0
"""Signs that texts are not SMILES, from a small sample of them."""

import re
from collections.abc import Sequence

_NUCLEOTIDES = re.compile(r"[ACGTUN]{10,}")
_RESIDUES = re.compile(r"(?=.*[ADEGHKLMQRTVWY])[ABCDEFGHIKLMNOPQRSTUVWXYZ*]{10,}")  # the former are no atoms of SMILES


def likely_mistakes(texts: Sequence[str], label: str) -> list[str]:
    """Say what the data looks like, if not like SMILES.

    Args:
        texts: some of the records, not empty.
        label: names the data in messages.

    Returns:
        A line for each likely mistake.
    """
    for name, pattern in {"DNA or RNA": _NUCLEOTIDES, "protein sequences": _RESIDUES}.items():
        alike = sum(pattern.fullmatch(text) is not None for text in texts)
        if 2 * alike > len(texts):
            return [f"{label}: {alike:,} of {len(texts):,} records looked at look like {name}, not like SMILES"]
    return []
