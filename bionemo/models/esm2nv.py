# SPDX-License-Identifier: Apache-2.0
"""ESM-2nv: rotary positions, token dropout, no other dropout (Lin et al. 2023)."""

from torch import Tensor

from bionemo.config.schema import ESM2nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.models.encoder import MaskedLanguageModel, token_dropout


class ESM2nv(MaskedLanguageModel):
    """Encoder with rotary positions and token dropout."""

    tokenizer = "esm2nv"
    default_config = "esm2nv_8M"
    rotary = True
    config: ESM2nvConfig

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Return word embeddings with token dropout, [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        drops = self.config.embedding_token_dropout
        return token_dropout(x_TD, batch, self.vocabulary.mask_id) if drops else x_TD
