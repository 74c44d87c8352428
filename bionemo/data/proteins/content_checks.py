# SPDX-License-Identifier: Apache-2.0
"""Checks of the letters of protein sequences: warnings about unknown letters and data that is not proteins."""

import string
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bionemo.data.policies import spread_evenly
from bionemo.data.shards.source import SequenceSource, read_prefixes
from bionemo.tokenizers import Alphabet

COUNTED_SEQUENCES = 200_000  # of which the letters are counted
_UPPER, _LOWER = list(string.ascii_uppercase.encode()), list(string.ascii_lowercase.encode())
_SMILES_SYMBOLS = b"()[]=#@+/\\%0123456789"
_SAMPLED_SEQUENCES, _SAMPLED_LETTERS = 1_000, 256  # examined for sequences of X only
_MIN_LETTERS = 50  # minimum number of letters for checks of the content


def note_unknown_letters(counts: NDArray[np.int64], alphabet: Alphabet, label: str, sequences: int) -> str:
    """Return a note about letters outside the alphabet ("" if there are none); `check_content` covers lower case.

    `counts` contains the occurrences of each byte in the first COUNTED_SEQUENCES of `sequences`, int64 [256].
    """
    unknown = counts * (alphabet.table == alphabet.unk_id)
    letters = np.flatnonzero(unknown)
    names = " ".join(repr(chr(letter)) for letter in letters[:8])
    part = f" of the first {COUNTED_SEQUENCES:,} sequences" if sequences > COUNTED_SEQUENCES else ""
    note = (
        f"{label}: {int(unknown.sum()):,} letters{part} are outside the alphabet and become unknown tokens ({names})"
    )
    return note if len(letters) else ""


def check_content(source: SequenceSource, counts: NDArray[np.int64], alphabet: Alphabet, label: str) -> Iterator[str]:
    """Yield warnings if the data looks like SMILES, nucleotides, lower case letters or masked sequences.

    `counts` contains the occurrences of each byte, int64 [256].
    """
    total = int(counts.sum())
    letters = dict(zip(string.ascii_uppercase, (counts[_UPPER] + counts[_LOWER]).tolist(), strict=True))
    bases = [letters[base] for base in "ACGTU"]
    nucleotides = (sum(bases) + letters["N"]) / total
    symbols = counts[list(_SMILES_SYMBOLS)].sum() / total
    if total >= _MIN_LETTERS and symbols > 0.05:
        yield (
            f"{label}: {symbols:.0%} of the letters are brackets, bonds and digits: the sequences look like SMILES, "
            "not like proteins"
        )
    elif total >= _MIN_LETTERS and nucleotides > 0.95 and np.count_nonzero(bases) >= 3:
        yield (
            f"{label}: {nucleotides:.1%} of the letters are A, C, G, T, U or N: the sequences look like DNA or RNA, "
            "not like proteins"
        )
    lower = int(counts[_LOWER].sum())
    if lower and symbols <= 0.05:
        yield f"{label}: {lower:,} of {total:,} letters are lower case and are read as residues"
    records = spread_evenly(np.arange(len(source)), _SAMPLED_SEQUENCES)
    records = records[source.lengths[records] > 0]
    sampled, starts = read_prefixes(source, records, _SAMPLED_LETTERS)
    known = (sampled != ord("X")) & (sampled != ord("x"))
    masked = int((np.add.reduceat(known, starts) == 0).sum()) if len(records) else 0
    if masked:
        yield f"{label}: {masked:,} of {len(records):,} sampled sequences consist of X only: remove them"
