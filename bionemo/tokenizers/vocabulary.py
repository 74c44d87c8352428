# SPDX-License-Identifier: Apache-2.0
"""What all vocabularies have: numbered tokens, some of which stand for no text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Vocabulary:
    """A fixed list of tokens.

    Attributes:
        tokens: text of every token; the id is the position.
        bos_id: put before a sequence.
        eos_id: put after a sequence.
        pad_id: fills the unused tail of a batch.
        mask_id: hides a token.
        unk_id: stands for text that has no token.
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

    def padded_vocab_size(self, divisor: int) -> int:
        """Rows of an embedding table that must divide evenly by ``divisor``."""
        return -(-self.vocab_size // divisor) * divisor

    def decode(self, ids: NDArray[np.integer]) -> str:
        """Text of ``ids`` [n], special tokens included; an id outside the vocabulary is an ``IndexError``."""
        return "".join(self.tokens[i] for i in ids)
