# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models: shared word and position embeddings, two transformer blocks, one head.

Shapes: T tokens of the decoder's packed batch, S of the encoder's, D hidden size, M target positions, V vocabulary.
"""

from torch import Tensor

from bionemo.config.schema import EncoderDecoderConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron.layer_spec import EncoderOutput, PackedTransformerBlock
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import TokenTable


class EncoderDecoder(LanguageModel):
    """A pre-LN encoder-decoder with learned positions (Vaswani et al. 2017).

    The head is the word embedding with a bias for each token, or a weight of its own without a bias, depending on
    `share_decoder_tokens_head_embeddings`.
    """

    config: EncoderDecoderConfig
    vocabulary: TokenTable

    def build_layers(self) -> None:
        """Build encoder, decoder and head; config/check.py rejects pipeline parallelism."""
        config = self.config
        self.share_embeddings_and_output_weights = tied = config.share_decoder_tokens_head_embeddings
        self.encoder, self.decoder = (
            PackedTransformerBlock(config, "encoder"),
            PackedTransformerBlock(config, "decoder"),
        )
        self.lm_head = VocabularyProjection(
            self.padded_vocab_size, self.vocabulary.vocab_size, bias=tied,
            hidden_size=None if tied else config.hidden_size,
        )  # fmt: skip

    def encode(self, source: PackedBatch) -> EncoderOutput:
        """Return the encoder's output [S, 1, D]; with sequence parallelism it is divided over the tensor ranks."""
        x_S1D, sequences = self.prepare_input(source)
        return EncoderOutput(self.encoder(x_S1D, sequences), sequences)

    def compute_representations(self, batch: PackedBatch) -> Tensor:
        """Return the encoder's vector of every token, [S, D]; `batch` is the encoder's input."""
        return self.gather_hidden_states(self.encode(batch).hidden).squeeze(1)

    def compute_hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the decoder's output after the final layer norm, [T, 1, D]."""
        assert batch.source is not None
        encoder_output = self.encode(batch.source)
        x_T1D, sequences = self.prepare_input(batch)
        return self.gather_hidden_states(self.decoder(x_T1D, sequences, encoder_output))
