# SPDX-License-Identifier: Apache-2.0
"""Base class of the protein datasets: reads, crops and tokenizes the sequences of a batch at once."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import RandomBits, draw, integers_below, purpose_key, sample_keys
from bionemo.data.dataset import TokenSequences
from bionemo.data.proteins.splits import ConcatenatedSource, Split
from bionemo.data.shards.source import digest_sample
from bionemo.tokenizers import Alphabet


class ProteinDataset:
    """Tokenized proteins; implements most of `bionemo.data.dataset.Dataset`."""

    has_bos_eos: ClassVar[bool] = False  # add a BOS and an EOS token to every sequence

    def __init__(self, split: Split, alphabet: Alphabet, max_tokens: int) -> None:
        """Use the sequences of a split, with at most `max_tokens` tokens each, including BOS and EOS."""
        self.split, self.alphabet, self.max_tokens = split, alphabet, max_tokens
        self.records, self.clusters, self.notes = split.records, split.clusters, split.notes
        self.mixture = split.mixture
        special = 2 * self.has_bos_eos
        self.token_counts = np.minimum(split.source.lengths, max_tokens - special) + np.int32(special)
        residues = int(split.source.lengths.sum(dtype=np.int64))
        self.fingerprint: dict[str, Any] = {
            "training residues": residues, "training sequences": digest_sample(split.source),
        }  # fmt: skip
        self._table = alphabet.table.tobytes()

    def read_tokens(
        self, epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[TokenSequences, NDArray[np.int64]]:
        """Read, crop and tokenize records [N]; return tokens and the number of unknown letters of each [N]."""
        begin = int(self.has_bos_eos)
        residues = self.split.source.lengths[records].astype(np.int64)
        max_residues = self.max_tokens - 2 * begin
        counts = np.minimum(residues, max_residues)
        first = np.zeros_like(counts)
        if self.split.crop and (long := np.flatnonzero(residues > max_residues)).size:
            keys = self.keys("crop", epochs[long], records[long])
            first[long] = integers_below(draw(keys), residues[long] - max_residues + 1)

        lengths = counts + 2 * begin
        ends = lengths.cumsum()
        starts = ends - lengths
        text = bytearray(int(lengths.sum()))
        self.split.source.gather(records, first, counts, np.frombuffer(text, np.uint8), starts + begin)
        tokens = np.frombuffer(text.translate(self._table), np.uint8)  # three times as fast as indexing
        if self.has_bos_eos:
            tokens[starts], tokens[ends - 1] = self.alphabet.bos_id, self.alphabet.eos_id

        is_unknown = tokens == self.alphabet.unk_id
        unknown = np.zeros_like(lengths)
        if is_unknown.any():  # a run of unknown letters is one token, as in BioNeMo v1
            unknown = _count_per_sequence(is_unknown, ends)
            keep = self.alphabet.collapse_unknown(tokens, starts)
            tokens, lengths = tokens[keep], _count_per_sequence(keep, ends)
        return TokenSequences(tokens, lengths), unknown

    def keys(self, purpose: str, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> RandomBits:
        """Return the random key of each sample for a purpose; it does not depend on the other sources of a mixture."""
        if isinstance(self.split.source, ConcatenatedSource):
            _, records = self.split.source.locate(records)
        return sample_keys(purpose_key(self.split.seed, purpose), epochs, records)


def _count_per_sequence(mask: NDArray[np.bool_], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count true elements in each sequence, [N]; sequences may be empty."""
    return np.diff(np.concatenate([[0], mask.cumsum()])[ends], prepend=0)
