# SPDX-License-Identifier: Apache-2.0
"""ESM-2nv: rotary positions, token dropout, no other dropout (Lin et al. 2023)."""

import torch
from torch import Tensor

from bionemo.config.schema import ESM2nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers import Alphabet

# The share of tokens that were replaced by <mask> when the published models were trained: 15 % asked, 80 % of these
# masked. Part of the architecture, not a knob: it is applied at inference too.
MASKED_IN_TRAINING = 0.15 * 0.8


class ESM2nv(MaskedLanguageModel):
    """Rotary encoder whose embedding makes up for the tokens it cannot see."""

    tokenizer = "esm2nv"
    base = "esm2nv_8M"
    rotary = True

    def __init__(self, config: ESM2nvConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)
        self.token_dropout = config.embedding_token_dropout

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Zero the masked tokens, then scale each sequence up as dropout would (ESM's "token dropout"), [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        if not self.token_dropout:
            return x_TD
        masked_T = batch.tokens == self.vocabulary.mask_id
        sizes = batch.boundaries.diff().to(x_TD.dtype)  # [N + F]: fillers hold no mask, their scale is of no account
        counts = torch.zeros_like(sizes).index_add_(0, batch.segment_ids, masked_T.to(x_TD.dtype))
        scale = (1 - MASKED_IN_TRAINING) / (1 - counts / sizes).clamp_min(1e-6)
        visible_T = scale.index_select(0, batch.segment_ids) * ~masked_T
        return x_TD * visible_T[:, None]
