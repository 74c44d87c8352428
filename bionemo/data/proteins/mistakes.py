# SPDX-License-Identifier: Apache-2.0
"""Signs that sequences are not what a protein model expects, from a small sample of them."""

import string
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bionemo.data.shards.source import SequenceSource
from bionemo.tokenizers import Alphabet

_SAMPLED = 1_000  # sequences, spread evenly
_LETTERS = 256  # of each of them
_NUCLEOTIDES, _UNKNOWN_BASE = b"ACGTU", b"N"
_OF_SMILES = b"()[]=#@+/\\%0123456789"
_FEWEST = 50  # letters to judge by


def likely_mistakes(
    source: SequenceSource, letters: NDArray[np.int64], alphabet: Alphabet, label: str
) -> Iterator[str]:
    """Say what the data looks like, if not like proteins.

    Args:
        source: of the sequences.
        letters: int64 [256], how often each byte occurs.
        alphabet: of the model.
        label: names the data in messages.

    Yields:
        A line for each likely mistake.
    """
    total = int(letters.sum())
    of_smiles = letters[list(_OF_SMILES)].sum() / total
    upper = letters[list(string.ascii_uppercase.encode())] + letters[list(string.ascii_lowercase.encode())]
    bases = [int(upper[base - ord("A")]) for base in _NUCLEOTIDES]
    nucleotides = (sum(bases) + int(upper[_UNKNOWN_BASE[0] - ord("A")])) / total
    if total >= _FEWEST and of_smiles > 0.05:
        yield (
            f"{label}: {of_smiles:.0%} of the letters are brackets, bonds and digits: these look like SMILES, not "
            "proteins"
        )
    elif total >= _FEWEST and nucleotides > 0.95 and np.count_nonzero(bases) >= 3:
        yield (
            f"{label}: {nucleotides:.1%} of the letters are A, C, G, T, U or N: these look like DNA or RNA, not "
            "proteins"
        )
    lower = list(string.ascii_lowercase.encode())
    small = int(letters[lower].sum())
    if small and (alphabet.table[lower] == alphabet.unk_id).all() and of_smiles <= 0.05:
        yield (
            f"{label}: {small:,} of {total:,} letters are lower case, which the vocabulary does not have: each run of "
            "them is read as one unknown token; write the sequences in upper case"
        )
    hidden, looked = _without_residues(source)
    if hidden:
        yield f"{label}: {hidden:,} of {looked:,} sequences looked at consist of X alone: leave them out"


def _without_residues(source: SequenceSource) -> tuple[int, int]:
    """Of some sequences, how many hold nothing but X, and how many were looked at."""
    number = min(_SAMPLED, len(source))
    records = np.arange(number) * len(source) // number
    counts = np.minimum(source.lengths[records].astype(np.int64), _LETTERS)
    records, counts = records[counts > 0], counts[counts > 0]
    if not len(records):
        return 0, 0
    starts = counts.cumsum() - counts
    letters = np.empty(int(counts.sum()), np.uint8)
    source.gather(records, np.zeros_like(counts), counts, letters, starts)
    known = (letters != ord("X")) & (letters != ord("x"))
    return int((np.add.reduceat(known, starts) == 0).sum()), len(records)
