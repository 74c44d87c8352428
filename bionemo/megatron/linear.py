# SPDX-License-Identifier: Apache-2.0
"""Linear modules and layer norm with Megatron-Core's builder interface, sharded over the tensor ranks or not.

Shapes: T tokens (of this rank with sequence parallelism), B = 1, D hidden size.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

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


def _add_bias(product: Tensor, bias: Tensor) -> tuple[Tensor, None]:
    return product + bias.to(product.dtype), None  # adding an fp32 bias would convert the product to fp32


class LayerNorm(nn.LayerNorm):
    """Layer norm with Megatron's builder interface."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():  # Megatron sums the gradients if tensor ranks have different tokens
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
