# SPDX-License-Identifier: Apache-2.0
"""SMILES to ids: atoms in brackets, Br, Cl and ring numbers such as %10 are one token, all else is one a character."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.tokenizers.vocabulary import TokenTable

# MegaMolBART's expression also lists the single characters; here every other character is a token, so none is lost.
# The bound keeps the time linear for a text of opening brackets.
_LONG = re.compile(r"(\[[^\]\r\n]{1,255}\]|Br|Cl|%[0-9]{2})")
_BREAK = 0xFFFF  # between two SMILES; no vocabulary is so large
_SPECIAL = ("<PAD>", "?", "^", "&", "<MASK>", "<SEP>")


@dataclass(frozen=True)
class SmilesTokenizer(TokenTable):
    """A fixed vocabulary of pieces of SMILES and special tokens.

    SMILES are read from untrusted files, so the text of a special token is never parsed: ``^`` inside a SMILES is an
    unknown character. What the vocabulary lacks is one ``unk_id`` a piece. White space is unknown as well; strip it.
    """

    @classmethod
    def from_file(cls, path: Path) -> "SmilesTokenizer":
        """Read a vocabulary of one token per line, MegaMolBART's special tokens among them."""
        tokens = tuple(path.read_text(encoding="utf-8").splitlines())
        pad_id, unk_id, bos_id, eos_id, mask_id, _ = map(tokens.index, _SPECIAL)
        return cls(tokens, bos_id, eos_id, pad_id, mask_id, unk_id)

    def pieces(self, text: str) -> list[str]:
        """Cut a SMILES into the texts of its tokens, known or not; together they are the SMILES."""
        parts = _LONG.split(text)
        return [piece for at, part in enumerate(parts) for piece in ([part] if at % 2 else part)]

    def unknown(self, text: str) -> list[str]:
        """Pieces of a SMILES that the vocabulary lacks, in order, repeats included."""
        return [piece for piece in self.pieces(text) if piece not in self._known]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.tokens) - frozenset(_SPECIAL)

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Ids of one SMILES, uint16 [n], without beginning and end."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Ids of many SMILES end to end, uint16 [n], and how many are of each, int64 [N].

        Every long piece becomes one letter, then a table gives the ids of all letters: five times as fast as a
        dictionary of all pieces.
        """
        if not texts:
            return np.zeros(0, np.uint16), np.zeros(0, np.int64)
        joined = "\n".join(texts)
        if joined.count("\n") >= len(texts):  # some hold a line end, which is as unknown as the other one
            joined = "\n".join(text.replace("\n", "\r") for text in texts)
        if not joined.isascii():  # beyond ASCII there is room for letters of ours
            joined = joined.encode("ascii", "replace").decode()
        parts = _LONG.split(joined)
        letters, unknown = self._letters, chr(128 + self.unk_id)
        parts[1::2] = [letters.get(piece, unknown) for piece in parts[1::2]]
        ids = self._table[np.frombuffer("".join(parts).encode("utf-32-le"), np.uint32)]
        inside = ids != _BREAK
        return ids[inside], np.diff(np.flatnonzero(~inside), prepend=-1, append=len(ids)) - 1

    @cached_property
    def _letters(self) -> dict[str, str]:
        """The letter of each long piece, of code 128 + id."""
        return {token: chr(128 + i) for i, token in enumerate(self.tokens) if _LONG.fullmatch(token)}

    @cached_property
    def _table(self) -> NDArray[np.uint16]:
        """Id of every letter by its code, uint16 [128 + vocab_size]."""
        table = np.full(128 + self.vocab_size, self.unk_id, np.uint16)
        table[128:] = np.arange(self.vocab_size)
        for i, token in enumerate(self.tokens):
            if len(token) == 1 and token not in _SPECIAL:
                table[ord(token)] = i
        table[ord("\n")] = _BREAK
        return table

    def text(self, ids: NDArray[np.integer]) -> str:
        """SMILES that a model has written as ``ids`` [n]: what stands before the first end, without beginnings."""
        ends = np.flatnonzero(ids == self.eos_id)
        written = ids[: ends[0]] if len(ends) else ids
        return self.decode(written[(written != self.bos_id) & (written != self.pad_id)])


@cache
def megamolbart() -> SmilesTokenizer:
    """The 523 tokens of MegaMolBART, ids as in BioNeMo v1."""
    return SmilesTokenizer.from_file(Path(__file__).parent / "vocab" / "megamolbart.txt")
