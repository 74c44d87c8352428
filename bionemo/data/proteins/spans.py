# SPDX-License-Identifier: Apache-2.0
"""The span objective: residues behind sentinels, which a decoder says one after the other (Raffel et al. 2020, 3.1.4).

As in the predecessor each span is a single residue. Of n residues, round(n x masked_lm_prob), but at least one, are
chosen; in the encoder's input the i-th of them is replaced by sentinel i, and the decoder is to say
`sentinel 0, residue, sentinel 1, residue, ..., end`. Neither end is marked for the encoder.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import Words, draw_runs, purpose_key, sample_keys
from bionemo.config.schema import ProtT5nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import RowSize, Sequences, Tokens
from bionemo.data.files import SplitName
from bionemo.data.proteins.residues import ProteinSamples, Residues
from bionemo.tokenizers import Alphabet


@dataclass(frozen=True)
class Spans:
    """How to hide.

    Attributes:
        alphabet: has the sentinels behind all other tokens.
        share: of the residues that are hidden.
    """

    alphabet: Alphabet
    share: float

    @cached_property
    def first_sentinel(self) -> int:
        """Id of the first sentinel."""
        return self.alphabet.tokens.index("<extra_id_0>")

    def hidden(self, lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """How many of each sequence's residues are hidden, [N]: Python's rounding, to even."""
        wanted = np.maximum(np.rint(lengths * self.share), 1).astype(np.int64)
        return np.minimum(wanted, lengths)

    def __call__(self, tokens: NDArray[np.integer[Any]], keys: Words, lengths: NDArray[np.int64]) -> Sequences:
        """Hide residues in place.

        Args:
            tokens: [n] ids of all sequences end to end; changed in place.
            keys: [N] random key of each sequence.
            lengths: [N] tokens of each.

        Returns:
            What the decoder is to say of each sequence: two tokens for each hidden one, and the end.
        """
        hidden = self.hidden(lengths)
        chosen = _lowest(draw_runs(keys, lengths), lengths, hidden)
        sentinels = self.first_sentinel + _count_up(hidden)
        said = np.empty(2 * len(chosen) + len(lengths), np.uint8)
        ends = (2 * hidden + 1).cumsum() - 1
        said[ends] = self.alphabet.eos_id
        pair = 2 * np.arange(len(chosen)) + np.repeat(np.arange(len(lengths)), hidden)
        said[pair], said[pair + 1] = sentinels, tokens[chosen]
        tokens[chosen] = sentinels
        return Sequences(said, 2 * hidden + 1)


def _count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... count - 1 for each count, end to end."""
    return np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)


def _lowest(words: Words, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places, ascending, of the `count` lowest words of each sequence: every choice is equally likely."""
    order = np.lexsort((words, np.repeat(np.arange(len(lengths)), lengths)))
    return np.sort(order[np.repeat(lengths.cumsum() - lengths, counts) + _count_up(counts)])


@dataclass(frozen=True)
class SpanSamples(ProteinSamples):
    """Proteins, some of their residues behind sentinels."""

    spans: Spans
    row: RowSize

    @classmethod
    def open(cls, config: ProtT5nvConfig, vocabulary: Alphabet, name: SplitName) -> "SpanSamples":
        """Open a split; see Samples."""
        data = config.data
        residues = Residues.open(data, vocabulary, name, config.seq_length, ends=False)
        return cls(residues, Spans(vocabulary, data.masked_lm_prob), RowSize(data.seq_length_dec, config.seq_length))

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data."""
        return super().identity | {"model.data.masked_lm_prob": self.spans.share}

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the encoder's row or, where the decoder's row is the sooner full, their equivalent."""
        assert self.row.source is not None
        read = self.counted
        said = 2 * self.spans.hidden(read) + 1
        return np.maximum(read, -(-said * self.row.source // self.row.inputs))

    def build(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Tokens:
        """Tokenise and hide; see Samples."""
        source, unknown = self.residues.tokens(epochs, records)
        keys = sample_keys(purpose_key(self.residues.seed, "mask"), epochs, records)
        said = self.spans(source.ids, keys, source.lengths)
        begins = said.lengths.cumsum() - said.lengths
        inputs = np.empty_like(said.ids)
        inputs[1:] = said.ids[:-1]
        inputs[begins] = self.residues.alphabet.bos_id
        dropout = sample_keys(purpose_key(self.residues.seed, "dropout"), epochs, records)
        return Tokens(Sequences(inputs, said.lengths), np.arange(len(inputs)), said.ids, dropout, unknown, source)

    @staticmethod
    def reference_losses(train: "SpanSamples", val: "SpanSamples", batches: Iterable[PackedBatch]) -> dict[str, float]:
        """What the residues' frequencies alone give: sentinels and ends follow from what was said before."""
        hidden = val.spans.hidden(val.counted)
        share = hidden.sum() / (2 * hidden + 1).sum()
        return {"residue frequencies alone": train.residues.split.unigram_entropy * float(share)}
