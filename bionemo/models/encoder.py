# SPDX-License-Identifier: Apache-2.0
"""What the masked language models share: a bidirectional stack and BERT's head.

Shapes: D hidden size, M asked positions, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from bionemo.config.schema import EncoderConfig
from bionemo.data.proteins.masking import MaskedSamples
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import Alphabet


class MaskedLMHead(VocabularyProjection):
    """dense -> GELU -> layer norm -> product with the word embeddings, plus a bias per word (BERT's head)."""

    def __init__(self, hidden_size: int, rows: int, words: int, epsilon: float) -> None:
        super().__init__(rows, words)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=epsilon)

    def forward(self, hidden_MD: Tensor, table_VD: Tensor | None = None) -> Tensor:
        """Return logits [M, V]: see VocabularyProjection."""
        return super().forward(self.layer_norm(F.gelu(self.dense(hidden_MD))), table_VD)


class MaskedLanguageModel(LanguageModel):
    """A bidirectional encoder that names the residues hidden from it."""

    samples = MaskedSamples
    stack, kind, ends = "encoder", "encoder", True
    config: EncoderConfig
    vocabulary: Alphabet

    def __init__(self, config: EncoderConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)

    def make_head(self) -> MaskedLMHead:
        """BERT's."""
        config = self.config
        return MaskedLMHead(config.hidden_size, self.rows, self.vocabulary.vocab_size, config.layernorm_epsilon)
