# SPDX-License-Identifier: Apache-2.0
"""Notes about letters that a model does not know, and about lower-case letters, gaps and stop codons of proteins."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.tokenizers import Alphabet, SmilesTokenizer, Vocabulary
from bionemo.tokenizers.residues import trim
from bionemo.tokenizers.smiles import end_at_space

log = logging.getLogger(__name__)
_UNKNOWN, _LOWER, _GAP, _STOP, _REST, _DNA = "unknown", "lower", "gap", "stop", "rest", "dna"
_KINDS = {1: _UNKNOWN, 2: _LOWER, 3: _GAP}
_MANY = 0.2  # share of unknown letters in sequences of another kind
_NUCLEOTIDES = np.isin(np.arange(256), np.frombuffer(b"ACGTUNacgtun", np.uint8))
_FEWEST = 20  # letters of a sequence that is taken for DNA
_SHOWN = 8  # letters in a note
_BATCH = 1 << 12  # sequences


class LetterCounts:
    """Counts the letters of all sequences of a command that the model reads as something else, or not at all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._sequences = self._letters = 0
        kinds = _UNKNOWN, _LOWER, _GAP, _STOP, _REST, _DNA
        self._found: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self._affected = dict.fromkeys(self._found, 0)
        self._first = dict.fromkeys(self._found, 0)
        self._kinds = np.zeros(256, np.uint8)
        if isinstance(vocabulary, Alphabet):
            residues = vocabulary.table != vocabulary.unk_id
            self._kinds[~residues] = 1
            lower = np.arange(ord("a"), ord("z") + 1)
            self._kinds[lower[residues[lower] & (vocabulary.table[lower] == vocabulary.table[lower - 32])]] = 2
            self._kinds[[code for code in b"-." if residues[code]]] = 3

    def add(self, texts: Sequence[str]) -> None:
        """Count the letters of consecutive sequences."""
        if isinstance(self._vocabulary, Alphabet):
            whole = ["".join(text.split()).encode("ascii", "replace") for text in texts]
            trimmed = [trim(text) for text in whole]
            stops = [number for number, text in enumerate(whole) if len(text) > len(trimmed[number])]
            self._count(_STOP, stops, ["*"] * len(stops))
            lengths = np.fromiter(map(len, trimmed), np.int64, len(trimmed))
            self.add_letters(np.frombuffer(b"".join(trimmed), np.uint8), lengths)
        elif isinstance(self._vocabulary, SmilesTokenizer):
            rest = [number for number, text in enumerate(texts) if len(text.split(None, 1)) > 1]
            self._count(_REST, rest, [texts[number].split(None, 1)[1].strip() for number in rest])
            texts = [end_at_space(text) for text in texts]
            ids, lengths = self._vocabulary.encode_all(texts)
            affected = np.unique(_owners(np.flatnonzero(ids == self._vocabulary.unk_id), lengths)).tolist()
            unknown = [
                (number, token) for number in affected for token in self._vocabulary.find_unknown(texts[number])
            ]
            self._count(_UNKNOWN, [number for number, _ in unknown], [token for _, token in unknown])
            self._letters += len(ids)
            self._sequences += len(texts)

    def add_letters(self, letters: NDArray[np.uint8], lengths: NDArray[np.integer[Any]]) -> None:
        """Count the letters [n] of consecutive proteins with these lengths [k], without white space."""
        others, ends = np.append(0, np.cumsum(~_NUCLEOTIDES[letters])), lengths.cumsum(dtype=np.int64)
        is_dna = (others[ends] == others[ends - lengths]) & (lengths >= _FEWEST)
        if is_dna.any():
            used = np.unique(letters[np.repeat(is_dna, lengths)]).tolist()
            self._count(_DNA, np.flatnonzero(is_dna).tolist(), map(chr, used))
        kinds = self._kinds[letters]
        places = np.flatnonzero(kinds)
        owners = _owners(places, lengths)
        for code, kind in _KINDS.items():
            chosen = kinds[places] == code
            if chosen.any():
                histogram = np.bincount(letters[places[chosen]])
                found = {chr(letter): int(histogram[letter]) for letter in np.flatnonzero(histogram)}
                self._count(kind, np.unique(owners[chosen]).tolist(), found)
        self._letters += len(letters)
        self._sequences += len(lengths)

    def _count(self, kind: str, sequences: Iterable[int], found: Iterable[str] | dict[str, int]) -> None:
        affected = set(sequences)
        if affected and not self._affected[kind]:
            self._first[kind] = self._sequences + min(affected)
        self._affected[kind] += len(affected)
        self._found[kind].update(found)

    @property
    def gaps(self) -> dict[str, int]:
        """Number of each kind of gap."""
        return dict(self._found[_GAP].most_common())

    @property
    def unknown(self) -> dict[str, int]:
        """Number of each letter that the model does not know."""
        return dict(self._found[_UNKNOWN].most_common())

    def note(self, name_of: Callable[[int], str]) -> str | None:
        """Return a note in one line, None if there is nothing to note; `name_of` returns the name of a sequence."""
        unknown, reads = "tokens unknown to the model, all read alike, so that compounds become equal", "SMILES"
        if isinstance(self._vocabulary, Alphabet):
            unknown, reads = "letters unknown to the model, each read as an unknown residue", "proteins"
        kinds = {
            _UNKNOWN: unknown,
            _LOWER: "lower-case letters, read as residues",
            _GAP: "gaps, read as gaps and not as residues (remove them from aligned sequences)",
            _REST: "text after white space, not part of a SMILES, not read",
            _STOP: "'*' at the end, a stop codon unknown to the model, dropped",
        }
        notes = [self._describe(kind, problem, name_of) for kind, problem in kinds.items() if self._affected[kind]]
        if notes and self._found[_UNKNOWN].total() >= _MANY * self._letters:
            notes.append(f"the model reads {reads}")
        elif len({*map(str.upper, self._found[_DNA])} - {"N"}) >= 3:
            where = (
                f"{self._affected[_DNA]:,} of {self._sequences:,} sequences, the first {name_of(self._first[_DNA])}"
            )
            notes.append(
                f"only A, C, G, T, U and N in {where}: is this DNA or RNA? The model reads proteins: translate it"
            )
        return "; ".join(notes) or None

    def _describe(self, kind: str, problem: str, name_of: Callable[[int], str]) -> str:
        found = self._found[kind]
        listed = ", ".join(f"{letter!r} {count:,}" for letter, count in found.most_common(_SHOWN))
        letters = listed + (f" and {len(found) - _SHOWN:,} other" if len(found) > _SHOWN else "")
        counts = letters if kind in (_UNKNOWN, _GAP, _REST) else f"{found.total():,}"
        where = f"in {self._affected[kind]:,} of {self._sequences:,} sequences, the first {name_of(self._first[kind])}"
        return f"{problem}: {counts} ({where})"


def _owners(places: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the sequence of each of some places in concatenated sequences of these lengths."""
    return np.searchsorted(lengths.cumsum(), places, side="right")


def note_letters(vocabulary: Vocabulary, sequences: Sequence[tuple[str, str]]) -> None:
    """Log a note about the letters of all sequences of a command, see `LetterCounts`; pairs of text and name."""
    counts = LetterCounts(vocabulary)
    for first in range(0, len(sequences), _BATCH):
        counts.add([text for text, _ in sequences[first : first + _BATCH]])
    if note := counts.note(lambda number: sequences[number][1]):
        log.warning(note)
