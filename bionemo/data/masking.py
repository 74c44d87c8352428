# SPDX-License-Identifier: Apache-2.0
"""The masked-language objective: which residues are asked, and what stands in their place (Devlin et al. 2019).

Each residue is asked with probability `modify_percent`. Of the asked, `mask_percent` become <mask>, `perturb_percent`
become a random other residue and `identity_percent` stay as they are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bionemo.data.random_stream import below, draw
from bionemo.tokenizers import Alphabet


@dataclass(frozen=True)
class Masking:
    """How to mask. The three shares sum to 1 (config/check.py sees to it)."""

    alphabet: Alphabet
    modify_percent: float
    mask_percent: float
    perturb_percent: float
    mask_special_tokens: bool = False

    def __call__(
        self,
        tokens: NDArray[np.uint8],
        positions: NDArray[np.int32],
        keys: NDArray[np.uint64],
        lengths: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Mask packed sequences in place.

        Args:
            tokens: [n] ids of all sequences end to end, without filler; changed in place.
            positions: [n] position of each token in its own sequence.
            keys: [N] random key of each sequence.
            lengths: [N] tokens of each sequence.

        Returns:
            Index [m] and original id [m] of the asked tokens, in order. At least one is asked in every sequence that
            has a residue, unless modify_percent is 0.
        """
        if self.modify_percent == 0 or not len(tokens):
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        words = draw(np.repeat(keys, lengths), positions)
        uniform = (words >> np.uint64(32)).astype(np.uint32)
        if not self.mask_special_tokens:
            uniform[~self._candidates[tokens]] = 0xFFFFFFFF  # never below a threshold
        asked = uniform < _threshold(self.modify_percent)
        starts = np.cumsum(lengths) - lengths
        for empty in np.flatnonzero(np.add.reduceat(asked, starts, dtype=np.int32) == 0):
            span = uniform[starts[empty] : starts[empty] + lengths[empty]]
            if (lowest := span.argmin()) is not None and span[lowest] != 0xFFFFFFFF:
                asked[starts[empty] + lowest] = True
        index = np.flatnonzero(asked)
        answers = tokens[index]
        self._replace(tokens, index, answers, uniform[index], words[index])
        return index, answers

    def _replace(
        self,
        tokens: NDArray[np.uint8],
        index: NDArray[np.int64],
        answers: NDArray[np.uint8],
        uniform: NDArray[np.uint32],
        words: NDArray[np.uint64],
    ) -> None:
        """Put <mask> or another residue at the asked places; the draw that asked also says which."""
        masked = uniform < _threshold(self.modify_percent * self.mask_percent)
        # a residue that was asked only because its sequence had none lies above every threshold: it is masked
        masked |= uniform >= _threshold(self.modify_percent)
        tokens[index[masked]] = self.alphabet.mask_id
        perturbed = uniform < _threshold(self.modify_percent * (self.mask_percent + self.perturb_percent))
        perturbed &= ~masked
        residues = self.alphabet.residue_ids
        rank = self._residue_rank[answers[perturbed]]
        choice = below(words[perturbed] << np.uint64(32), np.where(rank < len(residues), len(residues) - 1, len(residues)))
        choice += choice >= rank  # skip the residue itself: all others are equally likely
        tokens[index[perturbed]] = residues[choice]

    def __post_init__(self) -> None:
        residues = self.alphabet.residue_ids
        candidates = np.zeros(256, bool)
        candidates[residues] = True
        candidates[self.alphabet.unk_id] = True  # an unknown letter is still a residue
        rank = np.full(256, len(residues), np.int64)
        rank[residues] = np.arange(len(residues))
        object.__setattr__(self, "_candidates", candidates)
        object.__setattr__(self, "_residue_rank", rank)


def _threshold(probability: float) -> np.uint32:
    """The 32-bit integer below which a uniform word lies with this probability."""
    return np.uint32(min(round(probability * 2**32), 2**32 - 1))
