# SPDX-License-Identifier: Apache-2.0
"""Tables of the models whose `.nemo` files are read and written: weight names, class paths and configuration keys.

To add a model, add a `NemoModel` to `NEMO_MODELS`.

Sources: NeMo 1.23 (`MegatronBertModel`, `MegatronLMEncoderDecoderModel`, `MegatronGPTModel` without Megatron-Core,
their modules, and the `target` that ModelPT adds to a configuration; the T5 converter names the weights of the
encoder-decoder), BioNeMo v1.10 (`ESMnvBertModel`, the ESM-2 converter).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bionemo.common.errors import UserError
from bionemo.interop.shape_check import get_size
from bionemo.interop.weight_names import MULTIPLE, Weight, WeightNames, module_names

_TIED = "share_decoder_tokens_head_embeddings"
_ONE_RANK = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False,
    "megatron_amp_O2": False,
}  # fmt: skip
# With other values of these keys, weights of the same shapes have another meaning.
_REQUIRED = {
    "megatron_legacy": False, "mcore_gpt": False, "normalization": "layernorm", "transformer_block_type": "pre_ln",
}  # fmt: skip


@dataclass(frozen=True)
class NemoModel:
    """A model class in `.nemo` files.

    Attributes:
        our_class, nemo_class: class paths in configurations; they are compared, never imported.
        vocabulary_size: number of tokens without padding; the default where users bring their own vocabulary.
        names: names of the weights, without the prefix.
        prefix: prefix of all names.
        sentinels: default number of sentinel tokens, which follow the vocabulary.
        user_vocabulary: whether users bring their own vocabulary, with its size in `tokenizer.vocab_size`.
        rotary: whether NeMo also stores the frequencies of rotary positions.
        config: keys of NeMo's configuration that have one value for this model.
    """

    our_class: str
    nemo_class: str
    vocabulary_size: int
    names: WeightNames
    prefix: str = "model."
    sentinels: int = 0
    user_vocabulary: bool = False
    rotary: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def weights(self, config: Mapping[str, Any]) -> dict[str, Weight]:
        """Return all weights of a model with this configuration, by our names.

        Raises:
            UserError: if a size is missing or out of range.
        """
        return self.names.weights(config, self.read_vocabulary_size(config))

    def read_vocabulary_size(self, config: Mapping[str, Any]) -> int:
        """Return the number of tokens, including sentinels.

        Raises:
            UserError: if it is out of range.
        """
        sizes = {"num_sentinel_tokens": self.sentinels, "vocab_size": self.vocabulary_size}
        tokenizer = config.get("tokenizer")
        if isinstance(tokenizer, Mapping):
            sizes |= {key: value for key, value in tokenizer.items() if value is not None}
        if self.user_vocabulary:
            return get_size(sizes, "vocab_size")
        return self.vocabulary_size + (get_size(sizes, "num_sentinel_tokens") if self.sentinels else 0)

    def with_vocabulary_size(self, config: Mapping[str, Any], size: int | None) -> dict[str, Any]:
        """Return the configuration with the vocabulary size in it, where the model class does not determine it."""
        if size is None or not self.user_vocabulary:
            return dict(config)
        return {**config, "tokenizer": {**(config.get("tokenizer") or {}), "vocab_size": size}}

    def to_nemo_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the `model` section of our configuration to that of a `.nemo` file of one rank.

        NeMo computes GELU with the error function without fused kernels, and with tanh when openai_gelu is set.
        """
        unfused = {"bias_gelu_fusion": False, "bias_activation_fusion": False}
        known = {**unfused, **self.config, "openai_gelu": config.get("activation") == "gelu_tanh"}
        given = {key: value for key, value in config.items() if not (value is None and key in known)}
        if given.get("activation") == "gelu_tanh":
            given["activation"] = "gelu"
        given.pop("_target_", None)
        return {**known, **given, **_ONE_RANK, "target": self.nemo_class}

    def to_our_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Translate the configuration of a `.nemo` file to the `model` section of ours."""
        fused = config.get("bias_activation_fusion", config.get("bias_gelu_fusion", True)) is not False
        tanh = config.get("openai_gelu") is True or (fused and config.get("esm_gelu") is not True)
        activation = str(config.get("activation", "gelu"))
        activation = "gelu_tanh" if tanh and activation == "gelu" else activation
        return {MULTIPLE: 128, **config, "_target_": self.our_class, "activation": activation}


def check_layer_type(config: Mapping[str, Any]) -> None:
    """Check properties of the layers that do not follow from the shapes of the weights.

    Raises:
        UserError: if the type of the layers, or the order of query, key and value, is not supported.
    """
    parts = (config, config.get("encoder"), config.get("decoder"))
    for part in (part for part in parts if isinstance(part, Mapping)):
        for key, value in _REQUIRED.items():
            if (found := part.get(key)) not in (None, value):
                raise UserError(f"{key} in its configuration is {str(found)[:50]!r}; only {value} is supported")


_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
_DECODER_LAYER = {  # NeMo names a layer norm after the module before it
    **_LAYER,
    "pre_cross_attn_layernorm": "post_attention_layernorm",
    "cross_attention.linear_q": "inter_attention.query",
    "cross_attention.linear_kv": "inter_attention.key_value",
    "cross_attention.linear_proj": "inter_attention.dense",
    "pre_mlp_layernorm": "post_inter_attention_layernorm",
}
_WORDS = {"word_embeddings.weight": "language_model.embedding.word_embeddings.weight"}
_POSITIONS = {"position_embeddings.weight": "language_model.embedding.position_embeddings.weight"}
_BERT = {
    **_WORDS,
    **module_names({"encoder.final_layernorm": "language_model.encoder.final_layernorm"}),
    **module_names({"lm_head.dense": "lm_head.dense", "lm_head.layer_norm": "lm_head.layernorm"}),
    "lm_head.bias": "lm_head.bias",
}
_BERT_LAYERS = module_names(_LAYER, "encoder.layers.{}.", "language_model.encoder.layers.{}.")
_GPT = {
    **_WORDS,
    **_POSITIONS,
    **module_names({"decoder.final_layernorm": "language_model.encoder.final_layernorm"}),
    **module_names(_LAYER, "decoder.layers.{}.", "language_model.encoder.layers.{}."),
}
_STACKS = {f"{stack}.final_layernorm": f"{stack}.model.final_layernorm" for stack in ("encoder", "decoder")}
_ENCODER_DECODER = WeightNames(
    {
        "word_embeddings.weight": "encoder_embedding.word_embeddings.weight",
        "position_embeddings.weight": "encoder_embedding.position_embeddings.weight",
        **module_names(_STACKS, "", "enc_dec_model."),
        "lm_head.bias": "tokens_head.bias",
        "lm_head.weight": "tokens_head.weight",
        **module_names(_LAYER, "encoder.layers.{}.", "enc_dec_model.encoder.model.layers.{}."),
        **module_names(_DECODER_LAYER, "decoder.layers.{}.", "enc_dec_model.decoder.model.layers.{}."),
    },
    only_if={"lm_head.bias": (_TIED, True), "lm_head.weight": (_TIED, False)},
    copies={  # encoder and decoder share the embeddings
        f"decoder_embedding.{table}_embeddings.weight": f"encoder_embedding.{table}_embeddings.weight"
        for table in ("word", "position")
    },
)

# Keys that NeMo's constructors read and our configuration does not have
_COMMON_CONFIG = {
    "precision": 32, "apply_query_key_layer_scaling": True, "masked_softmax_fusion": True,
    "fp32_residual_connection": False, "fp16_lm_cross_entropy": False, "use_cpu_initialization": False,
    "onnx_safe": False, "megatron_legacy": False, "pre_process": True, "post_process": True,
}  # fmt: skip
_LAYER_CONFIG = {
    "bias": True, "headscale": False, "normalization": "layernorm", "transformer_block_type": "pre_ln",
    "bias_dropout_add_fusion": True, "persist_layer_norm": True,
}  # fmt: skip
_BERT_CONFIG = {**_COMMON_CONFIG, "bert_binary_head": False}
_ESM2_CONFIG = {
    **_BERT_CONFIG, "embedding_use_attention_mask": True, "normalize_attention_scores": False,
    "use_esm_attention": True, "esm_gelu": True, "use_pt_layernorm": False, "use_pt_mlp_out": False,
}  # fmt: skip
_ENCODER_DECODER_CONFIG = {
    **_COMMON_CONFIG, **_LAYER_CONFIG, "encoder_arch": "transformer", "decoder_arch": "transformer",
    "share_token_embeddings": True, "pipeline_model_parallel_split_rank": 0,
}  # fmt: skip
_GPT_CONFIG = {
    **_COMMON_CONFIG, **_LAYER_CONFIG, "mcore_gpt": False, "transformer_engine": False,
    "share_embeddings_and_output_weights": True,
}  # fmt: skip

_ESM_MODULE = "bionemo.model.protein.esm1nv.esm1nv_model"
_BASE_CLASS = "bionemo.model.protein.esm1nv.base.ESMnvMegatronBertModel"
_ESM1NV = NemoModel(
    "bionemo.models.esm1nv.ESM1nv", f"{_ESM_MODULE}.ESM1nvModel", 30,
    WeightNames({**_BERT, **_POSITIONS, **_BERT_LAYERS}), config=_BERT_CONFIG,
)  # fmt: skip
_ESM2NV = NemoModel(
    "bionemo.models.esm2nv.ESM2nv", f"{_ESM_MODULE}.ESM2nvModel", 33,
    WeightNames({**_BERT, **_BERT_LAYERS}), rotary=True, config=_ESM2_CONFIG,
)  # fmt: skip
_PROTT5NV = NemoModel(
    "bionemo.models.prott5nv.ProtT5nv", "bionemo.model.protein.prott5nv.prott5_model.ProtT5nvModel", 30,
    _ENCODER_DECODER, "enc_dec_model.", sentinels=96, config=_ENCODER_DECODER_CONFIG,
)  # fmt: skip
_MEGAMOLBART = NemoModel(
    "bionemo.models.megamolbart.MegaMolBART",
    "bionemo.model.molecule.megamolbart.megamolbart_model.MegaMolBARTModel", 523,
    _ENCODER_DECODER, "enc_dec_model.", config=_ENCODER_DECODER_CONFIG,
)  # fmt: skip
_GPT3 = NemoModel(
    "bionemo.models.gpt3.GPT3",
    "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel", 50257,
    WeightNames(_GPT), user_vocabulary=True, config=_GPT_CONFIG,
)  # fmt: skip
NEMO_MODELS = (_ESM1NV, _ESM2NV, _PROTT5NV, _MEGAMOLBART, _GPT3)


def find_nemo_model(config: Mapping[str, Any]) -> NemoModel | None:
    """Return the model that a configuration, ours or NeMo's, belongs to; None if it has no `.nemo` format.

    Files of early releases name no class, and re-partitioned ones may name the base class; the type of positions then
    determines the model.
    """
    target = config.get("_target_") or config.get("target") or _BASE_CLASS
    if target == _BASE_CLASS:
        return _ESM2NV if config.get("position_embedding_type") == "rope" else _ESM1NV
    return next((model for model in NEMO_MODELS if target in (model.our_class, model.nemo_class)), None)


def get_nemo_model(config: Mapping[str, Any]) -> NemoModel:
    """Return the model that a configuration, ours or NeMo's, belongs to.

    Raises:
        UserError: if it has no `.nemo` format.
    """
    if model := find_nemo_model(config):
        return model
    target = config.get("_target_") or config.get("target")
    supported = ", ".join(model.nemo_class.rpartition(".")[2] for model in NEMO_MODELS)
    raise UserError(
        f"models of the class {target[:100] if isinstance(target, str) else '?'!r} have no .nemo format; supported: "
        f"{supported}"
    )
