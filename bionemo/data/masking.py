# SPDX-License-Identifier: Apache-2.0
"""The masked-language objective: which residues are asked, and what stands in their place (Devlin et al. 2019).

Each residue is asked with probability `modify_percent`. Of the asked, `mask_percent` become <mask>, `perturb_percent`
become a random other residue and `identity_percent` stay as they are.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bionemo.data.random_stream import Words, below, draw, draw_runs
from bionemo.tokenizers import Alphabet

_NEVER = np.uint64(2**64 - 1)  # lies below no threshold


@dataclass(frozen=True)
class Masking:
    """How to mask. The three shares sum to 1 (config/check.py sees to it)."""

    alphabet: Alphabet
    modify_percent: float
    mask_percent: float
    perturb_percent: float
    mask_special_tokens: bool = False

    def __call__(
        self, tokens: NDArray[np.uint8], keys: Words, lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Mask packed sequences in place.

        Args:
            tokens: [n] ids of all sequences end to end, each with its begin and end token; changed in place.
            keys: [N] random key of each sequence.
            lengths: [N] tokens of each sequence.

        Returns:
            Index [m] and original id [m] of the asked tokens, in order. At least one is asked in every sequence that
            has a residue, unless modify_percent is 0.
        """
        if self.modify_percent == 0 or not len(tokens):
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        words = draw_runs(keys, lengths)  # one a token: whether it is asked, and if so, what is put there
        ends = np.cumsum(lengths)
        if not self.mask_special_tokens:
            words[ends - lengths] = words[ends - 1] = _NEVER
        index = np.flatnonzero(words < self._threshold(1))
        asked = np.diff(np.searchsorted(index, ends), prepend=0)
        if not asked.all():
            for empty in np.flatnonzero(asked == 0):
                self._ask_one(words[ends[empty] - lengths[empty] : ends[empty]], keys[empty])
            index = np.flatnonzero(words < self._threshold(1))
        answers = tokens[index]
        tokens[index] = self._replacements(answers, words[index])
        return index, answers

    def _ask_one(self, words: Words, key: np.uint64) -> None:
        """Ask the token of the lowest word of a sequence: it gets the next word, scaled to lie below the threshold."""
        lowest = words.argmin()
        if words[lowest] != _NEVER:
            word = int(draw(np.array([key]), len(words))[0])
            words[lowest] = word * int(self._threshold(1)) >> 64

    def _replacements(self, answers: NDArray[np.uint8], words: Words) -> NDArray[np.uint8]:
        """Choose what stands in the place of the asked tokens [m]; the word that asked also says what."""
        masked = words < self._threshold(self.mask_percent)
        perturbed = ~masked & (words < self._threshold(self.mask_percent + self.perturb_percent))
        shown = np.where(masked, np.uint8(self.alphabet.mask_id), answers)
        shown[perturbed] = self._others(answers[perturbed], words[perturbed])
        return shown

    def _others(self, answers: NDArray[np.uint8], words: Words) -> NDArray[np.uint8]:
        """Choose a residue for each answer, any but itself, by the lower half of its word."""
        residues, rank = self.alphabet.residue_ids, self._rank[answers]
        choice = below(words << np.uint64(32), len(residues) - (rank < len(residues)))
        return residues[choice + (choice >= rank)]

    @cached_property
    def _rank(self) -> NDArray[np.int64]:
        """Place of every token id among the residues, int64 [256]; behind all where it is none."""
        rank = np.full(256, len(self.alphabet.residue_ids))
        rank[self.alphabet.residue_ids] = np.arange(len(self.alphabet.residue_ids))
        return rank

    def _threshold(self, share: float) -> np.uint64:
        """What a word lies below if its token is asked and is among the first `share` of the asked."""
        return np.uint64(min(round(self.modify_percent * share * 2**64), 2**64 - 1))
