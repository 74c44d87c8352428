# SPDX-License-Identifier: Apache-2.0
"""ESM-2nv: rotary positions, token dropout, no other dropout (Lin et al. 2023)."""

from torch import Tensor

from bionemo.config.schema import ESM2nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.models.token_dropout import token_dropout
from bionemo.tokenizers import Alphabet


class ESM2nv(MaskedLanguageModel):
    """Rotary encoder whose embedding makes up for the tokens it cannot see."""

    tokenizer = "esm2nv"
    base = "esm2nv_8M"
    rotary = True

    def __init__(self, config: ESM2nvConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)
        self.token_dropout = config.embedding_token_dropout

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Words alone, with token dropout, [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        return token_dropout(x_TD, batch, self.vocabulary.mask_id) if self.token_dropout else x_TD
