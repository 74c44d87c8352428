# SPDX-License-Identifier: Apache-2.0
"""Linear modules and layer norms with Megatron-Core's builder interface, sharded over the tensor ranks or not.

Shapes: T tokens (of this rank with sequence parallelism), B = 1, D hidden size, H heads of this rank, d head size,
C = H * d channels.
"""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from bionemo.megatron import groups
from bionemo.megatron.attention import cast_for_autocast
from bionemo.megatron.sharding import mark_sharded


class Linear(nn.Linear):
    """Linear module that is not sharded. Returns (output, None), where Megatron expects (output, bias to add)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,  # ignored: the matrix product adds the bias at no cost
        **parallel_options: Any,  # gather_output, input_is_parallel, ...: without effect here
    ) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)

    def forward(self, x_TBD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the product including the bias."""
        return super().forward(x_TBD), None


class ColumnLinear(ColumnParallelLinear):
    """Linear module whose outputs are sharded over the tensor ranks."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **options: Any) -> None:
        super().__init__(*sizes, skip_bias_add=True, **options)
        mark_sharded(self.weight, 0)

    def forward(self, x_TBD: Tensor) -> tuple[Tensor, None]:
        """Return the product including the bias."""
        # Cast first: Megatron would save and communicate fp32 inputs.
        return _add_bias(*super().forward(cast_for_autocast(x_TBD)))


class RowLinear(RowParallelLinear):
    """Linear module whose inputs are sharded over the tensor ranks; adds the bias after summing the products."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **options: Any) -> None:
        super().__init__(*sizes, skip_bias_add=True, **options)
        mark_sharded(self.weight, 1)

    def forward(self, x_TBD: Tensor) -> tuple[Tensor, None]:
        """Return the product including the bias."""
        return _add_bias(*super().forward(cast_for_autocast(x_TBD)))


def _add_bias(product: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    if bias is None:
        return product, None
    return product + bias.to(product.dtype), None  # adding an fp32 bias would convert the product to fp32


class LayerNorm(nn.LayerNorm):
    """Layer norm with Megatron's builder interface."""

    has_bias: ClassVar[bool] = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, bias=self.has_bias)
        for parameter in self.parameters():  # Megatron sums the gradients if tensor ranks have different tokens
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayerNormWithoutBias(LayerNorm):
    """Layer norm without bias."""

    has_bias = False


class HeadsNorm(nn.Module):
    """Layer norm over the channels of all heads, without bias; the heads may be divided among the tensor ranks."""

    def __init__(self, config: TransformerConfig, channels: int) -> None:
        super().__init__()
        self.eps, self.channels = config.layernorm_epsilon, channels
        self.weight = nn.Parameter(torch.empty(channels // groups.tensor_size()))
        if groups.tensor_size() > 1:
            mark_sharded(self.weight, 0)

    def forward(self, x_THd: Tensor) -> Tensor:
        """Return the normalized heads, [T, H, d] of this rank, in the dtype of `x_THd`."""
        x_TC = x_THd.flatten(1)
        if groups.tensor_size() == 1:
            y_TC = F.layer_norm(x_TC, x_TC.shape[1:], self.weight, eps=self.eps)
        else:
            x_TC = x_TC.float()
            centered = x_TC - _sum_over_ranks(x_TC.sum(-1, keepdim=True)) / self.channels
            variance = _sum_over_ranks(centered.square().sum(-1, keepdim=True)) / self.channels
            y_TC = centered * (variance + self.eps).rsqrt() * self.weight
        return y_TC.to(x_THd.dtype).view_as(x_THd)


def _sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum over the tensor ranks, which each continue with different channels: gradients are summed, too."""
    return cast(Tensor, copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x)))
