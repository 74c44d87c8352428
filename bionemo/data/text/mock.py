# SPDX-License-Identifier: Apache-2.0
"""Synthetic text over any vocabulary whose lowest possible loss is known exactly.

A word is followed, with fixed probability, by its successor in a random cycle through all words, and otherwise by a
word drawn from a Zipf-like distribution. Every token ends its document with fixed probability, and a new document
begins with a drawn word. The lowest possible loss is therefore the mean of -log P(next | token).

Every token is drawn, or a number of steps in the cycle after the last drawn one. It depends on a few random bits
before it, so the text has random access.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import draw_at, permute, purpose_key
from bionemo.tokenizers.gpt2 import id_dtype

_UNIT = 1 << 16  # all probabilities are multiples of 1 / _UNIT, so that text and lowest loss agree exactly
_END = _UNIT // 256  # probability times _UNIT that a document ends
_FOLLOW = _UNIT * 5 // 8  # probability times _UNIT that a word is followed by its successor in the cycle
_ZIPF = 1.5  # exponent; with 1, as in natural text, training a small model would take days
_LOOK_BACK = 64  # tokens before the requested ones that are searched for a drawn word at first
_TOKENS_PER_CHUNK = 1 << 15  # tokens generated at a time, so that temporary arrays stay in the CPU cache


@dataclass(frozen=True)
class MockLanguage:
    """Distribution of the synthetic text; see `language`."""

    vocab_size: int  # number of tokens; all but one are words
    eod_id: int  # id of the end-of-document token

    @cached_property
    def cycle(self) -> NDArray[np.integer[Any]]:
        """Words in the order of the cycle, [vocab_size - 1]."""
        words = permute(np.arange(self.vocab_size - 1), self.vocab_size - 1, purpose_key(0, "mock text"))
        return (words + (words >= self.eod_id)).astype(id_dtype(self.vocab_size))

    @cached_property
    def drawn(self) -> NDArray[np.int32]:
        """Positions in the cycle of drawn words, each repeated as often as its probability times _UNIT, [_UNIT]."""
        weights = np.arange(1, self.vocab_size) ** -_ZIPF
        bounds = np.rint(weights.cumsum() / weights.sum() * _UNIT).astype(np.int64)
        positions = permute(np.arange(self.vocab_size - 1), self.vocab_size - 1, purpose_key(0, "mock text ranks"))
        return np.repeat(positions, np.diff(bounds, prepend=0)).astype(np.int32)

    @cached_property
    def _draw_probabilities(self) -> NDArray[np.float64]:
        """Probability that each position in the cycle is drawn, [vocab_size - 1]."""
        return np.bincount(self.drawn, minlength=self.vocab_size - 1) / _UNIT

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        """Position of each id in the cycle; -2 for the end-of-document token."""
        positions = np.full(self.vocab_size, -2)
        positions[self.cycle] = np.arange(self.vocab_size - 1)
        return positions

    def total_loss(self, tokens: NDArray[np.integer[Any]], next_tokens: NDArray[np.integer[Any]]) -> float:
        """Return the sum of -log P(next | token) over pairs [n] of successive tokens, in nats."""
        position, next_position = self._positions[tokens], self._positions[next_tokens]
        end, follow = _END / _UNIT, _FOLLOW / _UNIT
        is_start = tokens == self.eod_id
        drawn = np.where(is_start, 1 - end, 1 - end - follow) * self._draw_probabilities[next_position]
        word = drawn + follow * (~is_start & (next_position == (position + 1) % (self.vocab_size - 1)))
        return float(-np.log(np.where(next_tokens == self.eod_id, end, word)).sum())

    def unigram_entropy(self) -> float:
        """Return the entropy of the token frequencies in nats."""
        end, follow = _END / _UNIT, _FOLLOW / _UNIT
        current = (end * (1 - end) + (1 - end) * (1 - end - follow)) * self._draw_probabilities
        frequencies = np.zeros_like(current)
        while current.sum() > 1e-18:  # words that are 0, 1, 2, ... steps after a drawn one
            frequencies += current
            current = follow * np.roll(current, 1)
        frequencies = np.append(frequencies[frequencies > 0], end)
        return float(-(frequencies * np.log(frequencies)).sum())


@cache
def language(vocab_size: int, eod_id: int) -> MockLanguage:
    """Return the language of a vocabulary; it does not depend on the seed.

    Raises:
        UserError: if there are fewer than two words beside the end-of-document token.
    """
    if not 0 <= eod_id < vocab_size or vocab_size < 3:
        raise UserError(f"mock text: vocabulary of {vocab_size} with EOD id {eod_id}: it needs at least two words")
    return MockLanguage(vocab_size, eod_id)


class MockText:
    """A `TokenStream` of synthetic text that is generated on demand and has no end.

    A token depends only on seed, split and its number.
    """

    def __init__(self, vocab_size: int, eod_id: int, num_samples: int, seq_length: int, seed: int, split: str) -> None:
        """Define text for `num_samples` (at least 1) samples of `seq_length` tokens."""
        self.name, self.size = f"mock text ({split})", num_samples * seq_length + 1
        self.language = language(vocab_size, eod_id)
        self._key = purpose_key(seed, f"mock text {split}")
        settings = {"vocab_size": vocab_size, "eod_id": eod_id, "size": self.size, "seed": seed, "split": split}
        self.fingerprint: dict[str, Any] = {"mock_text": settings}

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        """Return tokens [k, count] from each start [k]."""
        tokens = np.empty((len(starts), count), id_dtype(self.language.vocab_size))
        rows = max(1, _TOKENS_PER_CHUNK // (count + _LOOK_BACK))
        for parity in (0, 1):  # 64 random bits are used for two tokens
            selected = np.flatnonzero(starts % 2 == parity)
            for first in range(0, len(selected), rows):
                chunk = selected[first : first + rows]
                tokens[chunk] = self._generate(starts[chunk], count, _LOOK_BACK + parity)
        return tokens

    def _generate(self, starts: NDArray[np.int64], count: int, before: int) -> NDArray[np.integer[Any]]:
        """Return tokens [k, count], from random bits that start `before` tokens earlier, at an even position."""
        counters = (starts[:, None] - before) // 2 + np.arange((before + count + 1) // 2)
        bits = draw_at(self._key, counters).view(np.uint32)
        kind, choice = bits & (_UNIT - 1), bits >> np.uint32(16)
        is_end = kind < _END
        is_anchor = kind < _UNIT - _FOLLOW  # ends and drawn words; other words follow the previous one
        is_anchor[:, 1:] |= is_end[:, :-1]
        numbers = np.arange(is_anchor.size, dtype=np.int32).reshape(is_anchor.shape)
        anchors = np.maximum.accumulate(np.where(is_anchor, numbers, -1), axis=1)
        if (anchors[:, before] < numbers[:, 0]).any():  # a row has no anchor before the first requested token
            return self._generate(starts, count, before + _LOOK_BACK)
        requested = slice(before, before + count)
        anchor = anchors[:, requested]
        positions = self.language.drawn[choice.ravel()[anchor]] + (numbers[:, requested] - anchor)
        tokens = self.language.cycle[positions % len(self.language.cycle)]
        tokens[is_end[:, requested]] = self.language.eod_id
        return tokens
