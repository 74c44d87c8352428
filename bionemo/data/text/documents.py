# SPDX-License-Identifier: Apache-2.0
"""Text to go on with: documents end to end, cut into samples whose every token but the last is asked for its next.

A sample is `seq_length` + 1 tokens and shares the last one with the next sample, so every token of the stream but the
first is a label once in a pass. The cut moves from pass to pass: what began a sample in one stands in the middle in
another. A document ends with its end token, by which it is told from the next one; an empty document leaves no trace.

Without `reset_attention_mask` a sample is one sequence, and its tokens see those of the documents before. With it,
each piece of a document in it is a sequence of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import below, draw, draw_runs, purpose_key, sample_keys
from bionemo.data.clusters import Clusters
from bionemo.data.dataset import RowSize, Sequences, Tokens
from bionemo.data.text.blend import Blend
from bionemo.tokenizers.gpt2 import id_dtype


class TokenStream(Protocol):
    """Tokens end to end, read anywhere.

    Attributes:
        name: what the user calls it.
        size: tokens of a pass; it can be read on behind them.
        identity: what tells it from others.
    """

    name: str
    size: int
    identity: dict[str, Any]

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        """Tokens [k, count] from each of the starts [k] on, `count` at most `size`."""


@dataclass(frozen=True)
class Switches:
    """What the end of a document means, named as in `model.data`.

    Attributes:
        reset_attention_mask: a token sees nothing of the documents before its own.
        reset_position_ids: positions begin again with every document; needs `reset_attention_mask`, as only a sequence
            has positions of its own.
        eod_mask_loss: the end of a document is not asked for its next token, which begins another document.
    """

    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        if self.reset_position_ids and not self.reset_attention_mask:
            raise UserError(
                "model.data.reset_position_ids=True needs model.data.reset_attention_mask=True: a document that sees "
                "those before it goes on with their positions"
            )


class DocumentSamples:
    """Samples of one or several token streams; see `bionemo.data.dataset.Samples`.

    Pickles without the numbers of the samples, which may be many.
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        *,
        seq_length: int,
        vocab_size: int,
        eod_id: int,
        seed: int,
        switches: Switches = Switches(),
        weights: Sequence[float] | None = None,
        shift: bool = True,
        notices: Sequence[str] = (),
    ) -> None:
        """Cut streams into samples.

        Args:
            streams: where tokens come from.
            seq_length: tokens that the model reads of a sample.
            vocab_size: what all ids must be below.
            eod_id: the token that ends a document.
            seed: of the cuts and of dropout.
            switches: what the end of a document means.
            weights: share of samples from each stream; None: by size.
            shift: move the cut from pass to pass; without, every pass asks the same, as a validation should.
            notices: what the user should know of the data, a line each.

        Raises:
            UserError: a stream that is too short for a sample, or a weight too small for one.
        """
        self.streams, self.seq_length, self.vocab_size, self.eod_id = tuple(streams), seq_length, vocab_size, eod_id
        self.seed, self.switches, self._shift = seed, switches, shift
        for stream in streams:
            if stream.size <= seq_length:
                raise UserError(
                    f"{stream.name} has {stream.size:,} tokens here, too few for a sample of {seq_length} + 1: lower "
                    "model.seq_length, give the split a larger share in model.data.splits_string, or more text"
                )
        sizes = tuple((stream.size - 1) // seq_length for stream in streams)
        self._blend = Blend(sizes, None if weights is None else tuple(weights))
        self._number(sum(self._blend.quotas))
        self.clusters: Clusters | None = None
        self.notices = tuple(notices)
        self.identity: dict[str, Any] = {
            "streams": [stream.identity for stream in streams],
            "records": list(self._blend.quotas),
            "seq_length": seq_length,
            "shift": shift,
            **vars(switches),
        }

    def _number(self, count: int) -> None:
        self.records: NDArray[np.int64] = np.arange(count)
        self.lengths: NDArray[np.integer[Any]] = np.broadcast_to(np.int64(self.seq_length), count)
        self.counted = self.lengths

    @property
    def row(self) -> RowSize:
        """Tokens of a row."""
        return RowSize(self.seq_length)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "records": None, "lengths": None, "counted": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._number(len(self._blend))

    def build(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> Tokens:
        """Make samples [k] into tokens.

        Returns:
            Sequences, as many of each sample as `counts` says. A piece of a document has a key of its own, and with
            `offsets` its positions go on where those of the piece before end.

        Raises:
            UserError: an id outside the vocabulary.
        """
        tokens = self._tokens(epochs, records)
        inputs, labels = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
        keys = sample_keys(purpose_key(self.seed, "dropout"), epochs, records)
        is_eod = inputs == self.eod_id
        asked = np.arange(len(inputs))
        if self.switches.eod_mask_loss:
            asked = np.flatnonzero(~is_eod)
            labels = labels[asked]
        lengths = np.full(len(records), self.seq_length)
        counts = offsets = None
        if self.switches.reset_attention_mask:
            is_end = is_eod.reshape(-1, self.seq_length)  # from here on with the end of every sample
            is_end[:, -1] = True
            counts = is_end.sum(axis=1)
            ends = np.flatnonzero(is_end) + 1
            lengths = np.diff(ends, prepend=0)
            keys = draw_runs(keys, counts)
            if not self.switches.reset_position_ids:
                offsets = (ends - lengths) % self.seq_length
        unknown = np.zeros(len(lengths), np.int64)
        return Tokens(Sequences(inputs, lengths), asked, labels, keys, unknown, counts=counts, offsets=offsets)

    def _tokens(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Tokens [k, seq_length + 1] of samples."""
        corpora, passes, numbers = self._blend.place(epochs, records)
        starts = numbers * self.seq_length + self._offsets(passes, corpora)
        tokens = np.empty((len(records), self.seq_length + 1), id_dtype(self.vocab_size))
        for corpus in np.unique(corpora).tolist():
            here, stream = corpora == corpus, self.streams[corpus]
            found = stream.read(starts[here], self.seq_length + 1)
            refuse_foreign_ids(found, self.vocab_size, stream.name)
            tokens[here] = found
        return tokens

    def _offsets(self, passes: NDArray[np.int64], corpora: NDArray[np.int64]) -> NDArray[np.int64]:
        """How far the cut of a pass [k] through a corpus [k] has moved: less than a sample, and in the first not."""
        words = draw(sample_keys(purpose_key(self.seed, "cut"), passes, corpora))
        offsets = below(words, np.full(len(words), self.seq_length))
        return offsets * (passes > 0) * self._shift


def refuse_foreign_ids(ids: NDArray[np.integer[Any]], vocab_size: int, name: str) -> None:
    """Look at every id.

    Args:
        ids: of any shape, not empty.
        vocab_size: what they must be below.
        name: of the data they are from.

    Raises:
        UserError: naming the largest.
    """
    largest = int(ids.view(f"u{ids.itemsize}").max())  # as it is unsigned, a negative one is the largest of all
    if largest >= vocab_size:
        told = int(ids.min()) if ids.min() < 0 else largest
        raise UserError(
            f"{name} has the id {told}, outside the vocabulary of {vocab_size:,} tokens: it was prepared with another "
            "one; give model.tokenizer the files that it was prepared with, or prepare it again"
        )
