# SPDX-License-Identifier: Apache-2.0
"""Tokenizer of SMILES: one token per atom in brackets, Br, Cl, ring number such as %10, or other character."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.tokenizers.vocabulary import TokenTable

# MegaMolBART's expression lists the single characters, too. Here every other character is a token, so that none is
# lost. The bound keeps the time linear for a text of opening brackets.
_LONG = r"\[[^\]\r\n]{1,255}\]|Br|Cl|%[0-9]{2}"
_LONG_TOKEN, TOKEN_PATTERN = re.compile(f"({_LONG})"), f"{_LONG}|."
_SEPARATOR = 0xFFFF  # between two SMILES; larger than any id
_SPECIAL = ("<PAD>", "?", "^", "&", "<MASK>", "<SEP>")


def end_at_space(text: str) -> str:
    """Return a SMILES without what follows the first white space: a name, or extensions of CXSMILES."""
    return next(iter(text.split(None, 1)), "")


@dataclass(frozen=True)
class SmilesTokenizer(TokenTable):
    """A vocabulary of SMILES tokens and special tokens.

    The text of a special token is never parsed, because SMILES come from untrusted files: `^` in a SMILES is unknown.
    Each token outside the vocabulary becomes `unk_id`, as does white space.
    """

    @classmethod
    def from_file(cls, path: Path) -> "SmilesTokenizer":
        """Read a vocabulary with one token per line, including MegaMolBART's special tokens."""
        tokens = tuple(path.read_text(encoding="utf-8").splitlines())
        pad_id, unk_id, bos_id, eos_id, mask_id, _ = map(tokens.index, _SPECIAL)
        return cls(tokens, bos_id, eos_id, pad_id, mask_id, unk_id)

    def split(self, text: str) -> list[str]:
        """Split a SMILES into the texts of its tokens, including unknown ones."""
        parts = _LONG_TOKEN.split(text)  # texts between long tokens at even positions, long tokens at odd ones
        return [piece for i, part in enumerate(parts) for piece in ([part] if i % 2 else part)]

    def find_unknown(self, text: str) -> list[str]:
        """Return the tokens of a SMILES that are not in the vocabulary, in order, with repetitions."""
        return [piece for piece in self.split(text) if piece not in self._known]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.tokens) - frozenset(_SPECIAL)

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of one SMILES, uint16 [n], without begin and end tokens."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the ids of N SMILES, concatenated, uint16 [n], and the length of each, int64 [N].

        Every long token is replaced by one letter, then a table gives the ids of all letters. This is five times as
        fast as a dictionary of all tokens.
        """
        if not texts:
            return np.zeros(0, np.uint16), np.zeros(0, np.int64)
        joined = "\n".join(texts)
        if joined.count("\n") >= len(texts):  # some texts contain a line end; \r is unknown as well
            joined = "\n".join(text.replace("\n", "\r") for text in texts)
        if not joined.isascii():  # codes from 128 on represent long tokens
            joined = joined.encode("ascii", "replace").decode()
        parts = _LONG_TOKEN.split(joined)
        letters, unknown = self._letters, chr(128 + self.unk_id)
        parts[1::2] = [letters.get(piece, unknown) for piece in parts[1::2]]
        ids = self._table[np.frombuffer("".join(parts).encode("utf-32-le"), np.uint32)]
        inside = ids != _SEPARATOR
        return ids[inside], np.diff(np.flatnonzero(~inside), prepend=-1, append=len(ids)) - 1

    @cached_property
    def _letters(self) -> dict[str, str]:
        """The letter of each long token, with code 128 + id."""
        return {token: chr(128 + i) for i, token in enumerate(self.tokens) if _LONG_TOKEN.fullmatch(token)}

    @cached_property
    def _table(self) -> NDArray[np.uint16]:
        """Id of every letter by its code, uint16 [128 + vocab_size]."""
        table = np.full(128 + self.vocab_size, self.unk_id, np.uint16)
        table[128:] = np.arange(self.vocab_size)
        for i, token in enumerate(self.tokens):
            if len(token) == 1 and token not in _SPECIAL:
                table[ord(token)] = i
        table[ord("\n")] = _SEPARATOR
        return table

    def decode_output(self, ids: NDArray[np.integer]) -> str:
        """Return the SMILES generated as ids [n]: the tokens before the first end token, without begin and padding."""
        ends = np.flatnonzero(ids == self.eos_id)
        generated = ids[: ends[0]] if len(ends) else ids
        return self.decode(generated[(generated != self.bos_id) & (generated != self.pad_id)])


@cache
def megamolbart() -> SmilesTokenizer:
    """Return the 523 tokens of MegaMolBART, with ids as in BioNeMo v1."""
    return SmilesTokenizer.from_file(Path(__file__).parent / "vocab" / "megamolbart.txt")
