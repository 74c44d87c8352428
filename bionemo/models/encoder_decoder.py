# SPDX-License-Identifier: Apache-2.0
"""What the encoder-decoders share: words and positions for both, two stacks, one head.

Shapes: T tokens of the decoder's pack, S of the encoder's, D hidden size, M asked positions, V vocabulary.
"""

from torch import Tensor

from bionemo.config.schema import EncoderDecoderConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron.layer_spec import Block, Memory
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import TokenTable


class EncoderDecoder(LanguageModel):
    """A stack that reads a sequence, and one that says another of it (Vaswani et al. 2017; pre-LN, learned positions).

    The head is the word table with a bias for each word, or a table of its own without.
    """

    config: EncoderDecoderConfig
    vocabulary: TokenTable

    def __init__(self, config: EncoderDecoderConfig, vocabulary: TokenTable) -> None:
        self.tied = config.share_decoder_tokens_head_embeddings
        super().__init__(config, vocabulary)
        self.share_embeddings_and_output_weights = self.tied

    def add_stacks(self) -> None:
        """Make encoder, decoder and head; there is one stage alone (config/check.py)."""
        self.encoder, self.decoder = Block(self.config, "encoder"), Block(self.config, "decoder")
        hidden_size = None if self.tied else self.config.hidden_size
        self.lm_head = VocabularyProjection(
            self.rows, self.vocabulary.vocab_size, bias=self.tied, hidden_size=hidden_size
        )

    def encode(self, source: PackedBatch) -> Memory:
        """What the decoder attends to, [S, 1, D]: divided over the sequence like all that lies between the ends."""
        x_S1D, segments = self.read(source)
        return Memory(self.encoder(x_S1D, segments), segments)

    def represent(self, batch: PackedBatch) -> Tensor:
        """Vectors of every token that the encoder reads, [S, D]; `batch` is what it reads."""
        return self.gathered(self.encode(batch).hidden).squeeze(1)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Vectors of every token that the decoder has read, [T, 1, D], after the final layer norm."""
        assert batch.source is not None
        memory = self.encode(batch.source)
        x_T1D, segments = self.read(batch)
        return self.gathered(self.decoder(x_T1D, segments, memory))

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """What the head makes of vectors: [M, V]."""
        logits: Tensor = self.lm_head(hidden_MD, self.word_embeddings.weight if self.tied else None)
        return logits
