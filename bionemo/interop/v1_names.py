# SPDX-License-Identifier: Apache-2.0
"""What v1 called each weight of a model, what shape it has, and where tensor parallelism divided it.

Sources: NeMo 1.23 (`MegatronBertModel`, its language model, BertLMHead, the target that ModelPT adds to a
configuration), BioNeMo v1.10 (`ESMnvBertModel`, the converter of ESM-2). Both of us keep query, key and value head by
head, as Megatron does, so values are never rearranged. To add a model, add a `Names` to `MODELS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bionemo.errors import UserError

# Our module -> v1's below "model.", the shape of its weight, that of its bias. H hidden, P heads x head size, Q three
# times that, F feed-forward, L positions, V padded vocabulary; in lower case: divided by tensor parallelism.
Modules = Mapping[str, tuple[str, str, str]]
_LAYER: Modules = {
    "input_layernorm": ("input_layernorm", "H", "H"),
    "self_attention.linear_qkv": ("self_attention.query_key_value", "qH", "q"),
    "self_attention.linear_proj": ("self_attention.dense", "Hp", "H"),
    "pre_mlp_layernorm": ("post_attention_layernorm", "H", "H"),
    "mlp.linear_fc1": ("mlp.dense_h_to_4h", "fH", "f"),
    "mlp.linear_fc2": ("mlp.dense_4h_to_h", "Hf", "H"),
}
_ENDS: Modules = {
    "word_embeddings": ("language_model.embedding.word_embeddings", "vH", ""),
    "encoder.final_layernorm": ("language_model.encoder.final_layernorm", "H", "H"),
    "lm_head.dense": ("lm_head.dense", "HH", "H"),
    "lm_head.layer_norm": ("lm_head.layernorm", "H", "H"),
    "lm_head": ("lm_head", "", "v"),
}
_POSITIONS: Modules = {"position_embeddings": ("language_model.embedding.position_embeddings", "LH", "")}

# What v1's constructors read and our configuration does not say.
_BERT = {
    "precision": 32, "bert_binary_head": False, "apply_query_key_layer_scaling": True, "masked_softmax_fusion": True,
    "fp32_residual_connection": False, "fp16_lm_cross_entropy": False, "use_cpu_initialization": False,
    "onnx_safe": False, "megatron_legacy": False, "pre_process": True, "post_process": True,
}  # fmt: skip
_ESM2 = {
    "embedding_use_attention_mask": True, "normalize_attention_scores": False, "bias_gelu_fusion": False,
    "use_esm_attention": True, "esm_gelu": True, "use_pt_layernorm": False, "use_pt_mlp_out": False,
}  # fmt: skip
_UNDIVIDED = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False,
    "megatron_amp_O2": False,
}  # fmt: skip
_MOST, _MOST_LAYERS = 1 << 20, 1000


class Weight(NamedTuple):
    """One weight of the whole model."""

    v1: str  # its name there, below "model."
    shape: tuple[int, ...]
    divided: int | None  # the dimension of which each rank of tensor parallelism has a part
    padded: bool  # its first dimension is the vocabulary, which v1 padded for the number of these ranks


@dataclass(frozen=True)
class Names:
    """The weights of one kind of model.

    Attributes:
        ours, v1: class paths in configurations; they are compared, never imported.
        words: size of the alphabet, before padding.
        ends: what there is besides the layers.
        rotary: v1 also kept the frequencies of rotary positions.
        config: keys of v1's configuration that have one value for this kind of model.
    """

    ours: str
    v1: str
    words: int
    ends: Modules
    rotary: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def table(self, config: Mapping[str, Any]) -> dict[str, Weight]:
        """Every weight that a model of this configuration has, by our names.

        Raises:
            UserError: when a size is missing or out of range.
        """
        sizes, modules = self._sizes(config), dict(self.ends)
        for layer in range(_size(config, "num_layers", _MOST_LAYERS)):
            for ours, (v1, weight, bias) in _LAYER.items():
                theirs = f"language_model.encoder.layers.{layer}.{v1}"
                modules[f"encoder.layers.{layer}.{ours}"] = (theirs, weight, bias)
        return {
            f"{ours}.{kind}": _weight(f"{v1}.{kind}", letters, sizes)
            for ours, (v1, *shapes) in modules.items()
            for kind, letters in zip(("weight", "bias"), shapes, strict=True)
            if letters
        }

    def _sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        projection = _size(config, "num_attention_heads") * _head_size(config)
        multiple = _size({"make_vocab_size_divisible_by": 128, **config}, "make_vocab_size_divisible_by")
        return {
            "H": _size(config, "hidden_size"),
            "P": projection,
            "Q": 3 * projection,
            "F": _size(config, "ffn_hidden_size"),
            "L": _size(config, "max_position_embeddings"),
            "V": -(-self.words // multiple) * multiple,
        }

    def to_v1(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename our weights.

        Raises:
            UserError: when they are not those of the configuration.
        """
        table = self.table(config)
        check(table, weights)
        renamed = {f"model.{weight.v1}": weights[name] for name, weight in table.items()}
        if self.rotary:
            size = _head_size(config)
            frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
            renamed["model.language_model.rotary_pos_emb.inv_freq"] = frequencies
        return renamed

    def v1_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the model section of our configuration to what v1 kept in an archive of one rank."""
        given = {key: value for key, value in config.items() if key != "_target_"}
        return {**_BERT, **self.config, **given, **_UNDIVIDED, "target": self.v1}


_ESM = "bionemo.model.protein.esm1nv.esm1nv_model"
MODELS = (
    Names("bionemo.models.esm1nv.ESM1nv", f"{_ESM}.ESM1nvModel", 30, {**_ENDS, **_POSITIONS}),
    Names("bionemo.models.esm2nv.ESM2nv", f"{_ESM}.ESM2nvModel", 33, _ENDS, rotary=True, config=_ESM2),
)
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
    known = " and ".join(names.v1.rpartition(".")[2] for names in MODELS)
    raise UserError(
        f"it is of the class {target[:100] if isinstance(target, str) else '?'!r}; those of {known} are read"
    )


def check(table: Mapping[str, Weight], weights: Mapping[str, Tensor]) -> None:
    """Hold weights against a table.

    Raises:
        UserError: that names the first few that are missing or too many, or one of a wrong shape or type.
    """
    if missing := [name for name in table if name not in weights]:
        raise UserError(f"it lacks {len(missing)} weights: {first_few(missing)}")
    if unknown := [name for name in weights if name not in table]:
        raise UserError(f"it has {len(unknown)} unknown weights: {first_few(unknown)}")
    for name, weight in table.items():
        found = weights[name]
        if tuple(found.shape) != weight.shape:
            raise UserError(f"its {name} is {tuple(found.shape)}, its configuration says {weight.shape}")
        if found.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UserError(f"its {name} is of type {found.dtype}")


def first_few(names: list[str]) -> str:
    """Three of them."""
    return ", ".join(repr(name[:80]) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _weight(v1: str, letters: str, sizes: Mapping[str, int]) -> Weight:
    divided = next((i for i, letter in enumerate(letters) if letter.islower()), None)
    return Weight(v1, tuple(sizes[letter.upper()] for letter in letters), divided, letters[0] == "v")


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("kv_channels") is not None:
        return _size(config, "kv_channels")
    return max(1, _size(config, "hidden_size") // _size(config, "num_attention_heads"))


def _size(config: Mapping[str, Any], key: str, most: int = _MOST) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(f"its configuration gives no {key} from 1 to {most}")
    return value
