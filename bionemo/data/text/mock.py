# SPDX-License-Identifier: Apache-2.0
"""An endless synthetic text, over any vocabulary, whose best possible loss is known exactly.

After a word comes with a fixed chance the one word that follows it in a random cycle through all words, or a word
drawn by a law like Zipf's; every token ends its document with a fixed chance, and a new document begins with a drawn
word. So a token tells all that can be known of the next, and the best loss is the mean of -log P(next | token).

A word is either drawn or so many steps behind one that was, hence any token is a function of a few random bits from
before it: the text is read anywhere without what comes before.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import draw_at, permute, purpose_key
from bionemo.data.dataset import Tokens
from bionemo.tokenizers.gpt2 import id_dtype

_UNIT = 1 << 16  # all chances are whole multiples of 1 / _UNIT: what is drawn is as exact as the optimum
_END = _UNIT // 256  # that a token ends its document
_FOLLOW = _UNIT * 5 // 8  # that a word is followed by the next in the cycle
_ZIPF = 1.5  # exponent; 1, as in natural text, would take a small model days to learn
_LOOK_BACK = 64  # tokens before the first wanted among which a drawn one is looked for, at first
_AT_ONCE = 1 << 15  # tokens: what is computed from them stays in the cache


@dataclass(frozen=True)
class MockLanguage:
    """The language of a vocabulary; see `language`.

    Attributes:
        vocab_size: number of tokens; all but one are words.
        eod_id: the token that ends a document.
    """

    vocab_size: int
    eod_id: int

    @cached_property
    def cycle(self) -> NDArray[np.integer[Any]]:
        """Words in the order in which they follow one another [vocab_size - 1]; behind the last comes the first."""
        words = permute(np.arange(self.vocab_size - 1), self.vocab_size - 1, purpose_key(0, "mock text"))
        return (words + (words >= self.eod_id)).astype(id_dtype(self.vocab_size))

    @cached_property
    def drawn(self) -> NDArray[np.int32]:
        """Places in the cycle of words that are drawn, each as often as its chance in 1 / _UNIT [_UNIT]."""
        weights = np.arange(1, self.vocab_size) ** -_ZIPF
        bounds = np.rint(weights.cumsum() / weights.sum() * _UNIT).astype(np.int64)
        places = permute(np.arange(self.vocab_size - 1), self.vocab_size - 1, purpose_key(0, "mock text ranks"))
        return np.repeat(places, np.diff(bounds, prepend=0)).astype(np.int32)

    @cached_property
    def _chances(self) -> NDArray[np.float64]:
        """How likely each place in the cycle is drawn, where a word is [vocab_size - 1]."""
        return np.bincount(self.drawn, minlength=self.vocab_size - 1) / _UNIT

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Place of each id in the cycle; of the end of a document, none."""
        places = np.full(self.vocab_size, -2)
        places[self.cycle] = np.arange(self.vocab_size - 1)
        return places

    def probabilities(
        self, tokens: NDArray[np.integer[Any]], following: NDArray[np.integer[Any]]
    ) -> NDArray[np.float64]:
        """P(next | token) of pairs [n] of successive tokens."""
        after, place = self._places[tokens], self._places[following]
        end, follow = _END / _UNIT, _FOLLOW / _UNIT
        begins = tokens == self.eod_id
        drawn = np.where(begins, 1 - end, 1 - end - follow) * self._chances[place]
        word = drawn + follow * (~begins & (place == (after + 1) % (self.vocab_size - 1)))
        return np.where(following == self.eod_id, end, word)

    def optimal_loss(self, tokens: Tokens) -> float:
        """Mean nats of the best possible predictor on samples of the language, over the tokens that are asked.

        Raises:
            ValueError: when none is.
        """
        if not len(tokens.target_index):
            raise ValueError("no token is asked")
        return self.nats(tokens.inputs.ids[tokens.target_index], tokens.target_ids) / len(tokens.target_index)

    def nats(self, tokens: NDArray[np.integer[Any]], following: NDArray[np.integer[Any]]) -> float:
        """Nats of the best possible predictor over pairs [n] of successive tokens, summed."""
        return float(-np.log(self.probabilities(tokens, following)).sum())

    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows the frequencies of tokens and nothing else."""
        end, follow = _END / _UNIT, _FOLLOW / _UNIT
        drawn = (end * (1 - end) + (1 - end) * (1 - end - follow)) * self._chances
        words = np.zeros_like(drawn)
        while drawn.sum() > 1e-18:  # words drawn, then those one step behind a drawn one, two steps, ...
            words += drawn
            drawn = follow * np.roll(drawn, 1)
        shares = np.append(words[words > 0], end)
        return float(-(shares * np.log(shares)).sum())


@cache
def language(vocab_size: int, eod_id: int) -> MockLanguage:
    """The language of a vocabulary, the same for every seed.

    Raises:
        UserError: without a word beside the end of a document.
    """
    if not 0 <= eod_id < vocab_size or vocab_size < 3:
        raise UserError(f"mock text: a vocabulary of {vocab_size} with the end {eod_id}: it needs at least two words")
    return MockLanguage(vocab_size, eod_id)


class MockText:
    """Text of the language, made on demand: a `TokenStream` that needs no file, and has no end.

    A token follows from (seed, split, its number) alone.

    Attributes:
        name: what the user calls it.
        size: tokens of a pass; what is read behind them is new text.
        language: of the text.
        identity: what tells it from others.
    """

    def __init__(self, vocab_size: int, eod_id: int, num_samples: int, seq_length: int, seed: int, split: str) -> None:
        """Make room for `num_samples` samples of `seq_length` tokens.

        Raises:
            UserError: when there is none.
        """
        if num_samples < 1:
            raise UserError(f"mock text: num_samples is {num_samples}: ask for at least one sample")
        self.name, self.size = f"mock text ({split})", num_samples * seq_length + 1
        self.language = language(vocab_size, eod_id)
        self._key = purpose_key(seed, f"mock text {split}")
        about = {"vocab_size": vocab_size, "eod_id": eod_id, "size": self.size, "seed": seed, "split": split}
        self.identity: dict[str, Any] = {"mock_text": about}

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        """Tokens [k, count] from each of the starts [k] on."""
        found = np.empty((len(starts), count), id_dtype(self.language.vocab_size))
        rows = max(1, _AT_ONCE // (count + _LOOK_BACK))
        for parity in (0, 1):  # a random word makes two tokens
            chosen = np.flatnonzero(starts % 2 == parity)
            for first in range(0, len(chosen), rows):
                here = chosen[first : first + rows]
                found[here] = self._make(starts[here], count, _LOOK_BACK + parity)
        return found

    def _make(self, starts: NDArray[np.int64], count: int, before: int) -> NDArray[np.integer[Any]]:
        """Tokens [k, count], from random bits of them and of so many tokens before, the first of which is even."""
        words = (before + count + 1) // 2
        bits = draw_at(self._key, (starts[:, None] - before) // 2 + np.arange(words)).view(np.uint32)
        kind, choice = bits & (_UNIT - 1), bits >> np.uint32(16)
        ends = kind < _END
        anchored = kind < _UNIT - _FOLLOW  # ends, and words that are drawn; the others follow the word before
        anchored[:, 1:] |= ends[:, :-1]
        numbers = np.arange(anchored.size, dtype=np.int32).reshape(anchored.shape)
        anchors = np.maximum.accumulate(np.where(anchored, numbers, -1), axis=1)
        if (anchors[:, before] < numbers[:, 0]).any():  # nothing drawn in reach
            return self._make(starts, count, before + _LOOK_BACK)
        wanted = slice(before, before + count)
        anchor = anchors[:, wanted]
        places = self.language.drawn[choice.ravel()[anchor]] + (numbers[:, wanted] - anchor)
        found = self.language.cycle[places % len(self.language.cycle)]
        found[ends[:, wanted]] = self.language.eod_id
        return found
