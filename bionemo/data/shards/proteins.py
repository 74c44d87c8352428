# SPDX-License-Identifier: Apache-2.0
"""Proteins in text files: the letters that are part of each sequence, see `tokenizers/residues.py`."""

from collections.abc import Callable

import numpy as np

from bionemo.data.shards.blocks import RecordBlock
from bionemo.tokenizers.residues import WHITE_SPACE

_STOP = ord("*")
_SPACES = [bytes([byte]) for byte in WHITE_SPACE if byte not in b"\r\n"]


def trim_records(
    block: RecordBlock, begin: np.ndarray, end: np.ndarray, letters: np.ndarray, decode: Callable[[bytes], bytes]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Leave white space and stop codons at the end out of the lengths of proteins.

    Args:
        block: the text.
        begin: integer [n], offset in the block of each sequence.
        end: integer [n], offset of its end.
        letters: integer [n], number of its letters with white space and stop codons.
        decode: converts the bytes of a sequence to its letters, without white space and stop codons.

    Returns:
        The number of letters of each protein [n], whether white space was left out [n], and the number of proteins
        with a stop codon.
    """
    text = block.array
    spaced = np.zeros(len(begin), bool)
    for space in _SPACES:
        if block.contains(space):
            spaced |= contains_any(text == space[0], begin, end)
    filled = end > begin
    stopped = filled & (text[end - 1] == _STOP)
    letters = letters - stopped
    before = text[np.maximum(end - 2, 0)]
    # several stop codons, a line end or white space behind or before one: count the letters of the record itself
    again = spaced | (filled & (text[end - 1] <= ord(" "))) | (stopped & ((before == _STOP) | (before <= ord(" "))))
    for i in np.flatnonzero(again):
        raw = block.data[begin[i] : end[i]]
        letters[i] = len(decode(raw))
        stopped[i] = raw.rstrip(WHITE_SPACE).endswith(b"*")
    return letters, spaced, int(stopped.sum())


def contains_any(found: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return whether a byte of each part [begin, end) of a text is marked in `found`, bool [size of the text]."""
    places = np.flatnonzero(found)
    return np.searchsorted(places, begin) < np.searchsorted(places, end)
