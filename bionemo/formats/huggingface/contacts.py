# SPDX-License-Identifier: Apache-2.0
"""The logistic regression on attention maps with which ESM-2 predicts contacts.

transformers stores it among the weights. Here it is not part of the network, but an entry of a checkpoint's state.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bionemo.checkpoint import Piece
from bionemo.common.errors import UserError
from bionemo.formats.shape_check import MAX_LAYERS, Shape, get_size

ContactHead = Mapping[
    str, Any
]  # {"weight": numbers for the heads of the first layer, the second, ..., "bias": number}


def contact_shapes(name: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the names and shapes of the tensors `name.weight` and `name.bias`; empty if name is ""."""
    return {f"{name}.weight": (1, _count_heads(config)), f"{name}.bias": (1,)} if name else {}


def to_contact_head(weight: Tensor, bias: Tensor) -> ContactHead:
    """Convert tensors to Python floats, which represent every value of fp32, fp16 and bf16 exactly."""
    return {"weight": weight.float().flatten().tolist(), "bias": bias.float().item()}


def check_contact_head(head: object, config: Mapping[str, Any]) -> ContactHead | None:
    """Return the contact head in the state of a checkpoint, which may come from an untrusted source.

    Raises:
        UserError: if it is not a contact head of a model with this configuration.
    """
    if head is None:
        return None
    match head:
        case {"weight": list(weight), "bias": float(bias)} if len(weight) == _count_heads(config):
            if all(type(each) is float and math.isfinite(each) for each in [*weight, bias]):
                return {"weight": weight, "bias": bias}
    raise UserError("its contact head must have one finite weight for each head of each layer, and a bias")


def to_pieces(shapes: Mapping[str, Shape], head: ContactHead | None, dtype: torch.dtype) -> list[Piece]:
    """Convert a contact head to tensors; zeros replace a missing one, with which every contact has probability 0.5."""
    values = (head["weight"], head["bias"]) if head else (0.0, 0.0)
    return [
        Piece(name, shape, (0,) * len(shape), torch.empty(shape, dtype=dtype).copy_(torch.tensor(value)))
        for (name, shape), value in zip(shapes.items(), values, strict=False)
    ]


def _count_heads(config: Mapping[str, Any]) -> int:
    return get_size(config, "num_layers", MAX_LAYERS) * get_size(config, "num_attention_heads")
