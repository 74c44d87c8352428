# SPDX-License-Identifier: Apache-2.0
"""ESM-1nv: a BERT of protein residues with learned positions and dropout (ESM-1b; Rives et al. 2021)."""

from torch import Tensor, nn

from bionemo.config.schema import ESM1nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.megatron.dropout import EMBEDDING, dropout
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers import Alphabet


class ESM1nv(MaskedLanguageModel):
    """Word plus position embeddings, dropout after them and after every sublayer."""

    tokenizer = "esm1nv"

    def __init__(self, config: ESM1nvConfig, alphabet: Alphabet) -> None:
        super().__init__(config, alphabet)
        if groups.first_stage():
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Add word and position vectors, [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens) + self.position_embeddings(batch.positions)
        return x_TD if keys_T is None else dropout(x_TD, keys_T, EMBEDDING, self.config.hidden_dropout)
