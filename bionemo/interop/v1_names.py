# SPDX-License-Identifier: Apache-2.0
"""How v1 named each weight of a model, what shape it has, and where tensor parallelism divided it.

Query, key and value lie head by head in both, as Megatron keeps them, so values are never rearranged. The kinds of
models stand in v1_models.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.interop.shape_check import MOST_LAYERS, compare, size_of

# Our module -> v1's, the shape of its weight, that of its bias. H hidden, P heads x head size, D twice and Q three
# times that, F feed-forward, L positions, V padded vocabulary; in lower case: divided by tensor parallelism.
Modules = Mapping[str, tuple[str, str, str]]

_UNDIVIDED = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False,
    "megatron_amp_O2": False,
}  # fmt: skip
# Under other values of these, weights of the same shapes mean something else.
_ONLY = {
    "megatron_legacy": False, "mcore_gpt": False, "normalization": "layernorm", "transformer_block_type": "pre_ln",
}  # fmt: skip
_TIED = "share_decoder_tokens_head_embeddings"


class Weight(NamedTuple):
    """One weight of the whole model."""

    v1: str  # its name there, behind the prefix
    shape: tuple[int, ...]
    divided: int | None  # the dimension of which each rank of tensor parallelism has a part
    padded: bool  # its first dimension is the vocabulary, which v1 padded for the number of these ranks


class Stack(NamedTuple):
    """Layers."""

    v1: str  # their module there, in which they are `layers.0` and so on
    layer: Modules


@dataclass(frozen=True)
class Names:
    """The weights of one kind of model.

    Attributes:
        ours, v1: class paths in configurations; they are compared, never imported.
        words: size of the alphabet, before padding; of one that users bring, what it usually is.
        ends: what there is besides the layers.
        stacks: by our names.
        prefix: before all names in v1's archives.
        tied, untied: what else there is where the last product is with the table of words, and where it is not.
        copies: beginnings of v1's names under which it keeps a weight again -> those where it stands.
        sentinels: how many stand behind the words unless the configuration says otherwise.
        users: the vocabulary is the user's own; `tokenizer.vocab_size` says how many words it has.
        rotary: v1 also kept the frequencies of rotary positions.
        config: keys of v1's configuration that have one value for this kind of model.
    """

    ours: str
    v1: str
    words: int
    ends: Modules
    stacks: Mapping[str, Stack]
    prefix: str = "model."
    tied: Modules = field(default_factory=dict)
    untied: Modules = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    sentinels: int = 0
    users: bool = False
    rotary: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def table(self, config: Mapping[str, Any]) -> dict[str, Weight]:
        """Every weight that a model of this configuration has, by our names.

        Raises:
            UserError: when a size is missing or out of range.
        """
        sizes = self._sizes(config)
        modules = {**self.ends, **(self.tied if config.get(_TIED) is not False else self.untied)}
        for stack, (module, layers) in self.stacks.items():
            for number in range(size_of(config, "num_layers", MOST_LAYERS)):
                for ours, (v1, weight, bias) in layers.items():
                    modules[f"{stack}.layers.{number}.{ours}"] = (f"{module}.layers.{number}.{v1}", weight, bias)
        return {
            f"{ours}.{kind}": _weight(f"{v1}.{kind}", letters, sizes)
            for ours, (v1, *shapes) in modules.items()
            for kind, letters in zip(("weight", "bias"), shapes, strict=True)
            if letters
        }

    def _sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        projection = size_of(config, "num_attention_heads") * _head_size(config)
        multiple = size_of({"make_vocab_size_divisible_by": 128, **config}, "make_vocab_size_divisible_by")
        return {
            "H": size_of(config, "hidden_size"),
            "P": projection,
            "D": 2 * projection,
            "Q": 3 * projection,
            "F": size_of(config, "ffn_hidden_size"),
            "L": size_of(config, "max_position_embeddings"),
            "V": -(-self.vocabulary(config) // multiple) * multiple,
        }

    def vocabulary(self, config: Mapping[str, Any]) -> int:
        """Number of words, sentinels among them.

        Raises:
            UserError: when it is out of range.
        """
        usual = {"num_sentinel_tokens": self.sentinels, "vocab_size": self.words}
        tokenizer = config.get("tokenizer")
        said = {k: v for k, v in tokenizer.items() if v is not None} if isinstance(tokenizer, Mapping) else {}
        if self.users:
            return size_of(usual | said, "vocab_size")
        return self.words + (size_of(usual | said, "num_sentinel_tokens") if self.sentinels else 0)

    def with_words(self, config: Mapping[str, Any], words: int | None) -> dict[str, Any]:
        """Have a configuration say how many words there are, where that is not known of the kind of model."""
        if words is None or not self.users:
            return dict(config)
        return {**config, "tokenizer": {**(config.get("tokenizer") or {}), "vocab_size": words}}

    def spellings(self, v1: str) -> list[str]:
        """All names of a weight there, without the prefix; the first is its own."""
        return [v1] + [copy + v1.removeprefix(own) for copy, own in self.copies.items() if v1.startswith(own)]

    def to_v1(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename our weights.

        Raises:
            UserError: when they are not those of the configuration.
        """
        table = self.table(config)
        check(table, weights)
        renamed = {
            self.prefix + name: weights[ours] for ours, weight in table.items() for name in self.spellings(weight.v1)
        }
        if self.rotary:
            size = _head_size(config)
            frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
            renamed["model.language_model.rotary_pos_emb.inv_freq"] = frequencies
        return renamed

    def v1_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the model section of our configuration to what v1 kept in an archive of one rank.

        v1 takes GELU by the error function where its kernels are not fused, the approximation where it is told so.
        """
        gelu = {"bias_gelu_fusion": False, "bias_activation_fusion": False}
        known = {**gelu, **self.config, "openai_gelu": config.get("activation") == "gelu_tanh"}
        given = {key: value for key, value in config.items() if not (value is None and key in known)}
        if given.get("activation") == "gelu_tanh":
            given["activation"] = "gelu"
        return {**known, **{k: v for k, v in given.items() if k != "_target_"}, **_UNDIVIDED, "target": self.v1}

    def our_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Say in our words what a configuration of v1's says in its own."""
        fused = config.get("bias_activation_fusion", config.get("bias_gelu_fusion", True)) is not False
        tanh = config.get("openai_gelu") is True or (fused and config.get("esm_gelu") is not True)
        named = {"gelu": "gelu_tanh"} if tanh else {}
        activation = str(config.get("activation", "gelu"))
        said = {"make_vocab_size_divisible_by": 128, **config}
        return {**said, "_target_": self.ours, "activation": named.get(activation, activation)}


