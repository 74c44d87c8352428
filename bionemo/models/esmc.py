# SPDX-License-Identifier: Apache-2.0
"""ESMC (ESM Cambrian, 2024), the successor of ESM-2. Shapes: T tokens, D hidden size.

There is no paper about the architecture: the source is `EsmcForMaskedLM` of transformers 5.24.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.config.schema import ESMCConfig
from bionemo.data.batch import PackedBatch
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import WeightNames, module_names
from bionemo.models.encoder import MaskedLanguageModel
from bionemo.tokenizers.alphabet import esmc

_EPSILON = 1e-5  # of all layer norms; config.json has no key for it
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_NORMS_OF_LAYER = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_LAYER = {
    "self_attention.linear_qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "self_attention.query_norm.weight": "self_attn.q_norm.weight",
    "self_attention.key_norm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_NAMES = {
    "word_embeddings.weight": "esmc.embed_tokens.weight",
    "encoder.final_layernorm.weight": "esmc.norm.weight",
    **module_names({
        "lm_head.dense": "lm_head.dense", "lm_head.layer_norm": "lm_head.layer_norm", "lm_head": "lm_head.decoder",
    }),
    **{f"encoder.layers.{{}}.{ours}": f"esmc.layers.{{}}.{theirs}".replace(" ", " esmc.layers.{}.")
       for ours, theirs in _LAYER.items()},
    **module_names(_NORMS_OF_LAYER, "encoder.layers.{}.", "esmc.layers.{}."),
}  # fmt: skip
# Names of the package esm, in which the norms belong to the modules that follow them.
_FUSED_LAYER = {
    "input_layernorm.weight": "attn.layernorm_qkv.layer_norm_weight",
    "input_layernorm.bias": "attn.layernorm_qkv.layer_norm_bias",
    "self_attention.linear_qkv.weight": "attn.layernorm_qkv.weight",
    "self_attention.query_norm.weight": "attn.q_ln.weight",
    "self_attention.key_norm.weight": "attn.k_ln.weight",
    "self_attention.linear_proj.weight": "attn.out_proj.weight",
    "pre_mlp_layernorm.weight": "ffn.layer_norm_weight",
    "pre_mlp_layernorm.bias": "ffn.layer_norm_bias",
    "mlp.linear_fc1.weight": "ffn.fc1_weight",
    "mlp.linear_fc2.weight": "ffn.fc2_weight",
}
_FUSED_NAMES = {
    "word_embeddings.weight": "esmc.embed.weight",
    "encoder.final_layernorm.weight": "esmc.transformer.norm.weight",
    **module_names({"lm_head.dense": "lm_head.0", "lm_head.layer_norm": "lm_head.2", "lm_head": "lm_head.3"}),
    **{f"encoder.layers.{{}}.{ours}": f"esmc.transformer.blocks.{{}}.{theirs}"
       for ours, theirs in _FUSED_LAYER.items()},
}  # fmt: skip


def _update_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the keys of older files, which transformers ignore."""
    if "d_model" not in settings:
        return settings
    keys = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    inner = -(-8 * get_size(settings, "d_model") // 3)
    defaults = {"intermediate_size": -(-inner // 256) * 256, "vocab_size": esmc().vocab_size}
    return {**defaults, **settings, **{new: settings.get(old) for old, new in keys.items()}}


def _read_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary, heads = esmc(), config["num_attention_heads"]
    expected = {
        "vocab_size": vocabulary.vocab_size, "mask_token_id": vocabulary.mask_id, "pad_token_id": vocabulary.pad_id,
        "num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads,
    }  # fmt: skip
    for key, value in expected.items():
        if settings.get(key) not in (None, value):
            raise UserError(f"{key} is {str(settings[key])[:50]!r}; only {value} is supported")
    rotary = settings.get("rope_parameters")
    if rotary is not None and (not isinstance(rotary, dict) or {**_ROTARY, **rotary} != _ROTARY):
        raise UserError(f"rope_parameters is {str(rotary)[:50]!r}; only {_ROTARY} is supported")
    return {
        "activation": "swiglu", "layernorm_epsilon": _EPSILON, "hidden_dropout": 0.0,
        "max_position_embeddings": get_size({"max_position_embeddings": 2048, **settings}, "max_position_embeddings"),
    }  # fmt: skip


def _write_settings(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    for key, value in {"activation": "swiglu", "layernorm_epsilon": _EPSILON}.items():
        if config.get(key) != value:
            raise UserError(f"its {key} is {str(config.get(key))[:50]!r}; that of ESMC is {value}")
    vocabulary = esmc()
    return {
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "mask_token_id": vocabulary.mask_id,
        "max_position_embeddings": get_size(config, "max_position_embeddings"),
        "rope_parameters": _ROTARY,
    }


def _write_tokenizer(config: Mapping[str, Any]) -> dict[str, str]:
    settings = {"tokenizer_class": "EsmcTokenizer", "model_max_length": config["max_position_embeddings"]}
    return {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    return {}  # all models have the same one, without files


class ESMC(MaskedLanguageModel):
    """A masked language model of protein sequences with rotary positions, after ESMC.

    Queries and keys are normalized over all heads, feed-forward layers are gated, what a layer adds is divided by
    sqrt(layers / 36), and the head has a weight of its own. There is no dropout and no token dropout.
    """

    tokenizer = "esmc"
    default_config = "esmc_300M"
    rotary = True
    tied = False
    card_tag = "protein"
    hugging_face = Architecture(
        title="ESMC", model_type="esmc", class_name="EsmcForMaskedLM", prefix="esmc.",
        names=WeightNames(_NAMES, pads_vocabulary=False, qkv_by_head=False),
        required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
        sizes={
            "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
            "num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size",
        },
        numbers={"attention_dropout": ("attention_dropout", 0.0), "init_method_std": ("initializer_range", 0.02)},
        read_settings=_read_settings, write_settings=_write_settings,
        write_tokenizer=_write_tokenizer, read_tokenizer=_read_tokenizer, update_settings=_update_settings,
        other_names=[WeightNames(_FUSED_NAMES, pads_vocabulary=False, qkv_by_head=False)],
        ignored=(r".*\._extra_state",),  # of Transformer Engine
    )  # fmt: skip
    config: ESMCConfig

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Return word embeddings, [T, D]."""
        x_TD: Tensor = self.word_embeddings(batch.tokens)
        return x_TD
