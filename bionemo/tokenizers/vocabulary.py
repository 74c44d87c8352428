# SPDX-License-Identifier: Apache-2.0
"""What models need to know of a tokenizer, whatever it cuts into tokens."""

from abc import ABC, abstractmethod


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

    def padded_vocab_size(self, divisor: int) -> int:
        """Rows of an embedding table that must divide evenly by `divisor`."""
        return -(-self.vocab_size // divisor) * divisor
