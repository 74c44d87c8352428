# SPDX-License-Identifier: Apache-2.0
"""Hidden Markov models of sequences, and the best that can be known of a residue that was hidden.

The forward-backward recursion (Rabiner 1989, eq. 19-27) gives the posterior of every hidden residue, hence the loss
that no model can beat.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MASKED = -1  # a residue that the corrupted sequence does not show


@dataclass(frozen=True)
class Corruption:
    """How the masked-language objective hides residues, the fractions (0 to 1) named as in ``model.data``.

    Attributes:
        modify_percent: chance that a residue is asked for, drawn residue by residue.
        mask_percent: chance that an asked residue is shown as ``<mask>``.
        perturb_percent: chance that it is shown as another residue token; what is left of 1: it is shown as it is.
        alternatives: how many other tokens a perturbation draws from: ``len(alphabet.residue_ids) - 1``.
    """

    modify_percent: float
    mask_percent: float
    perturb_percent: float
    alternatives: int

    @property
    def identity_percent(self) -> float:
        """Chance that an asked residue is shown as it is."""
        return 1 - self.mask_percent - self.perturb_percent


@dataclass(frozen=True, eq=False)
class HiddenMarkov:
    """A stationary hidden Markov model over letters, its probabilities whole multiples of 1/256.

    So one random byte picks a next state or a letter from a table, and sampling is as exact as the optimum.

    Attributes:
        letters: the k letters that states emit.
        steps: transitions in 256ths, int [s, s], rows sum to 256.
        emits: letters in 256ths, int [s, k], rows sum to 256.
    """

    letters: str
    steps: NDArray[np.int64]
    emits: NDArray[np.int64]

    @cached_property
    def start(self) -> NDArray[np.float64]:
        """Stationary distribution [s], that of the first residue too: any crop of a sequence has the same law."""
        balance = np.vstack([self.transition.T - np.eye(len(self.steps)), np.ones(len(self.steps))])
        return np.linalg.lstsq(balance, np.eye(len(balance))[-1], rcond=None)[0].clip(0)

    @property
    def transition(self) -> NDArray[np.float64]:
        """Probability of the next state [s, s]."""
        return self.steps / 256

    @property
    def emission(self) -> NDArray[np.float64]:
        """Probability of every letter [s, k]."""
        return self.emits / 256

    def unigram_entropy(self) -> float:
        """Nats per residue of a model that knows the frequencies of letters and nothing else."""
        frequency = self.start @ self.emission
        return float(-(frequency * np.log(frequency)).sum())

    def sample(self, words: NDArray[np.uint64], length: int) -> NDArray[np.uint8]:
        """Draw ``length`` letters for each of b sequences, ASCII [b, length].

        Args:
            words: random bits [b, >= 1 + length / 4]: one word for the first state, then two bytes per residue.
            length: residues per sequence; a shorter draw from the same words is a prefix of a longer one.
        """
        next_state, letter = self._tables
        state = np.searchsorted(self.start.cumsum()[:-1], (words[:, 0] >> np.uint64(11)) * 2.0**-53, side="right")
        noise = np.ascontiguousarray(words[:, 1:].view(np.uint16)[:, :length].T)
        step_byte, letter_byte = noise & 255, noise >> 8
        index, states = np.empty_like(noise), state.astype(np.uint16) << 8
        for t in range(length):
            index[t] = states
            states = next_state[states | step_byte[t]]
        return letter[index | letter_byte].T

    @cached_property
    def _tables(self) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """The outcome of every (state, byte) pair, [s * 256] each: the next state shifted by 8, and a letter."""
        states = np.arange(len(self.steps), dtype=np.uint16) << 8
        letters = np.frombuffer(self.letters.encode(), np.uint8)
        return (
            np.concatenate([np.repeat(states, row) for row in self.steps]),
            np.concatenate([np.repeat(letters, row) for row in self.emits]),
        )

    def posteriors(
        self,
        shown: NDArray[np.int16],
        asked: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        corruption: Corruption,
    ) -> NDArray[np.float64]:
        """Best possible prediction of every asked residue of packed sequences, [number asked, k].

        A model sees y, not which letters of y are corrupted, and its answer at i counts only where i was asked. The
        expected loss is smallest at p(x_i | y, i asked), that is, with hidden states s and corruption independent
        between residues,

            p(x_i = a | y, i asked)  ~  c(y_i | a) * sum_s e(a | s) * sum_{z: z_i = s} p(z) prod_{j != i} l(y_j | z_j)

        where the sum over state paths z is the product of forward prediction and backward message at i, without y_i's
        own evidence. With m, q_mask, q_perturb, q_identity the fractions and K the alternatives,

            asked:        c(y | a) = q_identity if y = a, else q_perturb / K; the same for all a if y is <mask>
            asked or not: l(y | z) = sum_a e(a | z) * (1 - m + m q_identity if y = a, else m q_perturb / K)

        A <mask>, or a letter that the language never emits (a perturbation that gives itself away), says nothing.

        Args:
            shown: ASCII of the corrupted residues, or ``MASKED``, [n].
            asked: residues that the loss is taken at [n].
            lengths: residues per sequence, summing to n.
            corruption: how ``shown`` was made.
        """
        size = len(self.letters)
        code_of = np.full(257, size, np.intp)  # the last code says nothing; index -1 is MASKED
        code_of[list(self.letters.encode())] = np.arange(size)
        code = code_of[shown]
        evidence, channel = self._visible(corruption)
        found = np.empty((np.count_nonzero(asked), size))
        done = begin = 0
        for first in range(0, len(lengths), 64):  # bounds memory: states x residues x 64 float64
            count = lengths[first : first + 64]
            row = np.repeat(np.arange(len(count)), count)
            column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
            part = slice(begin, begin := begin + len(row))
            padded = np.full((count.max(), len(count)), size)
            padded[column, row] = code[part]
            want = asked[part]
            states = self._without_own_evidence(evidence[padded])[column[want], row[want]]
            weight = (states @ self.emission) * channel[code[part][want]]
            found[done : (done := done + len(weight))] = weight / weight.sum(axis=1, keepdims=True)
        return found

    def _visible(self, corruption: Corruption) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The l(y | z) [k + 1, s] and c(y | a) [k + 1, k] of ``posteriors``; the last y says nothing."""
        size, share = len(self.letters), corruption.modify_percent
        other = corruption.perturb_percent / corruption.alternatives
        kept = 1 - share + share * corruption.identity_percent
        evidence = self.emission.T * kept + (1 - self.emission.T) * share * other
        channel = np.full((size, size), other)
        np.fill_diagonal(channel, corruption.identity_percent)
        return np.vstack([evidence, np.ones(len(self.steps))]), np.vstack([channel, np.ones(size)])

    def _without_own_evidence(self, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weight of every state at t given the evidence [t, b, s] at all other times, [t, b, s], scaled freely.

        Ones past the end of a sequence change nothing: the rows of the transition matrix sum to 1.
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
