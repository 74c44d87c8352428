# SPDX-License-Identifier: Apache-2.0
"""Hidden Markov models of sequences, and the exact posterior of masked residues.

The forward-backward algorithm (Rabiner 1989, eq. 19-27) gives the posterior of every target residue, and therefore
the lowest loss that any model can reach.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MASKED = -1  # code of <mask> in corrupted sequences
_BATCH = 64  # sequences processed together; limits memory to states x residues x 64 float64


@dataclass(frozen=True)
class Corruption:
    """Probabilities with which masked language modelling changes residues, named as in ``model.data``."""

    modify_percent: float  # probability that a residue is a target
    mask_percent: float  # probability that a target is shown as <mask>
    perturb_percent: float  # probability that a target is shown as another residue
    alternatives: int  # number of other residues, ``len(alphabet.residue_ids) - 1``

    @property
    def identity_percent(self) -> float:
        """Probability that a target is shown unchanged."""
        return 1 - self.mask_percent - self.perturb_percent


@dataclass(frozen=True, eq=False)
class HiddenMarkovModel:
    """A stationary hidden Markov model over letters.

    All probabilities are multiples of 1/256, so one random byte selects a state or a letter from a table, and samples
    follow exactly the distribution of which the optimum is computed.
    """

    letters: str  # the k letters
    transition_counts: NDArray[np.int64]  # transition probabilities times 256, int [s, s]
    emission_counts: NDArray[np.int64]  # emission probabilities times 256, int [s, k]

    @cached_property
    def start(self) -> NDArray[np.float64]:
        """Stationary distribution of the states [s], also used for the first residue."""
        size = len(self.transition_counts)
        balance = np.vstack([self.transition.T - np.eye(size), np.ones(size)])
        return np.linalg.lstsq(balance, np.eye(len(balance))[-1], rcond=None)[0].clip(0)

    @property
    def transition(self) -> NDArray[np.float64]:
        """Transition probabilities [s, s]."""
        return self.transition_counts / 256

    @property
    def emission(self) -> NDArray[np.float64]:
        """Emission probabilities [s, k]."""
        return self.emission_counts / 256

    def sample(self, bits: NDArray[np.uint64], length: int) -> NDArray[np.uint8]:
        """Sample sequences, ASCII [b, length].

        Args:
            bits: random bits [b, >= 1 + length / 4]: 64 for the first state, then two bytes per residue.
            length: residues per sequence; shorter samples are prefixes of longer ones.
        """
        next_state, letter = self._tables
        state = np.searchsorted(self.start.cumsum()[:-1], (bits[:, 0] >> np.uint64(11)) * 2.0**-53, side="right")
        noise = np.ascontiguousarray(bits[:, 1:].view(np.uint16)[:, :length].T)
        transition_byte, letter_byte = noise & 255, noise >> 8
        index, states = np.empty_like(noise), state.astype(np.uint16) << 8
        for t in range(length):
            index[t] = states
            states = next_state[states | transition_byte[t]]
        return letter[index | letter_byte].T

    @cached_property
    def _tables(self) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """Next state, shifted by 8 bits, and letter for every pair of state and byte, [s * 256] each."""
        states = np.arange(len(self.transition_counts), dtype=np.uint16) << 8
        letters = np.frombuffer(self.letters.encode(), np.uint8)
        return (
            np.concatenate([np.repeat(states, row) for row in self.transition_counts]),
            np.concatenate([np.repeat(letters, row) for row in self.emission_counts]),
        )

    def posteriors(
        self,
        visible: NDArray[np.int16],
        is_target: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        corruption: Corruption,
    ) -> NDArray[np.float64]:
        """Return the posterior distribution of every target residue, [number of targets, k].

        A model sees y, but not which letters of y are corrupted. With hidden states s, and corruption independent
        between residues, the posterior is

            p(x_i = a | y, i target)  ~  c(y_i | a) * sum_s e(a | s) * sum_{z: z_i = s} p(z) prod_{j != i} l(y_j | z_j)

        where the sum over state paths z is the product of the forward and backward messages at i, without the
        evidence of y_i. With m, q_mask, q_perturb, q_identity the probabilities and K the alternatives,

            target:           c(y | a) = q_identity if y = a, else q_perturb / K; constant if y is <mask>
            target or not:    l(y | z) = sum_a e(a | z) * (1 - m + m q_identity if y = a, else m q_perturb / K)

        <mask>, and letters that the model never emits, carry no information.

        Args:
            visible: ASCII of the corrupted residues, or ``MASKED``, [n]; sequences are concatenated.
            is_target: whether each residue is a target [n].
            lengths: number of residues of each sequence, summing to n.
            corruption: how `visible` was made.
        """
        size = len(self.letters)
        code_of = np.full(257, size, np.intp)  # the last code carries no information; index -1 is MASKED
        code_of[list(self.letters.encode())] = np.arange(size)
        code = code_of[visible]
        evidence, channel = self._likelihoods(corruption)
        posteriors = np.empty((np.count_nonzero(is_target), size))
        done = begin = 0
        for first in range(0, len(lengths), _BATCH):
            count = lengths[first : first + _BATCH]
            row = np.repeat(np.arange(len(count)), count)
            column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
            part = slice(begin, begin := begin + len(row))
            padded = np.full((count.max(), len(count)), size)
            padded[column, row] = code[part]
            targets = is_target[part]
            states = self._exclude_own_evidence(evidence[padded])[column[targets], row[targets]]
            weight = (states @ self.emission) * channel[code[part][targets]]
            posteriors[done : (done := done + len(weight))] = weight / weight.sum(axis=1, keepdims=True)
        return posteriors

    def _likelihoods(self, corruption: Corruption) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return l(y | z) [k + 1, s] and c(y | a) [k + 1, k] of `posteriors`; the last y carries no information."""
        size, modified = len(self.letters), corruption.modify_percent
        other = corruption.perturb_percent / corruption.alternatives
        kept = 1 - modified + modified * corruption.identity_percent
        evidence = self.emission.T * kept + (1 - self.emission.T) * modified * other
        channel = np.full((size, size), other)
        np.fill_diagonal(channel, corruption.identity_percent)
        return np.vstack([evidence, np.ones(len(self.start))]), np.vstack([channel, np.ones(size)])

    def _exclude_own_evidence(self, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return unnormalized weights [t, b, s] of every state given the evidence [t, b, s] at all other times.

        Evidence of 1 after the end of a sequence has no effect, because the rows of the transition matrix sum to 1.
        """
        length = len(evidence)
        forward, backward = np.empty_like(evidence), np.empty_like(evidence)
        forward[:1], backward[-1:] = self.start, 1.0
        for t in range(length - 1):
            forward[t + 1] = (forward[t] * evidence[t]) @ self.transition
            forward[t + 1] /= forward[t + 1].sum(axis=1, keepdims=True)
        for t in range(length - 1, 0, -1):
            backward[t - 1] = (backward[t] * evidence[t]) @ self.transition.T
            backward[t - 1] /= backward[t - 1].sum(axis=1, keepdims=True)
        return forward * backward
