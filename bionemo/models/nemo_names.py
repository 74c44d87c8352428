# SPDX-License-Identifier: Apache-2.0
"""Weight names and configuration keys in `.nemo` files that several models share.

Sources: NeMo 1.23 (`MegatronBertModel`, `MegatronLMEncoderDecoderModel`, `MegatronGPTModel` without Megatron-Core, and
their modules; the T5 converter names the weights of the encoder-decoder), BioNeMo v1.10 (`ESMnvBertModel`).
"""

from bionemo.formats.weight_names import WeightNames, module_names

_TIED = "share_decoder_tokens_head_embeddings"
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
_DECODER_LAYER = {  # NeMo names a layer norm after the module before it
    **LAYER,
    "pre_cross_attn_layernorm": "post_attention_layernorm",
    "cross_attention.linear_q": "inter_attention.query",
    "cross_attention.linear_kv": "inter_attention.key_value",
    "cross_attention.linear_proj": "inter_attention.dense",
    "pre_mlp_layernorm": "post_inter_attention_layernorm",
}
WORD_EMBEDDINGS = {"word_embeddings.weight": "language_model.embedding.word_embeddings.weight"}
POSITION_EMBEDDINGS = {"position_embeddings.weight": "language_model.embedding.position_embeddings.weight"}
BERT = {
    **WORD_EMBEDDINGS,
    **module_names({"encoder.final_layernorm": "language_model.encoder.final_layernorm"}),
    **module_names({"lm_head.dense": "lm_head.dense", "lm_head.layer_norm": "lm_head.layernorm"}),
    "lm_head.bias": "lm_head.bias",
}
BERT_LAYERS = module_names(LAYER, "encoder.layers.{}.", "language_model.encoder.layers.{}.")
_FINAL_NORMS = {f"{stack}.final_layernorm": f"{stack}.model.final_layernorm" for stack in ("encoder", "decoder")}
ENCODER_DECODER = WeightNames(
    {
        "word_embeddings.weight": "encoder_embedding.word_embeddings.weight",
        "position_embeddings.weight": "encoder_embedding.position_embeddings.weight",
        **module_names(_FINAL_NORMS, "", "enc_dec_model."),
        "lm_head.bias": "tokens_head.bias",
        "lm_head.weight": "tokens_head.weight",
        **module_names(LAYER, "encoder.layers.{}.", "enc_dec_model.encoder.model.layers.{}."),
        **module_names(_DECODER_LAYER, "decoder.layers.{}.", "enc_dec_model.decoder.model.layers.{}."),
    },
    only_if={"lm_head.bias": (_TIED, True), "lm_head.weight": (_TIED, False)},
    copies={  # encoder and decoder share the embeddings
        f"decoder_embedding.{table}_embeddings.weight": f"encoder_embedding.{table}_embeddings.weight"
        for table in ("word", "position")
    },
)

ESM_MODULE = "bionemo.model.protein.esm1nv.esm1nv_model"
ESM_BASE_CLASS = "bionemo.model.protein.esm1nv.base.ESMnvMegatronBertModel"
BERT_CONFIG = {"bert_binary_head": False}
LAYER_CONFIG = {
    "bias": True, "headscale": False, "normalization": "layernorm", "transformer_block_type": "pre_ln",
    "bias_dropout_add_fusion": True, "persist_layer_norm": True,
}  # fmt: skip
ENCODER_DECODER_CONFIG = {
    **LAYER_CONFIG, "encoder_arch": "transformer", "decoder_arch": "transformer", "share_token_embeddings": True,
    "pipeline_model_parallel_split_rank": 0,
}  # fmt: skip
