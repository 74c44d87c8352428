# SPDX-License-Identifier: Apache-2.0
"""ESM-1nv: BERT for proteins, with learned positions and dropout (ESM-1b; Rives et al. 2021).

In the Hugging Face format it is a MegatronBertForMaskedLM, whose token types are 0.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.schema import ESM1nvConfig
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.huggingface.tokenizer import write_tokenizer
from bionemo.formats.nemo_models import NemoModel
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import WeightNames, module_names
from bionemo.models import nemo_names
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers.alphabet import esm1nv

_LAYER = {
    "input_layernorm": "attention.ln",
    "self_attention.linear_qkv": "attention.self.query attention.self.key attention.self.value",
    "self_attention.linear_proj": "attention.output.dense",
    "pre_mlp_layernorm": "ln",
    "mlp.linear_fc1": "intermediate.dense",
    "mlp.linear_fc2": "output.dense",
}
_WORDS, _BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
_NAMES = {
    "word_embeddings.weight": _WORDS,
    "position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
    "lm_head.bias": _BIAS,
    **module_names({
        "encoder.final_layernorm": "bert.encoder.ln", "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    }),
    **module_names(_LAYER, "encoder.layers.{}.", "bert.encoder.layer.{}."),
}  # fmt: skip


def _read_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("vocab_size") != esm1nv().vocab_size:
        found = str(settings.get("vocab_size"))[:50]
        raise UserError(f"vocab_size is {found!r}; ESM-1nv has {esm1nv().vocab_size} tokens")
    return {"activation": "gelu", "max_position_embeddings": get_size(settings, "max_position_embeddings")}


def _write_settings(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    if (activation := config.get("activation", "gelu")) != "gelu":
        raise UserError(f"its activation is {str(activation)[:50]!r}; that of MegatronBert is gelu")
    alphabet = esm1nv()
    return {
        "max_position_embeddings": get_size(config, "max_position_embeddings"),
        "pad_token_id": alphabet.pad_id, "bos_token_id": alphabet.bos_id, "eos_token_id": alphabet.eos_id,
    }  # fmt: skip


def _write_tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    return write_tokenizer(esm1nv(), get_size(config, "max_position_embeddings"))


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    return {}  # all models have the same one


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
    hugging_face = Architecture(
        title="ESM-1nv", model_type="megatron-bert", class_name="MegatronBertForMaskedLM", prefix="bert.",
        names=WeightNames(
            _NAMES, pads_vocabulary=False, qkv_by_head=False,
            copies={"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": _BIAS},
        ),
        zeros={"bert.embeddings.token_type_embeddings.weight": (2, "hidden_size")},
        required={
            "hidden_act": "gelu", "type_vocab_size": 2, "position_embedding_type": "absolute",
            "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
        },
        sizes={
            "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
            "num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size",
        },
        numbers={  # with the defaults of MegatronBertConfig
            "hidden_dropout": ("hidden_dropout_prob", 0.1), "layernorm_epsilon": ("layer_norm_eps", 1e-12),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1), "init_method_std": ("initializer_range", 0.02),
        },
        read_settings=_read_settings, write_settings=_write_settings,
        write_tokenizer=_write_tokenizer, read_tokenizer=_read_tokenizer,
        ignored=(r"embeddings\.position_ids", r"pooler\..*"),
    )  # fmt: skip
    config: ESM1nvConfig
