# SPDX-License-Identifier: Apache-2.0
"""Text for a causal decoder, from indexed files or made up."""

from collections.abc import Iterable

from bionemo.config.schema import GPT3Config
from bionemo.data.batch import PackedBatch
from bionemo.data.files import SplitName
from bionemo.data.text.corpora import open_documents
from bionemo.data.text.documents import DocumentSamples, Switches
from bionemo.data.text.mock import MockText
from bionemo.tokenizers.gpt2 import GPT2Tokenizer


class TextSamples(DocumentSamples):
    """Documents to go on with."""

    @classmethod
    def open(cls, config: GPT3Config, vocabulary: GPT2Tokenizer, name: SplitName) -> "TextSamples":
        """Open a split; see Samples."""
        data, seed = config.data, getattr(config.data, name).seed
        switches = Switches(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
        if data.data_impl == "mock":
            number = data.mock.num_samples if name == "train" else data.mock.num_validation_samples
            text = MockText(vocabulary.vocab_size, vocabulary.eod_id, number, config.seq_length, data.mock.seed, name)
            return cls(
                [text], seq_length=config.seq_length, vocab_size=vocabulary.vocab_size, eod_id=vocabulary.eod_id,
                seed=seed, switches=switches, shift=name == "train",
            )  # fmt: skip
        return open_documents(
            data.data_prefix, data.splits_string, name, seq_length=config.seq_length,
            vocab_size=vocabulary.vocab_size, eod_id=vocabulary.eod_id, seed=seed, switches=switches, kind=cls,
        )  # fmt: skip

    @staticmethod
    def reference_losses(
        train: DocumentSamples, val: DocumentSamples, batches: Iterable[PackedBatch]
    ) -> dict[str, float]:
        """Of made-up text: what words' frequencies alone give, and the lowest that any model can reach."""
        (text, *_) = val.streams
        if not isinstance(text, MockText):
            return {}
        nats = words = 0.0
        for batch in batches:
            read = batch.tokens.index_select(0, batch.target_index).numpy()
            nats += text.language.nats(read, batch.target_ids.numpy())
            words += len(read)
        return {"word frequencies alone": text.language.unigram_entropy(), "best possible": nats / max(words, 1)}
