# SPDX-License-Identifier: Apache-2.0
"""The 30-token protein alphabet of ESM-1nv and ProtT5nv, ids as in BioNeMo v1's sentencepiece model."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from bionemo.tokenizers.alphabet import Alphabet

SENTINELS = 96  # of ProtT5nv, as v1 has them


@cache
def esm1nv() -> Alphabet:
    """Upper-case amino acids and X, B, Z, U, O; a gap, a stop, a space or lower case is unknown."""
    return Alphabet.from_file(Path(__file__).parent / "vocab" / "esm1nv.txt", bos="<s>", eos="</s>")


@cache
def prott5nv(sentinels: int = SENTINELS) -> Alphabet:
    """The same and, behind it, `<extra_id_0>` and so on, which stand for hidden residues."""
    alphabet = esm1nv()
    return replace(alphabet, tokens=alphabet.tokens + tuple(f"<extra_id_{number}>" for number in range(sentinels)))
