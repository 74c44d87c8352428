# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation (Hu et al. 2021, equation 3): W x + U D x, where W stays and the narrow D and U are trained.

Divided over the tensor ranks as W is, so that what a rank adds is its own part of U D. Shapes: T tokens of a pack
(of this rank's stretch of it, with sequence parallelism), B = 1, R rank of the adapter.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from bionemo.checkpoint.merged_lora import UP
from bionemo.megatron.layer_spec import Block
from bionemo.megatron.linear import ColumnLinear, RowLinear
from bionemo.megatron.sharding import Placement

# NeMo's names of what can be adapted
MODULES = {
    "attention_qkv": "self_attention.linear_qkv",
    "attention_dense": "self_attention.linear_proj",
    "mlp_fc1": "mlp.linear_fc1",
    "mlp_fc2": "mlp.linear_fc2",
}


class Adapter(nn.Module):
    """What is added to a linear module's output.

    Args:
        module: a linear module of a layer; its weight is [out, in], this rank's part of it.
        rank: R.
        sequence_parallel: whether ranks have a stretch of the tokens each, between the divided modules.
    """

    def __init__(self, module: nn.Module, rank: int, sequence_parallel: bool) -> None:
        super().__init__()
        weight: Any = module.weight
        self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.up = nn.Parameter(weight.new_empty(weight.shape[0], rank))
        self.column, self.row = isinstance(module, ColumnLinear), isinstance(module, RowLinear)
        self.sequence_parallel = sequence_parallel
        if self.column:
            set_tensor_model_parallel_attributes(self.up, True, 0, 1)
            whole = self.down
        elif self.row:
            set_tensor_model_parallel_attributes(self.down, True, 1, 1)
            whole = self.up
        if self.column or self.row:  # it sees a stretch of the sequence alone: gradients are summed
            vars(whole)["sequence_parallel"] = sequence_parallel

    def forward(self, x_TBD: Tensor) -> Tensor:
        """Compute what is added, [T, B, out]."""
        narrow_TBR = nn.functional.linear(x_TBD, self.down)
        if self.column and self.sequence_parallel:
            narrow_TBR = gather_from_sequence_parallel_region(narrow_TBR, tensor_parallel_output_grad=True)
        elif self.column:
            narrow_TBR = copy_to_tensor_model_parallel_region(narrow_TBR)
        elif self.row and self.sequence_parallel:
            narrow_TBR = reduce_scatter_to_sequence_parallel_region(narrow_TBR)
        elif self.row:
            narrow_TBR = reduce_from_tensor_model_parallel_region(narrow_TBR)
        return nn.functional.linear(narrow_TBR, self.up)


def adapt(block: Block, rank: int, modules: Collection[str]) -> None:
    """Put an adapter beside linear modules of every layer of a block.

    Args:
        block: of layers.
        rank: R.
        modules: of MODULES.
    """
    for layer in block.layers:
        for name in modules:
            module = layer.get_submodule(MODULES[name])
            module.add_module("adapter", Adapter(module, rank, block.config.sequence_parallel))
            module.register_forward_hook(_add)


def _add(module: Any, inputs: tuple[Tensor], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    product, _ = output
    return product + module.adapter(inputs[0]), None


@torch.no_grad()
def initialise(parameter: nn.Parameter, place: Placement, generator: torch.Generator) -> None:
    """Draw an adapter so that it adds nothing yet: U is 0, D is N(0, 2 / (in + R)) (Glorot and Bengio 2010)."""
    if place.name.endswith(UP):
        parameter.zero_()
        return
    whole = torch.empty(place.shape, device=parameter.device)
    whole.normal_(0.0, math.sqrt(2 / sum(place.shape)), generator=generator)
    parameter.copy_(place.part_of(whole, parameter))
