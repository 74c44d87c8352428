# SPDX-License-Identifier: Apache-2.0
"""ESM-1nv: BERT for proteins, with learned positions and dropout (ESM-1b; Rives et al. 2021)."""

from bionemo.config.schema import ESM1nvConfig
from bionemo.formats.nemo_models import NemoModel
from bionemo.formats.weight_names import WeightNames
from bionemo.models import nemo_names
from bionemo.models.encoder import MaskedLanguageModel


class ESM1nv(MaskedLanguageModel):
    """A masked language model of protein sequences with learned positions, after ESM-1b.

    Dropout is applied after the sum of word and position embeddings and after every sublayer.
    """

    tokenizer = "esm1nv"
    default_config = "esm1nv_small"
    card_tag = "protein"
    nemo = NemoModel(
        nemo_class=f"{nemo_names.ESM_MODULE}.ESM1nvModel", base_class=nemo_names.ESM_BASE_CLASS, vocab_size=30,
        names=WeightNames({**nemo_names.BERT, **nemo_names.POSITION_EMBEDDINGS, **nemo_names.BERT_LAYERS}),
        config={**nemo_names.BERT_CONFIG, "tokenizer": {"library": "sentencepiece"}},
    )  # fmt: skip
    config: ESM1nvConfig
