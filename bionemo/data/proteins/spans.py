# SPDX-License-Identifier: Apache-2.0
"""T5's span corruption for proteins (Raffel et al. 2020, section 3.1.4), with spans of one residue as in BioNeMo v1.

Of n residues, round(n x masked_lm_prob), but at least one, are selected. In the encoder input, the i-th of them is
replaced by sentinel i. The decoder's target is `sentinel 0, residue, sentinel 1, residue, ..., EOS`. The encoder input
has no BOS and EOS.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import RandomBits, draw_runs
from bionemo.config.schema import ProtT5nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import MaxLengths, TokenizedBatch, TokenSequences
from bionemo.data.files import SplitName
from bionemo.data.proteins.dataset import ProteinDataset
from bionemo.data.proteins.splits import Split, open_split
from bionemo.tokenizers import Alphabet


@dataclass(frozen=True)
class SpanCorruption:
    """Replaces residues by sentinels."""

    alphabet: Alphabet  # its last tokens are the sentinels
    fraction: float  # fraction of residues to replace

    def count_spans(self, lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the number of replaced residues of each sequence, [N]; halves are rounded to even."""
        counts = np.maximum(np.rint(lengths * self.fraction), 1).astype(np.int64)
        return np.minimum(counts, lengths)

    def __call__(
        self, tokens: NDArray[np.integer[Any]], keys: RandomBits, lengths: NDArray[np.int64]
    ) -> TokenSequences:
        """Replace residues in the ids [n] of concatenated sequences, in place.

        Each sequence has a random key [N] and a number of tokens [N]. Returns the decoder's targets: two tokens for
        each replaced residue, and EOS.
        """
        counts = self.count_spans(lengths)
        # the residues with the lowest bits of each sequence: every selection is equally likely
        order = np.lexsort((draw_runs(keys, lengths), np.repeat(np.arange(len(lengths)), lengths)))
        selected = np.sort(order[np.repeat(lengths.cumsum() - lengths, counts) + _ramps(counts)])
        sentinels = self.alphabet.tokens.index("<extra_id_0>") + _ramps(counts)
        targets = np.empty(2 * len(selected) + len(lengths), np.uint8)
        targets[(2 * counts + 1).cumsum() - 1] = self.alphabet.eos_id
        pairs = 2 * np.arange(len(selected)) + np.repeat(np.arange(len(lengths)), counts)
        targets[pairs], targets[pairs + 1] = sentinels, tokens[selected]
        tokens[selected] = sentinels
        return TokenSequences(targets, 2 * counts + 1)


def _ramps(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, ... count - 1 for each count, concatenated."""
    return np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)


class SpanDataset(ProteinDataset):
    """Proteins with residues replaced by sentinels, for an encoder-decoder."""

    def __init__(self, split: Split, corruption: SpanCorruption, max_source: int, max_target: int) -> None:
        super().__init__(split, corruption.alphabet, max_source)
        self.corruption, self.max_lengths = corruption, MaxLengths(max_target, max_source)
        targets = 2 * corruption.count_spans(self.token_counts) + 1
        # if the decoder's row fills up first, its equivalent in encoder tokens
        self.lengths = np.maximum(self.token_counts, -(-targets * max_source // max_target))
        self.fingerprint["model.data.masked_lm_prob"] = corruption.fraction

    @classmethod
    def open(cls, config: ProtT5nvConfig, vocabulary: Alphabet, name: SplitName) -> "SpanDataset":
        """See DatasetFactory."""
        split = open_split(config.data, name, config.seq_length, vocabulary)
        corruption = SpanCorruption(vocabulary, config.data.masked_lm_prob)
        return cls(split, corruption, config.seq_length, config.data.seq_length_dec)

    def tokenize(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> TokenizedBatch:
        """See Dataset."""
        source, unknown = self.read_tokens(epochs, records)
        targets = self.corruption(source.ids, self.keys("mask", epochs, records), source.lengths)
        inputs = np.empty_like(targets.ids)
        inputs[1:] = targets.ids[:-1]
        inputs[targets.lengths.cumsum() - targets.lengths] = self.alphabet.bos_id
        return TokenizedBatch(
            TokenSequences(inputs, targets.lengths, dropout_keys=self.keys("dropout", epochs, records)),
            np.arange(len(inputs)), targets.ids, unknown, source,
        )  # fmt: skip

    @staticmethod
    def reference_losses(train: "SpanDataset", val: "SpanDataset", batches: Iterable[PackedBatch]) -> dict[str, float]:
        """See DatasetFactory; sentinels and EOS are predictable and count as 0 nats."""
        counts = val.corruption.count_spans(val.token_counts)
        fraction = counts.sum() / (2 * counts + 1).sum()
        return {"residue frequencies alone": train.split.unigram_entropy * float(fraction)}
