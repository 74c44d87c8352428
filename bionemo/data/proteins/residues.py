# SPDX-License-Identifier: Apache-2.0
"""Proteins as tokens: fetched, cut to what a row holds, each letter an id, all of a batch at a time."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import below, draw, purpose_key, sample_keys
from bionemo.config.schema import ProteinDataConfig
from bionemo.data.clusters import Clusters
from bionemo.data.dataset import Sequences
from bionemo.data.files import SplitName
from bionemo.data.proteins.splits import Split, letter_ids, open_split
from bionemo.tokenizers import Alphabet


@dataclass(frozen=True)
class Residues:
    """The proteins of a split.

    Attributes:
        split: where the letters come from.
        alphabet: turns letters into ids.
        seed: of crops; with the epoch and the record it decides them.
        longest: tokens that a sequence may have.
        crop: cut long sequences at a random place; otherwise keep their beginning.
        ends: whether a begin and an end token are put around every sequence, and count.
    """

    split: Split
    alphabet: Alphabet
    seed: int
    longest: int
    crop: bool
    ends: bool

    @classmethod
    def open(
        cls, config: ProteinDataConfig, alphabet: Alphabet, name: SplitName, longest: int, *, ends: bool
    ) -> "Residues":
        """Open a split; `longest` and `ends` as above.

        Raises:
            UserError: for data that is missing or cannot be read, or too long where that is an error.
        """
        split = open_split(config, name, longest - 2 * ends, alphabet)
        # only training sees another part of a long sequence in every epoch: a validation asks the same each time
        crop = config.long_sequences == "crop" and name == "train"
        return cls(split, alphabet, getattr(config, name).seed, longest, crop, ends)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every record, int32 [n]."""
        special = 2 * self.ends
        return np.minimum(self.split.source.lengths, self.longest - special) + np.int32(special)

    def tokens(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> tuple[Sequences, NDArray[np.int64]]:
        """Fetch, crop and tokenise: the sequences, and how many unknown letters each has [N]."""
        residues = self.split.source.lengths[records].astype(np.int64)
        room = self.longest - 2 * self.ends
        counts = np.minimum(residues, room)
        first = np.zeros_like(counts)
        if self.crop and (long := np.flatnonzero(residues > room)).size:
            keys = sample_keys(purpose_key(self.seed, "crop"), epochs[long], records[long])
            first[long] = below(draw(keys), residues[long] - room + 1)  # the last window is one of them

        lengths = counts + 2 * self.ends
        ends = lengths.cumsum()
        starts = ends - lengths
        text = bytearray(int(lengths.sum()))
        self.split.source.gather(records, first, counts, np.frombuffer(text, np.uint8), starts + int(self.ends))
        tokens = np.frombuffer(text.translate(self._table), np.uint8)  # thrice as fast as indexing
        if self.ends:
            tokens[starts], tokens[ends - 1] = self.alphabet.bos_id, self.alphabet.eos_id

        space, outside = tokens == self.alphabet.pad_id, tokens == self.alphabet.unk_id
        unknown = np.zeros_like(lengths)
        if outside.any() or space.any():  # a run of unknown letters is one token, as in the predecessor's tokenizers
            unknown = _within(outside, ends)
            keep = self.alphabet.collapse_unknown(tokens, starts) & ~space
            tokens, lengths = tokens[keep], _within(keep, ends)
        return Sequences(tokens, lengths), unknown

    @cached_property
    def _table(self) -> bytes:
        return letter_ids(self.alphabet).tobytes()


def _within(mask: NDArray[np.bool_], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many are marked in each sequence, [N]; a sequence may be empty."""
    return np.diff(np.concatenate([[0], mask.cumsum()])[ends], prepend=0)


@dataclass(frozen=True)
class ProteinSamples:
    """What samples that are made of proteins share; see Samples."""

    residues: Residues

    @property
    def records(self) -> NDArray[np.int64]:
        """Records that take part, or clusters."""
        return self.residues.split.records

    @property
    def clusters(self) -> Clusters | None:
        """Draws a record from each cluster."""
        return self.residues.split.clusters

    @cached_property
    def counted(self) -> NDArray[np.int32]:
        """Tokens of every record as they are counted, which are those that are read."""
        return self.residues.lengths

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know."""
        return self.residues.split.notices

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data."""
        source, records = self.residues.split.source, self.residues.split.records
        return {
            "training records": len(records),
            "training residues": int(source.lengths.sum(dtype=np.int64)),
        }
