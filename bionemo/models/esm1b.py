# SPDX-License-Identifier: Apache-2.0
"""ESM-1b (Rives et al. 2021) and ESM-1v (Meier et al. 2021): learned positions, token dropout, no other dropout.

Shapes: T tokens of a pack, D hidden size.
"""

import torch
from torch import Tensor, nn

from bionemo.config.schema import ESM1bConfig
from bionemo.data.batch import PackedBatch
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.models.token_dropout import token_dropout
from bionemo.tokenizers import Alphabet


class PositionsBehindPadding(nn.Module):
    """Learned positions in a table whose first rows are of none.

    Theirs are counted from behind the id of padding on, so nothing ever reads the rows up to it. They stay in the
    table because the published ones hold them: what was imported is exported to the last bit.
    """

    def __init__(self, before: int, positions: int, hidden_size: int) -> None:
        super().__init__()
        self.before = before
        self.table = nn.Embedding(before + positions, hidden_size)

    def forward(self, positions_T: Tensor) -> Tensor:
        """Vectors [T, D] of positions from 0 on."""
        vectors_TD: Tensor = self.table(positions_T + self.before)
        return vectors_TD


class ESM1b(MaskedLanguageModel):
    """Word plus position embeddings, with a layer norm of their own (ESM-1b) or without (ESM-1v)."""

    tokenizer = "esm2nv"  # both alphabets are the same
    base = "esm1b_small"
    config: ESM1bConfig
    position_embeddings: PositionsBehindPadding

    def __init__(self, config: ESM1bConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)
        if self.pre_process and config.embedding_layer_norm:
            self.embedding_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def make_positions(self) -> PositionsBehindPadding:
        """See LanguageModel."""
        config = self.config
        return PositionsBehindPadding(self.vocabulary.pad_id + 1, config.max_position_embeddings, config.hidden_size)

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Words with token dropout, plus positions, of masked tokens too, then the layer norm: [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        if self.config.embedding_token_dropout:
            x_TD = token_dropout(x_TD, batch, self.vocabulary.mask_id)
        x_TD = x_TD + self.position_embeddings(batch.positions)
        return self.embedding_layernorm(x_TD) if self.config.embedding_layer_norm else x_TD

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights as LanguageModel does; rows of no position are 0, and training leaves them so."""
        super().initialise(seed)
        if self.pre_process:
            self.position_embeddings.table.weight[: self.position_embeddings.before] = 0
