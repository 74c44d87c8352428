# SPDX-License-Identifier: Apache-2.0
"""ESM-2 with Transformer Engine's names of weights, in which a layer norm belongs to the module that follows it.

Sources: BioNeMo 2.7 (`ESM2Config`, `ESM2Model`) and bionemo-recipes (`NVEsmForMaskedLM`). Rows of a fused projection
are ordered by head, as ours are.
"""

from collections.abc import Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.formats.nemo2 import Nemo2Model
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import WeightNames, module_names
from bionemo.models.hugging_face_esm import EMBEDDINGS
from bionemo.tokenizers.alphabet import esm2nv

RECIPES_TYPE = "nv_esm"  # `model_type` in config.json of bionemo-recipes
_RECIPES_LAYER = {
    "input_layernorm": "self_attention.layernorm_qkv.layer_norm_",
    "self_attention.linear_qkv": "self_attention.layernorm_qkv",
    "self_attention.linear_proj": "self_attention.proj",
    "pre_mlp_layernorm": "layernorm_mlp.layer_norm_",
    "mlp.linear_fc1": "layernorm_mlp.fc1_",
    "mlp.linear_fc2": "layernorm_mlp.fc2_",
}
_RECIPES_REQUIRED = {  # keys of config.json that transformers' EsmConfig lacks, and their defaults
    "encoder_activation": "gelu", "qkv_weight_interleaved": True, "fuse_qkv_params": True, "attn_mask_type": "padding",
}  # fmt: skip
RECIPES_NAMES = WeightNames(
    {
        **EMBEDDINGS,
        **module_names({"lm_head.dense": "lm_head.dense", "lm_head.layer_norm": "lm_head.decoder.layer_norm_"}),
        "lm_head.bias": "lm_head.decoder.bias",
        **module_names(_RECIPES_LAYER, "encoder.layers.{}.", "esm.encoder.layers.{}."),
    },
    copies={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"},
    pads_vocabulary=False, ignores_padding=True,
)  # fmt: skip


def update_recipes_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate config.json of bionemo-recipes to that of EsmForMaskedLM.

    Raises:
        UserError: if a key has a value that gives the weights another meaning.
    """
    if settings.get("model_type") != RECIPES_TYPE:
        return settings
    for key, value in _RECIPES_REQUIRED.items():
        if (found := settings.get(key, value)) != value:
            raise UserError(f"{key} in its config.json is {str(found)[:50]!r}; only {value} is supported")
    classes = settings.get("architectures")
    return {
        **settings,
        "architectures": isinstance(classes, list) and [str(each).removeprefix("NV") for each in classes],
    }


_BIONEMO2_LAYER = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv": "self_attention.linear_qkv",
    "self_attention.linear_proj": "self_attention.linear_proj",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1": "mlp.linear_fc1",
    "mlp.linear_fc2": "mlp.linear_fc2",
}
_GELU = "torch._C._nn.gelu"
_EXACT_GELU = "bionemo.esm2.model.model.esm_gelu_func"


def _read_bionemo2_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    if (activation := settings["activation_func"]) not in (_GELU, _EXACT_GELU):
        raise UserError(
            f"activation_func in its io.json is {str(activation)[:100]!r}; supported are {_GELU} and {_EXACT_GELU}"
        )
    fused = activation == _GELU and settings["bias_activation_fusion"] is not False  # Megatron's kernel approximates
    return {
        "activation": "gelu_tanh" if fused else "gelu", "kv_channels": settings.get("kv_channels"),
        "max_position_embeddings": get_size(settings, "seq_length"),
    }  # fmt: skip


# The attention of Transformer Engine ignores use_esm_attention and normalize_attention_scores. BioNeMo's other layers,
# biobert_spec_option=esm2_bert_layer_local_spec, compute different functions in different releases.
_SPEC = "bionemo.llm.model.biobert.transformer_specs.BiobertSpecOption.esm2_bert_layer_with_transformer_engine_spec"
BIONEMO2 = Nemo2Model(
    config_class="bionemo.esm2.model.model.ESM2Config",
    defaults={  # from BioNeMo 2.0 to 2.7, and the size of its tokenizer
        "num_layers": 33, "hidden_size": 1280, "num_attention_heads": 20, "ffn_hidden_size": 5120, "seq_length": 1024,
        "token_dropout": True, "activation_func": _GELU, "bias_activation_fusion": True,
        "vocab_size": esm2nv().vocab_size,
    },
    names=WeightNames(
        {
            "word_embeddings.weight": "embedding.word_embeddings.weight",
            **module_names({
                name: name for name in ("encoder.final_layernorm", "lm_head.dense", "lm_head.layer_norm")
            }),
            "lm_head.bias": "output_layer.bias",
            **module_names(_BIONEMO2_LAYER, "encoder.layers.{}.", "encoder.layers.{}."),
        },
        pads_vocabulary=False, ignores_padding=True,
    ),
    required={
        "biobert_spec_option": _SPEC, "core_attention_override": None, "softmax_scale": 1.0,
        "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0,
        "rotary_interleaved": False, "seq_len_interpolation_factor": None,
        "share_embeddings_and_output_weights": True, "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": False, "apply_residual_connection_post_layernorm": False,
        "qk_layernorm": False, "gated_linear_unit": False, "add_bias_linear": True, "num_moe_experts": None,
        "multi_latent_attention": False, "window_size": None, "num_query_groups": None,
    },
    sizes={
        name: name for name in ("hidden_size", "num_attention_heads", "num_layers", "ffn_hidden_size")
    },
    numbers={
        "hidden_dropout": ("hidden_dropout", 0.0), "layernorm_epsilon": ("layernorm_epsilon", 1e-5),
        "attention_dropout": ("attention_dropout", 0.0), "init_method_std": ("init_method_std", 0.02),
    },
    flags={"embedding_token_dropout": "token_dropout"},
    read_settings=_read_bionemo2_settings,
)  # fmt: skip
