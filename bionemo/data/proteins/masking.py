# SPDX-License-Identifier: Apache-2.0
"""Masked language modelling of proteins (Devlin et al. 2019).

Each residue becomes a target position with probability `modify_percent`. Of the targets, a fraction `mask_percent` is
replaced by <mask>, a fraction `perturb_percent` by another random residue, and the rest is left unchanged.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import RandomBits, draw, draw_runs, integers_below
from bionemo.config.schema import EncoderConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import MaxLengths, TokenizedBatch
from bionemo.data.files import SplitName
from bionemo.data.proteins.dataset import ProteinDataset
from bionemo.data.proteins.hidden_markov import MASKED, Corruption
from bionemo.data.proteins.mock import AMINO_ACIDS, MockSource, language
from bionemo.data.proteins.splits import Split, open_mixture, open_split
from bionemo.tokenizers import Alphabet

_NEVER = np.uint64(2**64 - 1)  # not below any threshold


@dataclass(frozen=True)
class ResidueMasker:
    """Masks tokens; config/check.py ensures that the fractions sum to at most 1."""

    alphabet: Alphabet
    modify_percent: float
    mask_percent: float
    perturb_percent: float
    mask_special_tokens: bool = False

    def __call__(
        self, tokens: NDArray[np.integer[Any]], keys: RandomBits, lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
        """Mask the ids [n] of concatenated sequences with BOS and EOS, in place.

        Each sequence has a random key [N] and a number of tokens [N]. Returns the target positions [m], ascending, and
        the original ids there [m]. Each sequence with at least one residue has at least one target, unless
        modify_percent is 0.
        """
        if self.modify_percent == 0 or not len(tokens):
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        bits = draw_runs(keys, lengths)  # decide which tokens are targets, and what replaces them
        ends = np.cumsum(lengths)
        if not self.mask_special_tokens:
            bits[ends - lengths] = bits[ends - 1] = _NEVER
        positions = np.flatnonzero(bits < self._threshold(1))
        counts = np.diff(np.searchsorted(positions, ends), prepend=0)
        if not counts.all():
            for empty in np.flatnonzero(counts == 0):
                self._select_one_target(bits[ends[empty] - lengths[empty] : ends[empty]], keys[empty])
            positions = np.flatnonzero(bits < self._threshold(1))
        target_ids = tokens[positions]
        tokens[positions] = self._replace(target_ids, bits[positions])
        return positions, target_ids

    def unigram_loss(self, frequencies: NDArray[np.floating[Any]]) -> float:
        """Return the loss, in nats per target, of the best prediction from the token at the target position alone.

        For <mask> that is the letter frequencies [k]; a visible residue is the true one or a random other one.
        """
        residues = len(self.alphabet.residue_ids)  # those of frequency 0 appear as replacements
        unchanged = 1 - self.mask_percent - self.perturb_percent
        # joint probability of true and visible residue
        joint = np.full((len(frequencies), max(residues, len(frequencies))), self.perturb_percent / (residues - 1))
        np.fill_diagonal(joint, unchanged)
        joint *= frequencies[:, None]
        nonzero = joint > 0
        visible = np.broadcast_to(joint.sum(0), joint.shape)
        loss = -(joint[nonzero] * np.log(joint[nonzero] / visible[nonzero])).sum()
        present = frequencies[frequencies > 0]
        return float(loss - self.mask_percent * (present * np.log(present)).sum())

    def optimal_mock_loss(self, batches: Iterable[PackedBatch]) -> float:
        """Return the lowest possible loss, in nats per target, on masked batches of the mock language."""
        corruption = Corruption(
            self.modify_percent, self.mask_percent, self.perturb_percent, len(self.alphabet.residue_ids) - 1
        )
        letter_of = np.array([ord(token) if len(token) == 1 else MASKED for token in self.alphabet.tokens], np.int16)
        visible, is_target, true, lengths = [], [], [], []
        for batch in batches:
            tokens = batch.tokens[: batch.num_tokens].numpy()
            residues = (tokens != self.alphabet.bos_id) & (tokens != self.alphabet.eos_id)
            targets = np.zeros(len(tokens), bool)
            targets[batch.target_positions.numpy()] = True
            visible.append(letter_of[tokens[residues]])
            is_target.append(targets[residues])
            true.append(letter_of[batch.target_ids.numpy()])
            lengths.append(np.array(batch.lengths) - 2)
        posteriors = language().posteriors(
            np.concatenate(visible), np.concatenate(is_target), np.concatenate(lengths), corruption
        )
        rank = np.searchsorted(np.frombuffer(AMINO_ACIDS.encode(), np.uint8), np.concatenate(true))
        return float(-np.log(posteriors[np.arange(len(rank)), rank]).mean())

    def _select_one_target(self, bits: RandomBits, key: np.uint64) -> None:
        """Make the token with the lowest bits a target: replace its bits by new ones scaled below the threshold."""
        lowest = bits.argmin()
        if bits[lowest] != _NEVER:
            new = int(draw(np.array([key]), len(bits))[0])
            bits[lowest] = new * int(self._threshold(1)) >> 64

    def _replace(self, target_ids: NDArray[np.integer[Any]], bits: RandomBits) -> NDArray[np.integer[Any]]:
        """Return the ids that replace the targets [m], selected by the same bits as the targets."""
        masked = bits < self._threshold(self.mask_percent)
        perturbed = ~masked & (bits < self._threshold(self.mask_percent + self.perturb_percent))
        replaced = np.where(masked, np.uint8(self.alphabet.mask_id), target_ids)
        replaced[perturbed] = self._draw_other(target_ids[perturbed], bits[perturbed])
        return replaced

    def _draw_other(self, target_ids: NDArray[np.integer[Any]], bits: RandomBits) -> NDArray[np.uint8]:
        """Draw a residue other than the target from the lower half of the bits."""
        residues, rank = self.alphabet.residue_ids, self._rank[target_ids]
        choice = integers_below(bits << np.uint64(32), len(residues) - (rank < len(residues)))
        return residues[choice + (choice >= rank)]

    @cached_property
    def _rank(self) -> NDArray[np.int64]:
        """Index of every token id among the residues, int64 [256]; the number of residues for other tokens."""
        rank = np.full(256, len(self.alphabet.residue_ids))
        rank[self.alphabet.residue_ids] = np.arange(len(self.alphabet.residue_ids))
        return rank

    def _threshold(self, fraction: float) -> np.uint64:
        """Return the upper bound of the bits of the first `fraction` of the targets."""
        return np.uint64(min(round(self.modify_percent * fraction * 2**64), 2**64 - 1))


class MaskedDataset(ProteinDataset):
    """Proteins with BOS and EOS and masked residues."""

    has_bos_eos = True

    def __init__(self, split: Split, alphabet: Alphabet, max_tokens: int, masker: ResidueMasker) -> None:
        super().__init__(split, alphabet, max_tokens)
        self.masker, self.lengths, self.max_lengths = masker, self.token_counts, MaxLengths(max_tokens)

    @classmethod
    def open(cls, config: EncoderConfig, vocabulary: Alphabet, name: SplitName) -> "MaskedDataset":
        """See DatasetFactory."""
        data = config.data
        masker = ResidueMasker(
            vocabulary, data.modify_percent, data.mask_percent, data.perturb_percent, data.mask_special_tokens
        )
        split = (open_mixture if data.mixture else open_split)(data, name, config.seq_length - 2, vocabulary)
        return cls(split, vocabulary, config.seq_length, masker)

    def tokenize(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> TokenizedBatch:
        """See Dataset."""
        sequences, unknown = self.read_tokens(epochs, records)
        positions, target_ids = self.masker(sequences.ids, self.keys("mask", epochs, records), sequences.lengths)
        sequences = replace(sequences, dropout_keys=self.keys("dropout", epochs, records))
        return TokenizedBatch(sequences, positions, target_ids, unknown)

    @staticmethod
    def reference_losses(
        train: "MaskedDataset", val: "MaskedDataset", batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """See DatasetFactory; for the mock language this includes the lowest loss possible for the masks in use."""
        references = {"residue frequencies alone": val.masker.unigram_loss(train.split.letter_frequencies)}
        if isinstance(val.split.source, MockSource) and not val.masker.mask_special_tokens:
            references["best possible"] = val.masker.optimal_mock_loss(batches)
        return references
