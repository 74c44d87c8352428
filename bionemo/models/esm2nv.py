# SPDX-License-Identifier: Apache-2.0
"""ESM-2nv: rotary positions, token dropout, no other dropout (Lin et al. 2023). Shapes: T tokens, D hidden size."""

from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.config.schema import ESM2nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.formats.nemo_models import NemoModel
from bionemo.formats.weight_names import WeightNames
from bionemo.models import nemo_names
from bionemo.models.encoder import MaskedLanguageModel, token_dropout
from bionemo.models.esm2_transformer_engine import BIONEMO2, RECIPES_NAMES, RECIPES_TYPE, update_recipes_settings
from bionemo.models.hugging_face_esm import EMBEDDINGS, POOLER, REQUIRED, esm_architecture
from bionemo.tokenizers import Vocabulary
from bionemo.tokenizers.alphabet import esm2nv


class ESM2nv(MaskedLanguageModel):
    """A masked language model of protein sequences with rotary positions, after ESM-2. It has token dropout."""

    tokenizer = "esm2nv"
    default_config = "esm2nv_8M"
    rotary = True
    card_tag = "protein"
    nemo = NemoModel(
        nemo_class=f"{nemo_names.ESM_MODULE}.ESM2nvModel", base_class=nemo_names.ESM_BASE_CLASS, vocab_size=33,
        names=WeightNames({**nemo_names.BERT, **nemo_names.BERT_LAYERS}), rotary=True,
        config={
            **nemo_names.BERT_CONFIG, "embedding_use_attention_mask": True, "normalize_attention_scores": False,
            "use_esm_attention": True, "esm_gelu": True, "use_pt_layernorm": False, "use_pt_mlp_out": False,
            "mask_token_id": esm2nv().mask_id,
            "tokenizer": {
                "library": "huggingface", "model_name": "facebook/esm2_t33_650M_UR50D", "mask_id": esm2nv().mask_id,
            },
        },
    )  # fmt: skip
    nemo2 = BIONEMO2
    hugging_face = esm_architecture(
        "ESM-2", "rotary", EMBEDDINGS,
        required=REQUIRED | {"rope_theta": 10000.0, "emb_layer_norm_before": False},
        flags={"embedding_token_dropout": "token_dropout"},
        # published files still contain a position table, which transformers do not use
        ignored=(r"embeddings\.position_(ids|embeddings\.weight)", POOLER, r".*\._extra_state"),
        inverse_frequencies="esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq",
        other_types=(RECIPES_TYPE,), other_names=[RECIPES_NAMES], update_settings=update_recipes_settings,
    )  # fmt: skip
    config: ESM2nvConfig

    def __init__(self, config: ESM2nvConfig, vocabulary: Vocabulary) -> None:
        frequencies, pairs = config.rotary_frequencies, config.head_size // 2
        if frequencies is not None and len(frequencies) != pairs:
            raise UserError(f"model.rotary_frequencies has {len(frequencies)} numbers, expected {pairs}")
        super().__init__(config, vocabulary)

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Return word embeddings with token dropout, [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        drops = self.config.embedding_token_dropout
        return token_dropout(x_TD, batch, self.vocabulary.mask_id) if drops else x_TD
