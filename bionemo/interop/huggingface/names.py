# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face's transformers call each weight of a model, and how its values lie there.

Words: ours are padded to a multiple, theirs are not. Query, key and value: ours lie head by head, theirs one after
the other or apart. Matrices: some of theirs lie transposed. Values are moved, never changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bionemo.checkpoint import Piece
from bionemo.interop.shape_check import MOST_LAYERS, Shape, size_of

# Our module -> theirs, or several with a space between whose weights are thirds of ours; the shape of our weight,
# that of our bias. H hidden, Q three times that, head by head, F feed-forward, L positions, V words.
Modules = Mapping[str, tuple[str, str, str]]


class Weight(NamedTuple):
    """One weight of ours.

    Attributes:
        theirs: names there; several are equal parts of its first dimension.
        shape: of ours.
        words: if not 0, how many of its first rows there are there; the others are padding.
        heads: if not 0, their number: its first dimension is query, key and value of each.
        transposed: theirs are.
    """

    theirs: tuple[str, ...]
    shape: Shape
    words: int = 0
    heads: int = 0
    transposed: bool = False

    def to_theirs(self, ours: Tensor) -> dict[str, Tensor]:
        """Give what stands under their names; views where possible."""
        if self.words:
            ours = ours[: self.words]
        if self.heads:
            ours = ours.view(self.heads, 3, -1, *self.shape[1:]).transpose(0, 1).reshape(self.shape)
        parts = ours.chunk(len(self.theirs))
        return {name: part.T if self.transposed else part for name, part in zip(self.theirs, parts, strict=True)}

    def to_ours(self, read: Callable[[str], Tensor]) -> Tensor:
        """Put ours together from what stands under their names; rows that pad are 0."""
        parts = [read(name).T if self.transposed else read(name) for name in self.theirs]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.heads:
            whole = whole.reshape(3, self.heads, -1, *self.shape[1:]).transpose(0, 1).reshape(self.shape)
        if self.words:
            padding = whole.new_zeros(self.shape[0] - self.words, *self.shape[1:])
            whole = torch.cat([whole, padding]) if len(padding) else whole
        return whole

    def their_shapes(self) -> dict[str, Shape]:
        """Shape of each of theirs."""
        return {
            name: tuple(part.shape) for name, part in self.to_theirs(torch.empty(self.shape, device="meta")).items()
        }


def _none(_: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
        ours: class path in our configurations.
        model_type, name: theirs, in config.json.
        to_settings: what config.json says of a model of our configuration with so many words.
        to_config: our configuration out of a config.json, and the number of words.
        prefix: before names of weights, which files of the bare model leave out.
        ends: what there is besides the layers.
        outside: of that, what has no prefix.
        optional: what else there is, unless this key of our configuration says no.
        positions: the position_embedding_type by which it differs from others of its model_type; "": there are none.
        before: rows of the table of positions that are of none.
        stack: our name of the layers, and theirs.
        layer: one of them.
        transposed: matrices of the layers are.
        computed: patterns of names there that are no weights, or of no use.
        copies: names there under which a weight may stand again, and its own.
        frequencies: name of the angles of rotary positions in a layer, which are computed, but not missed by some
            versions without a warning; "": there are none.
        contacts: a regression on attention, without which theirs is not whole (ContactHead); "": there is none.
        tokenizer: text of the files that tell of the vocabulary, by their names, for a configuration of ours.
        read_tokenizer: what they say, as our configuration has it.
    """

    ours: str
    model_type: str
    name: str
    to_settings: Callable[[Mapping[str, Any], int], dict[str, Any]]
    to_config: Callable[[Mapping[str, Any]], tuple[dict[str, Any], int]]
    prefix: str
    ends: Modules
    stack: tuple[str, str]
    layer: Modules
    outside: Modules = field(default_factory=dict)
    optional: Mapping[str, Modules] = field(default_factory=dict)
    positions: str = ""
    before: int = 0
    transposed: bool = False
    computed: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    frequencies: str = ""
    contacts: str = ""
    tokenizer: Callable[[Mapping[str, Any]], dict[str, str]] = _none
    read_tokenizer: Callable[[Path], dict[str, Any]] = _none

    def computed_pieces(self, config: Mapping[str, Any], dtype: torch.dtype) -> list[Piece]:
        """Tensors that are written beside the weights."""
        if not self.frequencies:
            return []
        size = size_of(config, "hidden_size") // size_of(config, "num_attention_heads")
        values = (1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)).to(dtype)
        names = map(self.frequencies.format, range(size_of(config, "num_layers", MOST_LAYERS)))
        return [Piece(name, tuple(values.shape), (0,), values) for name in names]

    def howto(self, directory: str) -> str:
        """Python that opens what is written."""
        return f"from transformers import {self.name}\n\nmodel = {self.name}.from_pretrained({directory!r})"

    def table(self, config: Mapping[str, Any], words: int) -> dict[str, Weight]:
        """Every weight that a model of our configuration has, by our names.

        Raises:
            UserError: when a size is missing or out of range.
        """
        hidden = size_of(config, "hidden_size")
        multiple = size_of(config, "make_vocab_size_divisible_by")
        sizes = {
            "H": hidden,
            "Q": 3 * hidden,
            "F": size_of(config, "ffn_hidden_size"),
            "L": self.before + size_of(config, "max_position_embeddings"),
            "V": -(-words // multiple) * multiple,
        }
        heads = size_of(config, "num_attention_heads")
        found: dict[str, Weight] = {}

        def add(ours: str, theirs: str, shapes: tuple[str, str], transposed: bool, prefix: str = self.prefix) -> None:
            for kind, letters in zip(("weight", "bias"), shapes, strict=True):
                if letters:
                    found[f"{ours}.{kind}"] = Weight(
                        tuple(f"{prefix}{name}.{kind}" for name in theirs.split()),
                        tuple(sizes[letter] for letter in letters),
                        words=words if letters[0] == "V" else 0,
                        heads=heads if letters[0] == "Q" else 0,
                        transposed=transposed and len(letters) == 2,
                    )

        chosen = [self.ends, *(modules for key, modules in self.optional.items() if config.get(key, True))]
        for ours, (theirs, *shapes) in chain.from_iterable(modules.items() for modules in chosen):
            add(ours, theirs, (shapes[0], shapes[1]), False)
        for ours, (theirs, *shapes) in self.outside.items():
            add(ours, theirs, (shapes[0], shapes[1]), False, "")
        for number in range(size_of(config, "num_layers", MOST_LAYERS)):
            stack, their_stack = (f"{name}.{number}." for name in self.stack)
            for ours, (theirs, *shapes) in self.layer.items():
                names = " ".join(their_stack + name for name in theirs.split())
                add(stack + ours, names, (shapes[0], shapes[1]), self.transposed)
        return found
