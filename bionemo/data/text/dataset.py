# SPDX-License-Identifier: Apache-2.0
"""Text dataset for causal language models: concatenated documents, cut into samples.

A sample has `seq_length` + 1 tokens and shares the last one with the next sample, so every token of the stream but the
first is a target once in a pass. In training, the first cut is at another position in each pass. Documents end with an
end-of-document (EOD) token.

Without `reset_attention_mask` a sample is one sequence, and tokens attend to previous documents. With it, each part of
a document in a sample is a sequence of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.random_stream import draw, draw_runs, integers_below, purpose_key, sample_keys
from bionemo.config.schema import GPT3Config
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import MaxLengths, TokenizedBatch, TokenSequences
from bionemo.data.files import SplitName, parse_prefixes
from bionemo.data.text.blend import Blend
from bionemo.data.text.corpora import CorpusSplit, check_token_ids
from bionemo.data.text.mock import MockText
from bionemo.tokenizers.gpt2 import GPT2Tokenizer, id_dtype


class TokenStream(Protocol):
    """Concatenated tokens with random access."""

    name: str  # name for messages
    size: int  # number of tokens of a pass; reading may continue after them
    fingerprint: dict[str, Any]  # identifies the tokens

    def read(self, starts: NDArray[np.int64], count: int) -> NDArray[np.integer[Any]]:
        """Return tokens [k, count] from each start [k]; `count` is at most `size`."""


@dataclass(frozen=True)
class DocumentOptions:
    """Treatment of document boundaries, named as in `model.data`."""

    reset_attention_mask: bool = False  # tokens do not attend to previous documents
    reset_position_ids: bool = False  # positions start at 0 in every document; requires `reset_attention_mask`
    eod_mask_loss: bool = False  # no loss for the prediction after an EOD token

    def __post_init__(self) -> None:
        if self.reset_position_ids and not self.reset_attention_mask:
            raise UserError(
                "model.data.reset_position_ids=True requires model.data.reset_attention_mask=True: a document that "
                "attends to previous ones continues their positions"
            )


class TextDataset:
    """Samples of token streams; implements `bionemo.data.dataset.Dataset`.

    Pickles without the per-record arrays, which can be large.
    """

    clusters = mixture = None
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        streams: Sequence[TokenStream],
        *,
        seq_length: int,
        vocab_size: int,
        eod_id: int,
        seed: int,
        options: DocumentOptions = DocumentOptions(),
        weights: Sequence[float] | None = None,
        shift: bool = True,
    ) -> None:
        """Cut streams into samples.

        Args:
            streams: the data.
            seq_length: number of input tokens of a sample.
            vocab_size: size of the vocabulary, without padding.
            eod_id: id of the end-of-document token.
            seed: seed of the cuts and of dropout.
            options: treatment of document boundaries.
            weights: share of samples from each stream; None: by size.
            shift: change the cuts from pass to pass; False for validation.

        Raises:
            UserError: if a stream is too short or a weight is too small for one sample.
        """
        self.streams, self.vocab_size, self.eod_id = tuple(streams), vocab_size, eod_id
        self.seed, self.options, self._shift = seed, options, shift
        for stream in streams:
            if stream.size <= seq_length:
                raise UserError(
                    f"{stream.name} has {stream.size:,} tokens in this split, too few for a sample of {seq_length} + "
                    "1: lower model.seq_length, increase the share of the split in model.data.splits_string, or add "
                    "text"
                )
        sizes = tuple((stream.size - 1) // seq_length for stream in streams)
        self._blend = Blend(sizes, None if weights is None else tuple(weights))
        self.max_lengths = MaxLengths(seq_length)
        self._set_record_arrays(sum(self._blend.records_per_corpus))
        self.fingerprint: dict[str, Any] = {
            "streams": [stream.fingerprint for stream in streams],
            "records": list(self._blend.records_per_corpus),
            "seq_length": seq_length,
            "shift": shift,
            **vars(options),
        }

    @classmethod
    def open(cls, config: GPT3Config, vocabulary: GPT2Tokenizer, name: SplitName) -> "TextDataset":
        """See DatasetFactory."""
        data, vocab_size, eod_id = config.data, vocabulary.vocab_size, vocabulary.eod_id
        weights = None
        streams: list[TokenStream] = []
        if data.data_impl == "mock":
            samples = data.mock.num_samples if name == "train" else data.mock.num_validation_samples
            streams.append(MockText(vocab_size, eod_id, samples, config.seq_length, data.mock.seed, name))
        else:
            prefixes, weights = parse_prefixes(data.data_prefix)
            for prefix in prefixes:
                streams.append(CorpusSplit.open(prefix, data.splits_string, name, vocab_size))
        return cls(
            streams, seq_length=config.seq_length, vocab_size=vocab_size, eod_id=eod_id,
            seed=getattr(data, name).seed, weights=weights, shift=name == "train",
            options=DocumentOptions(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss),
        )  # fmt: skip

    @staticmethod
    def reference_losses(train: "TextDataset", val: "TextDataset", batches: Iterable[PackedBatch]) -> dict[str, float]:
        """See DatasetFactory; there are baselines for mock text only."""
        (text, *_) = val.streams
        if not isinstance(text, MockText):
            return {}
        nats = count = 0.0
        for batch in batches:
            tokens = batch.tokens.index_select(0, batch.target_positions).numpy()
            nats += text.language.total_loss(tokens, batch.target_ids.numpy())
            count += len(tokens)
        return {"word frequencies alone": text.language.unigram_entropy(), "best possible": nats / max(count, 1)}

    def _set_record_arrays(self, count: int) -> None:
        self.records: NDArray[np.int64] = np.arange(count)
        self.lengths: NDArray[np.integer[Any]] = np.broadcast_to(np.int64(self.max_lengths.inputs), count)
        self.token_counts = self.lengths

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "records": None, "lengths": None, "token_counts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_record_arrays(len(self._blend))

    def tokenize(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> TokenizedBatch:
        """See Dataset; each part of a document that is a sequence of its own has its own dropout key.

        Raises:
            UserError: if an id is outside the vocabulary.
        """
        tokens, seq_length = self._read_samples(epochs, records), self.max_lengths.inputs
        inputs, target_ids = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
        keys = sample_keys(purpose_key(self.seed, "dropout"), epochs, records)
        is_eod = inputs == self.eod_id
        target_positions = np.arange(len(inputs))
        if self.options.eod_mask_loss:
            target_positions = np.flatnonzero(~is_eod)
            target_ids = target_ids[target_positions]
        lengths = np.full(len(records), seq_length)
        counts = first_positions = None
        if self.options.reset_attention_mask:
            is_end = is_eod.reshape(-1, seq_length)  # sequences end with EOD tokens and with samples
            is_end[:, -1] = True
            counts = is_end.sum(axis=1)
            ends = np.flatnonzero(is_end) + 1
            lengths = np.diff(ends, prepend=0)
            keys = draw_runs(keys, counts)
            if not self.options.reset_position_ids:
                first_positions = (ends - lengths) % seq_length
        return TokenizedBatch(
            TokenSequences(inputs, lengths, dropout_keys=keys, first_positions=first_positions), target_positions,
            target_ids, np.zeros(len(lengths), np.int64), sequences_per_sample=counts,
        )  # fmt: skip

    def _read_samples(self, epochs: NDArray[np.int64], records: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Return the tokens of samples, [k, seq_length + 1]."""
        seq_length = self.max_lengths.inputs
        corpora, passes, samples = self._blend.locate(epochs, records)
        starts = samples * seq_length
        if self._shift:  # the first pass starts at the beginning of the stream
            bits = draw(sample_keys(purpose_key(self.seed, "cut"), passes, corpora))
            starts += integers_below(bits, np.full(len(bits), seq_length)) * (passes > 0)
        tokens = np.empty((len(records), seq_length + 1), id_dtype(self.vocab_size))
        for corpus in np.unique(corpora).tolist():
            selected, stream = corpora == corpus, self.streams[corpus]
            found = stream.read(starts[selected], seq_length + 1)
            check_token_ids(found, self.vocab_size, stream.name)
            tokens[selected] = found
        return tokens
