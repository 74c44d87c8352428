# SPDX-License-Identifier: Apache-2.0
"""Weight names, class path and configuration keys of a model in `.nemo` files (NeMo 1.23, BioNeMo v1.10)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.hints import all_keys
from bionemo.config.saved_model import is_complete
from bionemo.config.targets import ENTRY_POINT_GROUP, TRUSTED_PACKAGES, target_schema
from bionemo.formats.model_formats import ModelFormat, format_of, known_formats
from bionemo.formats.shape_check import get_size
from bionemo.formats.weight_names import FREQUENCIES, MULTIPLE, Weight, WeightNames

_OUR_CLASS = "bionemo_class"  # key of the configuration: class path of a model outside bionemo
_ONE_RANK = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False,
    "megatron_amp_O2": False,
}  # fmt: skip
# With other values of these keys, weights of the same shapes have another meaning.
_REQUIRED = {
    "megatron_legacy": False, "mcore_gpt": False, "normalization": "layernorm", "transformer_block_type": "pre_ln",
    "activation": "gelu",
}  # fmt: skip
# Keys that NeMo's constructors read and our configuration does not have. NeMo's fused kernels approximate GELU.
_DEFAULTS = {
    "bias_gelu_fusion": False, "bias_activation_fusion": False,
    "precision": 32, "apply_query_key_layer_scaling": True, "masked_softmax_fusion": True,
    "fp32_residual_connection": False, "fp16_lm_cross_entropy": False, "use_cpu_initialization": False,
    "onnx_safe": False, "megatron_legacy": False, "pre_process": True, "post_process": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemoModel(ModelFormat):
    """A model class in `.nemo` files."""

    nemo_class: str  # class path in `.nemo` files (the `target` that ModelPT adds); it is compared, never imported
    # Class that re-partitioned files name instead, and files of early releases do not name; the type of positions
    # then determines the model.
    base_class: str = ""
    vocab_size: int  # number of tokens without padding; the default where users bring their own vocabulary
    names: WeightNames  # names of the weights, without the prefix
    prefix: str = "model."  # prefix of all names
    sentinels: int = 0  # default number of sentinel tokens, which follow the vocabulary
    user_vocabulary: bool = False  # whether users bring their own vocabulary, with its size in `tokenizer.vocab_size`
    rotary: bool = False  # whether the positions are rotary; NeMo also stores their frequencies
    # Keys of NeMo's configuration that have one value for this model.
    config: Mapping[str, Any] = field(default_factory=dict)

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration of NeMo belongs to this model."""
        target = config.get("target") or self.base_class
        if target and target == self.base_class:
            return (config.get("position_embedding_type") == "rope") == self.rotary
        return bool(target == self.nemo_class)

    def weights(self, config: Mapping[str, Any]) -> dict[str, Weight]:
        """Return all weights of a model with this configuration, by our names.

        Raises:
            UserError: if a size is missing or out of range.
        """
        return self.names.weights(config, self.read_vocab_size(config))

    def read_vocab_size(self, config: Mapping[str, Any]) -> int:
        """Return the number of tokens, including sentinels.

        Raises:
            UserError: if it is out of range.
        """
        sizes = {"num_sentinel_tokens": self.sentinels, "vocab_size": self.vocab_size}
        tokenizer = config.get("tokenizer")
        if isinstance(tokenizer, Mapping):
            sizes |= {key: value for key, value in tokenizer.items() if value is not None}
        if self.user_vocabulary:
            return get_size(sizes, "vocab_size")
        return self.vocab_size + (get_size(sizes, "num_sentinel_tokens") if self.sentinels else 0)

    def with_vocab_size(self, config: Mapping[str, Any], size: int | None) -> dict[str, Any]:
        """Return the configuration with the vocabulary size in it, where the model class does not determine it."""
        if size is None or not self.user_vocabulary:
            return dict(config)
        return {**config, "tokenizer": {**(config.get("tokenizer") or {}), "vocab_size": size}}

    def to_nemo_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the `model` section of our configuration to that of a `.nemo` file of one rank.

        NeMo computes GELU with the error function without fused kernels, and with tanh when openai_gelu is set.
        """
        known = {
            **_DEFAULTS, **self.config, "openai_gelu": config.get("activation") == "gelu_tanh",
            "position_embedding_type": "rope" if self.rotary else "learned_absolute",
        }  # fmt: skip
        given = {key: value for key, value in config.items() if not (value is None and key in {*known, FREQUENCIES})}
        if given.get("activation") == "gelu_tanh":
            given["activation"] = "gelu"
        check_layer_type(given)
        given.pop("_target_", None)
        foreign = {} if self.our_class.startswith("bionemo.") else {_OUR_CLASS: self.our_class}
        tokenizer = {**known.get("tokenizer", {}), **(given.get("tokenizer") or {})}
        return {**known, **given, **_ONE_RANK, "target": self.nemo_class, **foreign, "tokenizer": tokenizer}

    def to_our_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Translate the configuration of a `.nemo` file to the `model` section of ours.

        The result is complete if this package wrote the file; otherwise it also has keys of NeMo.
        """
        fused = config.get("bias_activation_fusion", config.get("bias_gelu_fusion", True)) is not False
        tanh = config.get("openai_gelu") is True or (fused and config.get("esm_gelu") is not True)
        activation = str(config.get("activation", "gelu"))
        activation = "gelu_tanh" if tanh and activation == "gelu" else activation
        config = {**config, "_target_": self.our_class, "activation": activation}
        if not is_complete(config):
            return {MULTIPLE: 128, **config}
        ours = set(all_keys(target_schema(self.our_class, object)))
        added = {"target", _OUR_CLASS, "openai_gelu", "position_embedding_type", *_ONE_RANK, *_DEFAULTS, *self.config}
        return {key: value for key, value in config.items() if key in ours or key not in added}


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


def find_nemo_model(config: Mapping[str, Any]) -> NemoModel | None:
    """Return the model that a configuration, ours or NeMo's, belongs to; None if it has no `.nemo` format."""
    if target := config.get("_target_") or config.get(_OUR_CLASS):
        found: NemoModel | None = format_of({"_target_": target}, "nemo")
        return found
    return next((model for model in known_formats("nemo") if model.describes(config)), None)


def get_nemo_model(config: Mapping[str, Any]) -> NemoModel:
    """Return the model that a configuration, ours or NeMo's, belongs to.

    Raises:
        UserError: if it has no `.nemo` format.
    """
    if model := find_nemo_model(config):
        return model
    ours = config.get("_target_") or config.get(_OUR_CLASS)
    target = ours or config.get("target")
    if ours and not str(ours).startswith("bionemo."):
        remedy = f": it needs the attribute nemo, and the entry point {ENTRY_POINT_GROUP} or {TRUSTED_PACKAGES}"
    else:
        remedy = "; supported: " + ", ".join(each.nemo_class.rpartition(".")[2] for each in known_formats("nemo"))
    raise UserError(
        f"models of the class {target[:100] if isinstance(target, str) else '?'!r} have no .nemo format{remedy}"
    )
