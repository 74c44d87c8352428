# SPDX-License-Identifier: Apache-2.0
"""The 33-token alphabet of ESM-2 (Lin et al. 2023), ids as in the weights published on the Hugging Face hub."""

from functools import cache
from pathlib import Path

from bionemo.tokenizers.alphabet import Alphabet


@cache
def esm2nv() -> Alphabet:
    """Upper-case amino acids, X, B, U, Z, O and the alignment letters ``.`` and ``-``; white space is dropped."""
    vocabulary = Path(__file__).parent / "vocab" / "esm2nv.txt"
    return Alphabet.from_file(vocabulary, bos="<cls>", eos="<eos>", skips_space=True)
