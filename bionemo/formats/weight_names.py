# SPDX-License-Identifier: Apache-2.0
"""Translation of parameter names and tensor layouts between our models and other formats.

A `WeightNames` table maps the names of our parameters to those of Hugging Face or of `.nemo` files. Values are moved,
never changed, so a round trip is bitwise identical.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bionemo.checkpoint.source import WEIGHTS, read_block
from bionemo.common.errors import UserError
from bionemo.formats.shape_check import MAX_LAYERS, Shape, get_size

MULTIPLE, FREQUENCIES = "make_vocab_size_divisible_by", "rotary_frequencies"
# Our module -> shapes of its weight and bias. H: hidden size, P: heads x head size, D: 2P, Q: 3P, F: feed-forward
# size, G: F or with SwiGLU 2F, L: positions, V: padded vocabulary. Lower case marks the dimension that tensor
# parallelism divides.
_SHAPES = {
    "word_embeddings": ("vH",), "position_embeddings": ("LH",), "table": ("LH",), "dense": ("HH", "H"),
    "lm_head": ("vH", "v"), "linear_qkv": ("qH", "q"), "linear_q": ("pH", "p"), "linear_kv": ("dH", "d"),
    "linear_proj": ("Hp", "H"), "linear_fc1": ("gH", "g"), "linear_fc2": ("Hf", "H"),
    "query_norm": ("p",), "key_norm": ("p",),
}  # fmt: skip


class Transform(NamedTuple):
    """A pair of inverse functions that rearrange a tensor."""

    to_theirs: Callable[[Tensor], Tensor]
    to_ours: Callable[[Tensor], Tensor]


_TRANSPOSE = Transform(lambda ours: ours.T, lambda theirs: theirs.T)
_ROW = Transform(lambda ours: ours[None], lambda theirs: theirs[0])


def _separate(parts: int, groups: int) -> Transform:
    """[groups, parts, rest] <-> [parts, groups, rest] in the first dimension.

    For attention, the parts are query, key and value and the groups the heads; for SwiGLU, the parts are gate and up
    and the groups the channels.
    """
    return Transform(
        lambda ours: ours.view(groups, parts, -1, *ours.shape[1:]).transpose(0, 1).reshape(ours.shape),
        lambda theirs: theirs.reshape(parts, groups, -1, *theirs.shape[1:]).transpose(0, 1).reshape(theirs.shape),
    )


def _trim_rows(rows: int, padded_rows: int) -> Transform:
    """Remove the rows that pad the vocabulary, or replace them by zeros."""

    def pad(theirs: Tensor) -> Tensor:
        padding = theirs.new_zeros(padded_rows - rows, *theirs.shape[1:])
        return torch.cat([theirs[:rows], padding]) if len(padding) else theirs[:rows]

    return Transform(lambda ours: ours[:rows], pad)


class Weight(NamedTuple):
    """One of our parameters and its counterpart in another format."""

    # Names in the other format; several hold equal parts of the first dimension, in this order.
    theirs: tuple[str, ...]
    shape: Shape  # shape of our parameter
    tensor_parallel_dim: int | None = None  # dimension that tensor parallelism divides
    padded: bool = False  # whether the first dimension is the vocabulary, padded to a multiple
    transforms: tuple[Transform, ...] = ()  # rearrangements, in the order in which they are applied to our tensor

    def to_theirs(self, tensor: Tensor) -> dict[str, Tensor]:
        """Convert our tensor to the tensors of the other format, by name; they are views where possible."""
        for transform in self.transforms:
            tensor = transform.to_theirs(tensor)
        parts = tensor.chunk(len(self.theirs)) if len(self.theirs) > 1 else (tensor,)
        return dict(zip(self.theirs, parts, strict=True))

    def to_ours(self, read: Callable[[str], Tensor]) -> Tensor:
        """Convert the tensors of the other format, which `read` returns by name, to our tensor."""
        parts = [read(name) for name in self.theirs]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        for transform in reversed(self.transforms):
            tensor = transform.to_ours(tensor)
        return tensor

    def their_shapes(self) -> dict[str, Shape]:
        """Return the shape of each of their tensors."""
        theirs = self.to_theirs(torch.empty(self.shape, device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in theirs.items()}


@dataclass(frozen=True)
class WeightNames:
    """The weights of one model architecture in another format."""

    # Our parameter name -> theirs, with `{}` for the number of a layer. Several names, separated by spaces, hold
    # equal parts of the first dimension.
    names: Mapping[str, str]
    # Our parameter name -> (configuration key, value): the weight exists only with this value; a key that is missing
    # counts as true.
    only_if: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    # Name of a second copy of a weight in the other format -> name of that weight in the other format.
    copies: Mapping[str, str] = field(default_factory=dict)
    pads_vocabulary: bool = True  # whether their vocabulary is padded like ours
    ignores_padding: bool = False  # whether their vocabulary may have any number of further rows, which are not read
    qkv_by_head: bool = True  # whether query, key and value are ordered by head, as ours are
    transposes: bool = False  # whether the matrices of layers are stored as [in, out]
    extra_positions: int = 0  # rows of the position table that belong to no position
    rows: Collection[str] = ()  # our names of vectors that are stored as matrices of one row
    # Our name of a weight in a module of the model itself -> its dimensions: sizes, or configuration keys of sizes.
    shapes: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)

    def weights(self, config: Mapping[str, Any], vocab_size: int) -> dict[str, Weight]:
        """Return all weights of a model, by our names; `vocab_size` does not count padding.

        Raises:
            UserError: if a size is missing or out of range.
        """
        heads = get_size(config, "num_attention_heads")
        attention = heads * head_size(config)
        gated = config.get("activation") == "swiglu"
        multiple = get_size({MULTIPLE: 128, **config}, MULTIPLE)
        sizes = {
            "H": get_size(config, "hidden_size"),
            "P": attention,
            "D": 2 * attention,
            "Q": 3 * attention,
            "F": get_size(config, "ffn_hidden_size"),
            "G": get_size(config, "ffn_hidden_size") * (2 if gated else 1),
            "L": get_size(config, "max_position_embeddings") + self.extra_positions,
            "V": -(-vocab_size // multiple) * multiple,
        }
        layers = get_size(config, "num_layers", MAX_LAYERS)

        def weight(ours: str, theirs: str, in_layer: bool) -> Weight:
            if ours in self.shapes:
                shape = tuple(each if isinstance(each, int) else get_size(config, each) for each in self.shapes[ours])
                return Weight(tuple(theirs.split()), shape)
            letters = _letters(ours)
            shape = tuple(sizes[letter.upper()] for letter in letters)
            divided = next((dim for dim, letter in enumerate(letters) if letter.islower()), None)
            transforms = []
            if letters[0] == "v" and not self.pads_vocabulary:
                transforms.append(_trim_rows(vocab_size, shape[0]))
            if letters[0] in "qd" and not self.qkv_by_head:
                transforms.append(_separate(3 if letters[0] == "q" else 2, heads))
            if letters[0] == "g" and gated:
                transforms.append(_separate(2, sizes["F"]))
            if self.transposes and in_layer and len(shape) == 2:
                transforms.append(_TRANSPOSE)
            if ours in self.rows:
                transforms.append(_ROW)
            return Weight(tuple(theirs.split()), shape, divided, letters[0] == "v", tuple(transforms))

        present = {ours: theirs for ours, theirs in self.names.items() if self._exists(ours, config)}
        return {
            ours.replace("{}", str(number)): weight(ours, theirs.replace("{}", str(number)), bool(stack))
            for stack, group in [(stack, list(group)) for stack, group in groupby(present.items(), _stack)]
            for number in range(layers if stack else 1)
            for ours, theirs in group
        }

    def expected_shapes(self, weights: Mapping[str, Weight], found: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
        """Return the shapes of their tensors; the rows that pad the vocabulary are those of the tensors that exist."""
        shapes = {name: shape for weight in weights.values() for name, shape in weight.their_shapes().items()}
        padded = {name for weight in weights.values() if weight.padded for name in weight.theirs}
        for name in padded & found.keys() if self.ignores_padding else ():
            shapes[name] = (*(max(shapes[name][0], size) for size in found[name][:1]), *shapes[name][1:])
        return shapes

    def _exists(self, ours: str, config: Mapping[str, Any]) -> bool:
        key, value = self.only_if.get(ours, ("", True))
        return (config.get(key) is not False) == value


class StoredWeights:
    """Base class of a TensorSource of the weights in another format, which are read on demand."""

    _weights: Mapping[str, Weight]  # by our names
    _stored: Mapping[str, Any]  # by their names; the method `read` returns the values

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        prefix = "" if group else f"{WEIGHTS}/"
        return {prefix + name: weight.shape for name, weight in self._weights.items()}

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        weight = self._weights[name.removeprefix(f"{WEIGHTS}/")]
        return read_block(weight.to_ours(lambda theirs: self._stored[theirs].read()), offset, shape)


def module_names(modules: Mapping[str, str], ours: str = "", theirs: str = "") -> dict[str, str]:
    """Return the names of the weight and the bias of each module, with a prefix of our names and one of theirs.

    `modules` maps our module to theirs, or several of theirs separated by spaces. One that ends in `_` is followed
    directly by `weight` or `bias`.
    """
    return {
        f"{ours}{module}.{kind}": " ".join(
            f"{theirs}{name}{'' if name.endswith('_') else '.'}{kind}" for name in names.split()
        )
        for module, names in modules.items()
        for kind in ("weight", "bias")
    }


def head_size(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head: kv_channels, or hidden_size / num_attention_heads when it is not set."""
    if config.get("kv_channels") is not None:
        return get_size(config, "kv_channels")
    return max(1, get_size(config, "hidden_size") // get_size(config, "num_attention_heads"))


def rotary_frequencies(config: Mapping[str, Any]) -> Tensor:
    """Return the angle per position of each pair of channels, [d / 2] fp32 for the head size d (Su et al. 2021)."""
    if config.get(FREQUENCIES) is not None:
        return torch.tensor(config[FREQUENCIES], dtype=torch.float32)
    size = head_size(config)
    return 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)


def _stack(item: tuple[str, str]) -> str:
    prefix, number, _ = item[0].partition("{}")
    return prefix if number else ""


def _letters(ours: str) -> str:
    module, kind = ours.split(".")[-2:]
    if module in _SHAPES:
        return _SHAPES[module][kind == "bias"]
    if "norm" not in module:
        raise UserError(f"the shape of {ours} is unknown: add it to WeightNames.shapes of the model class")
    return "H"
