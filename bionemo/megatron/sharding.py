# SPDX-License-Identifier: Apache-2.0
"""Where each parameter of this process lies in the whole model.

Everything that must not depend on the layout starts here: initial weights, gradient norms, checkpoints.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from bionemo.megatron import groups


@dataclass(frozen=True)
class Placement:
    """One parameter.

    Attributes:
        name: in the whole model.
        shape: of the whole tensor.
        offset: of this process's part in it.
        ours: whether this process speaks for that part, where several of the processes that hold one model have it.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    ours: bool

    def part_of(self, whole: Tensor, like: Tensor) -> Tensor:
        """This process's part, of the shape of `like`."""
        for dimension, (start, length) in enumerate(zip(self.offset, like.shape, strict=True)):
            whole = whole.narrow(dimension, start, length)
        return whole


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory, not filled; what Megatron notes on its parameters is kept."""
    notes = {name: vars(parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        vars(parameter).update(notes[name])


def placements(model: nn.Module) -> dict[nn.Parameter, Placement]:
    """Say of every parameter of this process's part of a model where it lies in the whole."""
    numbers = {  # layers are numbered from 0 in every stage; in the whole model the numbers go on
        name + ".": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer)
    }
    found = {}
    for name, parameter in model.named_parameters():
        local = next((prefix for prefix in numbers if name.startswith(prefix)), "")
        whole = numbers.get(local, "") + name.removeprefix(local)
        shape, offset = list(parameter.shape), [0] * parameter.dim()
        divided = getattr(parameter, "partition_dim", -1) if groups.tensor_size() > 1 else -1
        if divided >= 0:
            offset[divided] = groups.tensor_rank() * shape[divided]
            shape[divided] *= groups.tensor_size()
        second = getattr(parameter, "shared_embedding", False) and not groups.first_stage()
        ours = not second and (divided >= 0 or groups.tensor_rank() == 0)
        found[parameter] = Placement(whole, tuple(shape), tuple(offset), ours)
    return found
