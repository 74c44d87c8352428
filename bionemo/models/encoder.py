# SPDX-License-Identifier: Apache-2.0
"""Masked language models: a bidirectional encoder, BERT's head and token dropout.

Shapes: T tokens of a packed batch, N sequences, F padding segments, D hidden size, M target positions, V vocabulary.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bionemo.config.schema import EncoderConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import Alphabet

# Fraction of <mask> tokens when the published models were trained: 15 % target positions, of which 80 % are masked.
# It is part of the architecture and applies at inference too.
TRAINING_MASK_RATIO = 0.15 * 0.8


class MaskedLMHead(VocabularyProjection):
    """BERT's head: dense -> GELU -> layer norm -> product with the word embeddings, plus a bias for each token.

    If it is not `tied`, it has a weight of its own in place of the word embeddings.
    """

    def __init__(
        self, hidden_size: int, padded_vocab_size: int, vocab_size: int, epsilon: float, tied: bool = True
    ) -> None:
        super().__init__(padded_vocab_size, vocab_size, hidden_size=None if tied else hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=epsilon)

    def transform(self, hidden_MD: Tensor) -> Tensor:
        """See VocabularyProjection."""
        return cast(Tensor, self.layer_norm(F.gelu(self.dense(hidden_MD))))


class MaskedLanguageModel(LanguageModel):
    """A bidirectional encoder that predicts masked residues."""

    dataset = MaskedDataset
    has_bos_eos = True
    config: EncoderConfig
    vocabulary: Alphabet

    def build_head(self) -> MaskedLMHead:
        """See LanguageModel."""
        return MaskedLMHead(
            self.config.hidden_size, self.padded_vocab_size, self.vocabulary.vocab_size, self.config.layernorm_epsilon,
            self.tied,
        )  # fmt: skip


def token_dropout(x_TD: Tensor, batch: PackedBatch, mask_id: int) -> Tensor:
    """Zero the embeddings of masked tokens and rescale each sequence (Rives et al. 2021, Lin et al. 2023)."""
    masked_T = batch.tokens == mask_id
    sizes = batch.cu_seqlens.diff().to(x_TD.dtype)  # [N + F]; padding has no masked tokens, so its scale is irrelevant
    counts = torch.zeros_like(sizes).index_add_(0, batch.segment_ids, masked_T.to(x_TD.dtype))
    scale = (1 - TRAINING_MASK_RATIO) / (1 - counts / sizes).clamp_min(1e-6)
    visible_T = scale.index_select(0, batch.segment_ids) * ~masked_T
    return x_TD * visible_T[:, None]
