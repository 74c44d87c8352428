# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of proteins: one token per residue, implemented as a table of bytes."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.tokenizers.residues import check_special_tokens
from bionemo.tokenizers.vocabulary import TokenTable

SENTINEL_COUNT = 96  # default of ProtT5nv, as in v1
_VOCABULARIES = Path(__file__).parent / "vocab"


@dataclass(frozen=True)
class Alphabet(TokenTable):
    """A vocabulary of single letters and special tokens such as `<mask>`. Ids fit one byte.

    Lower-case letters, with which files mark repeats and insertions, are read as capitals, unless they are tokens. The
    text of a special token is never parsed, because sequences come from untrusted files: `<mask>` in a sequence is
    refused.
    """

    # whether `encode` drops white space, like Hugging Face's ESM tokenizer, or treats it as unknown
    skips_space: bool = False

    @classmethod
    def from_file(cls, path: Path, *, bos: str, eos: str, skips_space: bool = False) -> "Alphabet":
        """Read a vocabulary with one token per line, including `<pad>`, `<mask>` and `<unk>`."""
        tokens = tuple(path.read_text(encoding="utf-8").split())
        bos_id, eos_id, pad_id, mask_id, unk_id = map(tokens.index, (bos, eos, "<pad>", "<mask>", "<unk>"))
        return cls(tokens, bos_id, eos_id, pad_id, mask_id, unk_id, skips_space)

    @cached_property
    def table(self) -> NDArray[np.uint8]:
        """Id of every byte, uint8 [256]: `table[letters]` tokenizes packed ASCII."""
        table = np.full(256, self.unk_id, np.uint8)
        letters = {token: token_id for token_id, token in enumerate(self.tokens) if not token.startswith("<")}
        for read in (str.lower, str):  # a lower-case letter may be a token of its own
            for token, token_id in letters.items():
                table[ord(read(token))] = token_id
        table.flags.writeable = False
        return table

    @cached_property
    def residue_ids(self) -> NDArray[np.uint8]:
        """Ids of the tokens except `<...>` and `|`, uint8 [k]; random replacements are drawn from these."""
        ids = np.array([i for i, token in enumerate(self.tokens) if not token.startswith(("<", "|"))], np.uint8)
        ids.flags.writeable = False
        return ids

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Return the ids of one sequence, uint8 [n], without begin and end tokens.

        A run of unknown letters becomes one `unk_id`. White space that is skipped ends a run.

        Raises:
            UserError: if the sequence contains a special token.
        """
        check_special_tokens(text.encode("utf-8", "replace"), "the sequence")
        parts = [part.encode("utf-8", "replace") for part in (text.split() if self.skips_space else [text])]
        ids = self.table[np.frombuffer(b"".join(parts), np.uint8)]
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        return ids[self.collapse_unknown(ids, starts)]

    def collapse_unknown(self, ids: NDArray[np.uint8], starts: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which tokens of a packed batch remain if every run of unknown letters becomes one token.

        Args:
            ids: packed `table[letters]`, uint8 [n].
            starts: indices [b] of the starts of the sequences. A run ends at the end of its sequence.

        Returns:
            Mask [n]. `ids[mask]` equals the concatenation of `encode` for each sequence.
        """
        unknown = ids == self.unk_id
        keep = np.ones(len(ids) + 1, bool)  # an empty last sequence starts at n
        keep[1:-1] = ~(unknown[1:] & unknown[:-1])
        keep[starts] = True
        return keep[:-1]


@cache
def esm1nv() -> Alphabet:
    """Return the 30 tokens of ESM-1nv, with ids as in BioNeMo v1's sentencepiece model.

    They contain amino acids, X, B, Z, U and O. Gaps, stops and spaces are unknown.
    """
    return Alphabet.from_file(_VOCABULARIES / "esm1nv.txt", bos="<s>", eos="</s>")


@cache
def prott5nv(sentinels: int = SENTINEL_COUNT) -> Alphabet:
    """Return the tokens of ESM-1nv followed by the sentinels `<extra_id_0>` and so on, which replace masked spans."""
    alphabet = esm1nv()
    return replace(alphabet, tokens=alphabet.tokens + tuple(f"<extra_id_{number}>" for number in range(sentinels)))


@cache
def esm2nv() -> Alphabet:
    """Return the 33 tokens of ESM-2 (Lin et al. 2023), with ids as in the weights on the Hugging Face hub.

    They contain amino acids, X, B, U, Z, O and the alignment letters `.` and `-`. White space is dropped.
    """
    return Alphabet.from_file(_VOCABULARIES / "esm2nv.txt", bos="<cls>", eos="<eos>", skips_space=True)


@cache
def esmc() -> Alphabet:
    """Return the 64 tokens of ESMC: those of ESM-2, with `|` between chains for `<null_1>`, and 31 unused ones.

    The published embedding and head have 64 rows, and the probabilities of the unused tokens are not 0.
    """
    tokens = ["|" if token == "<null_1>" else token for token in esm2nv().tokens]
    return replace(esm2nv(), tokens=(*tokens, *(f"<unused_{number}>" for number in range(len(tokens), 64))))
