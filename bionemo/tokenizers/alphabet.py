# SPDX-License-Identifier: Apache-2.0
"""Tokenizers whose every residue is one letter: a byte look-up table and one rule for unknown letters."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bionemo.tokenizers.vocabulary import Vocabulary


@dataclass(frozen=True)
class Alphabet(Vocabulary):
    """A fixed vocabulary of single letters and special tokens such as ``<mask>``.

    Sequences are read from untrusted files, so the text of a special token is never parsed: ``<mask>`` inside a
    sequence is six unknown characters. Ids fit one byte, as do packed batches.

    Attributes:
        skips_space: whether ``encode`` drops white space, as HF's ESM tokenizer, or takes it as an unknown letter.
    """

    skips_space: bool = False

    @classmethod
    def from_file(cls, path: Path, *, bos: str, eos: str, skips_space: bool = False) -> "Alphabet":
        """Read a vocabulary of one token per line; ``<pad>``, ``<mask>`` and ``<unk>`` must be among them."""
        tokens = tuple(path.read_text(encoding="utf-8").split())
        bos_id, eos_id, pad_id, mask_id, unk_id = map(tokens.index, (bos, eos, "<pad>", "<mask>", "<unk>"))
        return cls(tokens, bos_id, eos_id, pad_id, mask_id, unk_id, skips_space)

    @cached_property
    def table(self) -> NDArray[np.uint8]:
        """Id of every byte, uint8 [256]: ``table[letters]`` tokenises packed ASCII without a loop."""
        table = np.full(256, self.unk_id, np.uint8)
        for token_id in self.residue_ids:
            table[ord(self.tokens[token_id])] = token_id
        table.flags.writeable = False
        return table

    @cached_property
    def residue_ids(self) -> NDArray[np.uint8]:
        """Ids whose text does not start with ``<``, uint8 [k]: what a random replacement is drawn from."""
        ids = np.array([i for i, token in enumerate(self.tokens) if not token.startswith("<")], np.uint8)
        ids.flags.writeable = False
        return ids

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Ids of one sequence, uint8 [n], without beginning and end.

        A run of letters without a token becomes one ``unk_id``. Where white space is skipped, it also ends a run.
        """
        parts = [part.encode("utf-8", "replace") for part in (text.split() if self.skips_space else [text])]
        ids = self.table[np.frombuffer(b"".join(parts), np.uint8)]
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        return ids[self.collapse_unknown(ids, starts)]

    def collapse_unknown(
        self, ids: NDArray[np.uint8], starts: NDArray[np.integer] | NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which tokens of a packed batch stay when every run of unknown letters becomes one token.

        Args:
            ids: packed ``table[letters]``, uint8 [n].
            starts: where sequences begin, as indices [b] or as a mask [n]; a run never joins across two of them.

        Returns:
            Mask [n]: ``ids[mask]`` is what ``encode`` gives sequence by sequence.
        """
        unknown = ids == self.unk_id
        keep = np.ones(len(ids) + 1, bool)  # one more: an empty last sequence starts at n
        keep[1:-1] = ~(unknown[1:] & unknown[:-1])
        keep[np.flatnonzero(starts) if starts.dtype == bool else starts] = True
        return keep[:-1]
