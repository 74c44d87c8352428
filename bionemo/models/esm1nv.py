# SPDX-License-Identifier: Apache-2.0
"""ESM-1nv: BERT for proteins, with learned positions and dropout (ESM-1b; Rives et al. 2021)."""

from bionemo.config.schema import ESM1nvConfig
from bionemo.models.encoder import MaskedLanguageModel


class ESM1nv(MaskedLanguageModel):
    """Word plus position embeddings, with dropout after them and after every sublayer."""

    tokenizer = "esm1nv"
    default_config = "esm1nv_small"
    config: ESM1nvConfig
