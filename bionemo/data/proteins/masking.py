# SPDX-License-Identifier: Apache-2.0
"""The masked-language objective: which residues are asked, and what stands in their place (Devlin et al. 2019).

Each residue is asked with probability `modify_percent`. Of the asked, `mask_percent` become <mask>, `perturb_percent`
become a random other residue and `identity_percent` stay as they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import Words, below, draw, draw_runs, purpose_key, sample_keys
from bionemo.config.schema import EncoderConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import RowSize, Tokens
from bionemo.data.files import SplitName
from bionemo.data.proteins.hidden_markov import MASKED, Corruption
from bionemo.data.proteins.mock import MockSource, best_loss
from bionemo.data.proteins.residues import ProteinSamples, Residues
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
        self, tokens: NDArray[np.integer[Any]], keys: Words, lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
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

    def loss_of_frequencies(self, shares: NDArray[np.floating[Any]]) -> float:
        """Nats per asked residue of a predictor that knows the residues' frequencies [k], and what it is shown there.

        Of a mask it can say no more than the frequencies; a residue that is shown is the true one or another.
        """
        residues = len(self.alphabet.residue_ids)  # of which some may never occur, but are shown
        same = 1 - self.mask_percent - self.perturb_percent
        shown = np.full((len(shares), max(residues, len(shares))), self.perturb_percent / (residues - 1))
        np.fill_diagonal(shown, same)
        shown *= shares[:, None]  # of the true and the shown one together
        known = shown > 0
        total = np.broadcast_to(shown.sum(0), shown.shape)
        visible = -(shown[known] * np.log(shown[known] / total[known])).sum()
        held = shares[shares > 0]
        return float(visible - self.mask_percent * (held * np.log(held)).sum())

    def lowest_loss(self, batches: Iterable[PackedBatch]) -> float:
        """Nats per asked residue of the best possible predictor, on masked batches of the mock language."""
        others = len(self.alphabet.residue_ids) - 1
        corruption = Corruption(self.modify_percent, self.mask_percent, self.perturb_percent, others)
        letter_of = np.array([ord(token) if len(token) == 1 else MASKED for token in self.alphabet.tokens], np.int16)
        shown, asked, truth, lengths = [], [], [], []
        for batch in batches:
            tokens = batch.tokens[: batch.num_tokens].numpy()
            inner = (tokens != self.alphabet.bos_id) & (tokens != self.alphabet.eos_id)
            is_asked = np.zeros(len(tokens), bool)
            is_asked[batch.target_index.numpy()] = True
            shown.append(letter_of[tokens[inner]])
            asked.append(is_asked[inner])
            truth.append(letter_of[batch.target_ids.numpy()])
            lengths.append(np.array(batch.lengths) - 2)
        return best_loss(
            np.concatenate(shown), np.concatenate(asked), np.concatenate(truth), np.concatenate(lengths), corruption
        )

    def _ask_one(self, words: Words, key: np.uint64) -> None:
        """Ask the token of the lowest word of a sequence: it gets the next word, scaled to lie below the threshold."""
        lowest = words.argmin()
        if words[lowest] != _NEVER:
            word = int(draw(np.array([key]), len(words))[0])
            words[lowest] = word * int(self._threshold(1)) >> 64

    def _replacements(self, answers: NDArray[np.integer[Any]], words: Words) -> NDArray[np.integer[Any]]:
        """Choose what stands in the place of the asked tokens [m]; the word that asked also says what."""
        masked = words < self._threshold(self.mask_percent)
        perturbed = ~masked & (words < self._threshold(self.mask_percent + self.perturb_percent))
        shown = np.where(masked, np.uint8(self.alphabet.mask_id), answers)
        shown[perturbed] = self._others(answers[perturbed], words[perturbed])
        return shown

    def _others(self, answers: NDArray[np.integer[Any]], words: Words) -> NDArray[np.uint8]:
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


@dataclass(frozen=True)
class MaskedSamples(ProteinSamples):
    """Proteins, each with a begin and an end token, some of their residues hidden."""

    masking: Masking

    @classmethod
    def open(cls, config: EncoderConfig, vocabulary: Alphabet, name: SplitName) -> "MaskedSamples":
        """Open a split; see Samples."""
        data = config.data
        residues = Residues.open(data, vocabulary, name, config.seq_length, ends=True)
        masking = Masking(
            vocabulary, data.modify_percent, data.mask_percent, data.perturb_percent, data.mask_special_tokens
        )
        return cls(residues, masking)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every record."""
        return self.counted

    @property
    def row(self) -> RowSize:
        """Tokens of a row."""
        return RowSize(self.residues.longest)

    def build(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Tokens:
        """Tokenise and mask; see Samples."""
        sequences, unknown = self.residues.tokens(epochs, records)
        keys = sample_keys(purpose_key(self.residues.seed, "mask"), epochs, records)
        index, answers = self.masking(sequences.ids, keys, sequences.lengths)
        dropout = sample_keys(purpose_key(self.residues.seed, "dropout"), epochs, records)
        return Tokens(sequences, index, answers, dropout, unknown)

    @staticmethod
    def reference_losses(
        train: "MaskedSamples", val: "MaskedSamples", batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """What the residues' frequencies alone give; on the mock language also the lowest that any model can reach.

        The latter for exactly the masks that validation uses.
        """
        references = {"residue frequencies alone": val.masking.loss_of_frequencies(train.residues.split.shares)}
        if isinstance(val.residues.split.source, MockSource):
            references["best possible"] = val.masking.lowest_loss(batches)
        return references
