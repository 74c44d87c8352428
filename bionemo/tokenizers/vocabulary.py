# SPDX-License-Identifier: Apache-2.0
"""Base classes of tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Vocabulary(ABC):
    """The tokens of a model."""

    tokens: tuple[str, ...]  # text of every token; the id is the position
    pad_id: int  # id of the padding token

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, without padding of the embedding table."""

    @property
    @abstractmethod
    def identity(self) -> list[str]:
        """Strings that distinguish this vocabulary from others; stored in checkpoints."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the ids of one text, [n], without begin and end tokens."""

    def describe_difference(self, saved: Sequence[str]) -> str:
        """Describe how `identity` differs from another one, which was saved."""
        pairs = enumerate(zip_longest(saved, self.identity, fillvalue="missing"))
        number, (old, new) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        return f"it has {len(saved)} entries, not {len(self.identity)}; entry {number} is {old}, not {new}"

    def padded_vocab_size(self, divisor: int) -> int:
        """Return `vocab_size` rounded up to a multiple of `divisor`."""
        return -(-self.vocab_size // divisor) * divisor


@dataclass(frozen=True)
class TokenTable(Vocabulary):
    """A fixed list of tokens, some of which are special."""

    tokens: tuple[str, ...]  # text of every token; the id is the position
    bos_id: int  # begin token
    eos_id: int  # end token
    pad_id: int  # padding token
    mask_id: int  # mask token
    unk_id: int  # token for unknown text

    @property
    def vocab_size(self) -> int:
        """See Vocabulary."""
        return len(self.tokens)

    @property
    def identity(self) -> list[str]:
        """The tokens in the order of their ids."""
        return list(self.tokens)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids [n], including special tokens; raise IndexError for an unknown id."""
        return "".join(self.tokens[i] for i in ids)