def refuse_other_layers(config: Mapping[str, Any]) -> None:
    """Look for what the shapes of weights do not tell.

    Raises:
        UserError: when the layers, or the order of query, key and value, are not those that are read.
    """
    parts = (config, config.get("encoder"), config.get("decoder"))
    for part in (part for part in parts if isinstance(part, Mapping)):
        for key, value in _ONLY.items():
            if (said := part.get(key)) not in (None, value):
                raise UserError(f"its configuration says {key}: {str(said)[:50]!r}, of which {value} alone is read")


def check(table: Mapping[str, Weight], weights: Mapping[str, Tensor]) -> None:
    """Hold weights against a table.

    Raises:
        UserError: that names the first few that are missing or too many, or one of a wrong shape or type.
    """
    compare(
        {name: weight.shape for name, weight in table.items()},
        {name: tensor.shape for name, tensor in weights.items()},
    )
    for name, tensor in weights.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UserError(f"its {name} is of type {tensor.dtype}")


def _weight(v1: str, letters: str, sizes: Mapping[str, int]) -> Weight:
    divided = next((i for i, letter in enumerate(letters) if letter.islower()), None)
    return Weight(v1, tuple(sizes[letter.upper()] for letter in letters), divided, letters[0] == "v")


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("kv_channels") is not None:
        return size_of(config, "kv_channels")
    return max(1, size_of(config, "hidden_size") // size_of(config, "num_attention_heads"))
