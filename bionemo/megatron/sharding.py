# SPDX-License-Identifier: Apache-2.0
"""Shards of the full model's parameters that this process holds.

Initial weights, gradient norms and checkpoints are defined on the full model, so that they do not depend on the
parallel layout.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from bionemo.megatron import groups


@dataclass(frozen=True)
class ParameterShard:
    """The shard of one parameter that this process holds."""

    name: str  # name of the parameter in the full model
    shape: tuple[int, ...]  # shape of the full tensor
    offset: tuple[int, ...]  # offset of the shard in the full tensor
    # whether this process writes and counts the shard if several processes of one model replica hold it
    is_owner: bool

    def slice_of(self, full: Tensor, like: Tensor) -> Tensor:
        """Return the view of the full tensor that corresponds to this shard and has the shape of `like`."""
        for dimension, (start, length) in enumerate(zip(self.offset, like.shape, strict=True)):
            full = full.narrow(dimension, start, length)
        return full


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device; keep the attributes that Megatron set on them."""
    attributes = {name: vars(parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])


def mark_sharded(parameter: Tensor, dimension: int) -> None:
    """Set Megatron's attributes of a parameter that is sharded over the tensor ranks along `dimension`."""
    if not hasattr(parameter, "tensor_model_parallel"):  # megatron-core 0.18 sets them on the weights of its modules
        set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def parameter_shards(model: nn.Module) -> dict[nn.Parameter, ParameterShard]:
    """Return the shard description of every parameter that this process holds."""
    global_prefixes = {  # local layer numbers start at 0 in every pipeline stage
        name + ".": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer)
    }
    shards = {}
    for name, parameter in model.named_parameters():
        prefix = next((prefix for prefix in global_prefixes if name.startswith(prefix)), "")
        global_name = global_prefixes.get(prefix, "") + name.removeprefix(prefix)
        shape, offset = list(parameter.shape), [0] * parameter.dim()
        dimension = getattr(parameter, "partition_dim", -1) if groups.tensor_size() > 1 else -1
        if dimension >= 0:
            offset[dimension] = groups.tensor_rank() * shape[dimension]
            shape[dimension] *= groups.tensor_size()
        is_copy = getattr(parameter, "shared_embedding", False) and not groups.is_first_stage()
        is_owner = not is_copy and (dimension >= 0 or groups.tensor_rank() == 0)
        shards[parameter] = ParameterShard(global_name, tuple(shape), tuple(offset), is_owner)
    return shards
