# SPDX-License-Identifier: Apache-2.0
"""GPT-3: a causal decoder of text with learned positions (Brown et al. 2020), which GPT-2 is as well."""

from bionemo.config.schema import GPT3Config
from bionemo.data.text.dataset import TextSamples
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers.gpt2 import GPT2Tokenizer


class GPT3(LanguageModel):
    """Pre-LN layers that see the past alone; the word table is the last product's, too, without a bias."""

    tokenizer = "gpt2"
    base = "gpt3"
    samples = TextSamples
    stack, kind = "decoder", "causal"

    def __init__(self, config: GPT3Config, vocabulary: GPT2Tokenizer) -> None:
        super().__init__(config, vocabulary)

    def make_head(self) -> VocabularyProjection:
        """The word table once more."""
        return VocabularyProjection(self.rows, self.vocabulary.vocab_size, bias=False)
