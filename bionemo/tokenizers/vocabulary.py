# SPDX-License-Identifier: Apache-2.0
"""What models need to know of a tokenizer, whatever it cuts into tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Vocabulary(ABC):
    """The tokens of a model.

    Attributes:
        pad_id: fills the unused tail of a batch.
    """

    pad_id: int

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, before any padding of the embedding table."""

    @property
    @abstractmethod
    def identity(self) -> list[str]:
        """What tells this vocabulary from another, for checkpoints."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Ids of one text, [n], without begin and end."""

    def padded_vocab_size(self, divisor: int) -> int:
        """Rows of an embedding table that must divide evenly by ``divisor``."""
        return -(-self.vocab_size // divisor) * divisor


@dataclass(frozen=True)
class TokenTable(Vocabulary):
    """A fixed list of tokens, some of them special.

    Attributes:
        tokens: text of every token; the id is the position.
        bos_id: put before a sequence.
        eos_id: put after a sequence.
        pad_id: fills the unused tail of a batch.
        mask_id: hides a token, or several.
        unk_id: stands for what has no token.
    """

    tokens: tuple[str, ...]
    bos_id: int
    eos_id: int
    pad_id: int
    mask_id: int
    unk_id: int

    @property
    def vocab_size(self) -> int:
        """Number of tokens, before any padding of the embedding table."""
        return len(self.tokens)

    @property
    def identity(self) -> list[str]:
        """The tokens, in the order of their ids."""
        return list(self.tokens)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids`` [n], special tokens included; an id outside the vocabulary is an ``IndexError``."""
        return "".join(self.tokens[i] for i in ids)
