# SPDX-License-Identifier: Apache-2.0
"""GPT-3: a causal decoder for text with learned positions (Brown et al. 2020); GPT-2 has the same architecture."""

from bionemo.config.schema import GPT3Config
from bionemo.data.text.dataset import TextDataset
from bionemo.megatron.vocabulary import VocabularyProjection
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers.gpt2 import GPT2Tokenizer


class GPT3(LanguageModel):
    """Pre-LN decoder; the head is the word embedding without a bias."""

    tokenizer = "gpt2"
    default_config = "gpt3"
    dataset = TextDataset
    causal = True
    config: GPT3Config
    vocabulary: GPT2Tokenizer

    def build_head(self) -> VocabularyProjection:
        """See LanguageModel."""
        return VocabularyProjection(self.padded_vocab_size, self.vocabulary.vocab_size, bias=False)
