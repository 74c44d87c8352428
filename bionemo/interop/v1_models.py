# SPDX-License-Identifier: Apache-2.0
"""The kinds of models of which v1's archives are read and written. To add one, add a `Names` to `MODELS`.

Sources: NeMo 1.23 (`MegatronBertModel`, `MegatronLMEncoderDecoderModel`, `MegatronGPTModel` without Megatron-Core,
their modules, the target that ModelPT adds to a configuration; the converter of T5 names the encoder-decoder's
weights), BioNeMo v1.10 (`ESMnvBertModel`, the converter of ESM-2).
"""

from collections.abc import Mapping
from typing import Any

from bionemo.common.errors import UserError
from bionemo.interop.v1_names import Modules, Names, Stack

_LAYER: Modules = {
    "input_layernorm": ("input_layernorm", "H", "H"),
    "self_attention.linear_qkv": ("self_attention.query_key_value", "qH", "q"),
    "self_attention.linear_proj": ("self_attention.dense", "Hp", "H"),
    "pre_mlp_layernorm": ("post_attention_layernorm", "H", "H"),
    "mlp.linear_fc1": ("mlp.dense_h_to_4h", "fH", "f"),
    "mlp.linear_fc2": ("mlp.dense_4h_to_h", "Hf", "H"),
}
_DECODER_LAYER: Modules = {  # a layer norm is called after what lies before it
    **_LAYER,
    "pre_cross_attn_layernorm": ("post_attention_layernorm", "H", "H"),
    "cross_attention.linear_q": ("inter_attention.query", "pH", "p"),
    "cross_attention.linear_kv": ("inter_attention.key_value", "dH", "d"),
    "cross_attention.linear_proj": ("inter_attention.dense", "Hp", "H"),
    "pre_mlp_layernorm": ("post_inter_attention_layernorm", "H", "H"),
}
_WORDS: Modules = {"word_embeddings": ("language_model.embedding.word_embeddings", "vH", "")}
_POSITIONS: Modules = {"position_embeddings": ("language_model.embedding.position_embeddings", "LH", "")}
_BERT_ENDS: Modules = {
    **_WORDS,
    "encoder.final_layernorm": ("language_model.encoder.final_layernorm", "H", "H"),
    "lm_head.dense": ("lm_head.dense", "HH", "H"),
    "lm_head.layer_norm": ("lm_head.layernorm", "H", "H"),
    "lm_head": ("lm_head", "", "v"),
}
_GPT_ENDS: Modules = {
    **_WORDS,
    **_POSITIONS,
    "decoder.final_layernorm": ("language_model.encoder.final_layernorm", "H", "H"),
}
_PAIR_ENDS: Modules = {
    "word_embeddings": ("encoder_embedding.word_embeddings", "vH", ""),
    "position_embeddings": ("encoder_embedding.position_embeddings", "LH", ""),
    "encoder.final_layernorm": ("enc_dec_model.encoder.model.final_layernorm", "H", "H"),
    "decoder.final_layernorm": ("enc_dec_model.decoder.model.final_layernorm", "H", "H"),
}

# What v1's constructors read and our configuration does not say.
_ANY = {
    "precision": 32, "apply_query_key_layer_scaling": True, "masked_softmax_fusion": True,
    "fp32_residual_connection": False, "fp16_lm_cross_entropy": False, "use_cpu_initialization": False,
    "onnx_safe": False, "megatron_legacy": False, "pre_process": True, "post_process": True,
}  # fmt: skip
_LAYERS = {
    "bias": True, "headscale": False, "normalization": "layernorm", "transformer_block_type": "pre_ln",
    "bias_dropout_add_fusion": True, "persist_layer_norm": True,
}  # fmt: skip
_BERT = {**_ANY, "bert_binary_head": False}
_ESM2 = {
    **_BERT, "embedding_use_attention_mask": True, "normalize_attention_scores": False, "use_esm_attention": True,
    "esm_gelu": True, "use_pt_layernorm": False, "use_pt_mlp_out": False,
}  # fmt: skip
_PAIR = {
    **_ANY, **_LAYERS, "encoder_arch": "transformer", "decoder_arch": "transformer", "share_token_embeddings": True,
    "pipeline_model_parallel_split_rank": 0,
}  # fmt: skip
_GPT = {
    **_ANY, **_LAYERS, "mcore_gpt": False, "transformer_engine": False, "share_embeddings_and_output_weights": True,
}  # fmt: skip

_ENCODER = {"encoder": Stack("language_model.encoder", _LAYER)}


def _pair(ours: str, v1: str, words: int, sentinels: int = 0) -> Names:
    """An encoder-decoder; both read the same words and positions, which v1 keeps twice."""
    return Names(
        ours, v1, words, _PAIR_ENDS,
        stacks={
            "encoder": Stack("enc_dec_model.encoder.model", _LAYER),
            "decoder": Stack("enc_dec_model.decoder.model", _DECODER_LAYER),
        },
        prefix="enc_dec_model.", copies={"decoder_embedding.": "encoder_embedding."}, sentinels=sentinels,
        tied={"lm_head": ("tokens_head", "", "v")}, untied={"lm_head": ("tokens_head", "vH", "")}, config=_PAIR,
    )  # fmt: skip


_ESM = "bionemo.model.protein.esm1nv.esm1nv_model"
_GPT_MODEL = "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel"
MODELS = (
    Names(
        "bionemo.models.esm1nv.ESM1nv", f"{_ESM}.ESM1nvModel", 30, {**_BERT_ENDS, **_POSITIONS}, _ENCODER, config=_BERT
    ),
    Names(
        "bionemo.models.esm2nv.ESM2nv", f"{_ESM}.ESM2nvModel", 33, _BERT_ENDS, _ENCODER, rotary=True, config=_ESM2
    ),
    _pair(
        "bionemo.models.prott5nv.ProtT5nv", "bionemo.model.protein.prott5nv.prott5_model.ProtT5nvModel", 30, 96
    ),
    _pair(
        "bionemo.models.megamolbart.MegaMolBART",
        "bionemo.model.molecule.megamolbart.megamolbart_model.MegaMolBARTModel",
        523,
    ),
    Names(
        "bionemo.models.gpt3.GPT3", _GPT_MODEL, 50257, _GPT_ENDS,
        {"decoder": Stack("language_model.encoder", _LAYER)}, users=True, config=_GPT,
    ),
)  # fmt: skip
_BASE_CLASS = "bionemo.model.protein.esm1nv.base.ESMnvMegatronBertModel"


def names_of(config: Mapping[str, Any]) -> Names:
    """Choose the kind of model that a configuration, ours or v1's, is of.

    Archives of early releases name no class, and those that were divided anew may name the base class: there the kind
    of positions decides.

    Raises:
        UserError: for a kind that is not known here.
    """
    target = config.get("_target_") or config.get("target") or _BASE_CLASS
    for names in MODELS:
        if target in (names.ours, names.v1):
            return names
    if target == _BASE_CLASS:
        return MODELS[config.get("position_embedding_type") == "rope"]
    *others, last = (names.v1.rpartition(".")[2] for names in MODELS)
    raise UserError(
        f"it is of the class {target[:100] if isinstance(target, str) else '?'!r}; those of {', '.join(others)} and "
        f"{last} are read"
    )
