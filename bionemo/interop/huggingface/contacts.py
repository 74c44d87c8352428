# SPDX-License-Identifier: Apache-2.0
"""The regression on attention by which ESM-2 tells contacts: transformers keep it among the weights.

It is no part of the network here: of a checkpoint it is a part of what is known of its model.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bionemo.checkpoint import Piece
from bionemo.common.errors import UserError
from bionemo.interop.shape_check import MOST_LAYERS, Shape, size_of

ContactHead = Mapping[str, Any]  # {"weight": of the heads of the first layer, the second, ..., "bias"}


def contact_shapes(name: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """What it is called there, and how large it is for a model of our configuration.

    Args:
        name: before `.weight` and `.bias`; "": there is none.
        config: the model section.
    """
    if not name:
        return {}
    heads = size_of(config, "num_layers", MOST_LAYERS) * size_of(config, "num_attention_heads")
    return {f"{name}.weight": (1, heads), f"{name}.bias": (1,)}


def to_head(weight: Tensor, bias: Tensor) -> ContactHead:
    """Plain numbers, in which every value of fp32, fp16 and bf16 is exact."""
    return {"weight": weight.float().flatten().tolist(), "bias": bias.float().item()}


def checked(head: object, config: Mapping[str, Any]) -> ContactHead | None:
    """What a checkpoint says is one, of whoever's making.

    Raises:
        UserError: when it is none for a model of this configuration.
    """
    if head is None:
        return None
    match head:
        case {"weight": list(weight), "bias": float(bias)}:
            heads = size_of(config, "num_layers", MOST_LAYERS) * size_of(config, "num_attention_heads")
            if len(weight) == heads and all(type(each) is float and math.isfinite(each) for each in [*weight, bias]):
                return {"weight": weight, "bias": bias}
    raise UserError("its contact head is none of a weight for each head of each layer, and a bias")


def to_pieces(shapes: Mapping[str, Shape], head: ContactHead | None, dtype: torch.dtype) -> list[Piece]:
    """What is written; zeros for one that is not there, which finds every contact as likely as not."""
    values = (head["weight"], head["bias"]) if head else (0.0, 0.0)
    return [
        Piece(name, shape, (0,) * len(shape), torch.empty(shape, dtype=dtype).copy_(torch.tensor(value)))
        for (name, shape), value in zip(shapes.items(), values, strict=False)
    ]
