# SPDX-License-Identifier: Apache-2.0
"""ESM-1b (Rives et al. 2021) and ESM-1v (Meier et al. 2021): learned positions, token dropout, no other dropout.

Shapes: T tokens of a packed batch, D hidden size.
"""

import torch
from torch import Tensor, nn

from bionemo.config.schema import ESM1bConfig
from bionemo.data.batch import PackedBatch
from bionemo.models.encoder import MaskedLanguageModel, token_dropout
from bionemo.models.hugging_face_esm import ESM1B_EMBEDDINGS, POOLER, REQUIRED, esm_architecture
from bionemo.tokenizers import Alphabet


class OffsetPositionEmbedding(nn.Module):
    """Learned positions that start after the id of the padding token, as in fairseq.

    The first `offset` rows of the table are never read. They are kept so that published weights can be imported and
    exported without any change.
    """

    def __init__(self, offset: int, positions: int, hidden_size: int) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(offset + positions, hidden_size)

    def forward(self, positions_T: Tensor) -> Tensor:
        """Return vectors [T, D] of positions counted from 0."""
        vectors_TD: Tensor = self.table(positions_T + self.offset)
        return vectors_TD


class ESM1b(MaskedLanguageModel):
    """A masked language model of protein sequences with learned positions, as ESM-1b and ESM-1v.

    Word plus position embeddings are followed by a layer norm (ESM-1b) or not (ESM-1v).
    """

    tokenizer = "esm2nv"  # both alphabets are the same
    default_config = "esm1b_small"
    card_tag = "protein"
    hugging_face = esm_architecture(
        "ESM-1b", "absolute", ESM1B_EMBEDDINGS,
        required=REQUIRED,
        flags={"embedding_token_dropout": "token_dropout", "embedding_layer_norm": "emb_layer_norm_before"},
        ignored=(r"embeddings\.position_ids", POOLER),
    )  # fmt: skip
    config: ESM1bConfig
    position_embeddings: OffsetPositionEmbedding

    def __init__(self, config: ESM1bConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)
        if self.pre_process and config.embedding_layer_norm:
            self.embedding_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def build_position_embeddings(self) -> OffsetPositionEmbedding:
        """See LanguageModel."""
        config = self.config
        return OffsetPositionEmbedding(self.vocabulary.pad_id + 1, config.max_position_embeddings, config.hidden_size)

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Return word embeddings with token dropout plus positions, after the layer norm: [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        if self.config.embedding_token_dropout:
            x_TD = token_dropout(x_TD, batch, self.vocabulary.mask_id)
        x_TD = x_TD + self.position_embeddings(batch.position_ids)
        return self.embedding_layernorm(x_TD) if self.config.embedding_layer_norm else x_TD

    @torch.no_grad()
    def initialize_weights(self, seed: int) -> None:
        """Initialize all weights; the unused rows of the position table are 0 and stay 0 in training."""
        super().initialize_weights(seed)
        if self.pre_process:
            self.position_embeddings.table.weight[: self.position_embeddings.offset] = 0
