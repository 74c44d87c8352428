# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation (LoRA, Hu et al. 2021, eq. 3): W x + U D x with frozen W and trained D and U.

D and U are sharded over the tensor ranks like W. Shapes: T tokens (of this rank with sequence parallelism), B = 1,
R rank of the adapter.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from bionemo.checkpoint.merged_lora import UP
from bionemo.megatron.layer_spec import PackedTransformerBlock
from bionemo.megatron.linear import ColumnLinear, RowLinear
from bionemo.megatron.sharding import ParameterShard, mark_sharded

TARGET_MODULES = {  # NeMo's names of the adapted modules
    "attention_qkv": "self_attention.linear_qkv",
    "attention_dense": "self_attention.linear_proj",
    "mlp_fc1": "mlp.linear_fc1",
    "mlp_fc2": "mlp.linear_fc2",
}


class LoraAdapter(nn.Module):
    """Computes U D x for one linear module.

    Args:
        module: linear module with a weight of shape [out, in] on this rank.
        rank: R.
        sequence_parallel: whether tensor ranks hold different tokens between the sharded modules.
    """

    def __init__(self, module: nn.Module, rank: int, sequence_parallel: bool) -> None:
        super().__init__()
        weight: Any = module.weight
        self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.up = nn.Parameter(weight.new_empty(weight.shape[0], rank))
        self.column, self.row = isinstance(module, ColumnLinear), isinstance(module, RowLinear)
        self.sequence_parallel = sequence_parallel
        if self.column or self.row:
            sharded, replicated = (self.up, self.down) if self.column else (self.down, self.up)
            mark_sharded(sharded, 0 if self.column else 1)
            vars(replicated)["sequence_parallel"] = sequence_parallel  # Megatron sums the gradients over the ranks

    def forward(self, x_TBD: Tensor) -> Tensor:
        """Return U D x, [T, B, out]."""
        hidden_TBR = nn.functional.linear(x_TBD, self.down)
        if self.column and self.sequence_parallel:
            hidden_TBR = gather_from_sequence_parallel_region(hidden_TBR, tensor_parallel_output_grad=True)
        elif self.column:
            hidden_TBR = copy_to_tensor_model_parallel_region(hidden_TBR)
        elif self.row and self.sequence_parallel:
            hidden_TBR = reduce_scatter_to_sequence_parallel_region(hidden_TBR)
        elif self.row:
            hidden_TBR = reduce_from_tensor_model_parallel_region(hidden_TBR)
        return nn.functional.linear(hidden_TBR, self.up)


def add_lora(block: PackedTransformerBlock, ranks: Mapping[str, int]) -> None:
    """Add adapters to linear modules.

    Args:
        block: transformer block.
        ranks: R of each adapted module, by names such as `layers.0.mlp.linear_fc1`.
    """
    for name, rank in ranks.items():
        module = block.get_submodule(name)
        module.add_module("adapter", LoraAdapter(module, rank, block.config.sequence_parallel))
        module.register_forward_hook(_add_adapter_output)


def _add_adapter_output(module: Any, inputs: tuple[Tensor], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    product, _ = output
    return product + module.adapter(inputs[0]), None


@torch.no_grad()
def initialize_lora(parameter: nn.Parameter, shard: ParameterShard, generator: torch.Generator) -> None:
    """Set U to 0, and D to N(0, 2 / (in + R)) (Glorot and Bengio 2010), so that U D x is initially 0."""
    if shard.name.endswith(UP):
        parameter.zero_()
        return
    full = torch.empty(shard.shape, device=parameter.device)
    full.normal_(0.0, math.sqrt(2 / sum(shard.shape)), generator=generator)
    parameter.copy_(shard.slice_of(full, parameter))
