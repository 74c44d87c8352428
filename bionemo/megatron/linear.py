# SPDX-License-Identifier: Apache-2.0
"""Matrix products and norms behind Megatron-Core's builder interfaces: whole, or divided over the tensor ranks.

Shapes: T tokens of a pack (of this rank's stretch of it, with sequence parallelism), B = 1, D hidden size.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from bionemo.megatron.attention import in_autocast_dtype


class Linear(nn.Linear):
    """A linear module behind Megatron's builder interface: returns (output, bias left to add), here always none."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,  # Megatron would fuse the bias with what follows; a GEMM adds it for free
        **parallel_layout: Any,  # gather_output, input_is_parallel, ...: without tensor parallelism all the same
    ) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)

    def forward(self, x_TBD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Multiply, bias included."""
        return super().forward(x_TBD), None


class ColumnLinear(ColumnParallelLinear):
    """Linear whose outputs are divided over the tensor ranks.

    Inputs are cast before Megatron sees them: it would keep and communicate fp32.
    """

    def __init__(self, *sizes: int, skip_bias_add: bool, **options: Any) -> None:
        super().__init__(*sizes, skip_bias_add=True, **options)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x_TBD: Tensor) -> tuple[Tensor, None]:
        """Multiply, bias included."""
        return _with_bias(*super().forward(in_autocast_dtype(x_TBD)))


class RowLinear(RowParallelLinear):
    """Linear whose inputs are divided over the tensor ranks; their products are added up, then the bias."""

    def __init__(self, *sizes: int, skip_bias_add: bool, **options: Any) -> None:
        super().__init__(*sizes, skip_bias_add=True, **options)
        set_tensor_model_parallel_attributes(self.weight, True, 1, 1)

    def forward(self, x_TBD: Tensor) -> tuple[Tensor, None]:
        """Multiply, bias included."""
        return _with_bias(*super().forward(in_autocast_dtype(x_TBD)))


def _with_bias(product: Tensor, bias: Tensor) -> tuple[Tensor, None]:
    """Add in the product's own format: a bias of fp32 would make one of what follows."""
    return product + bias.to(product.dtype), None


class LayerNorm(nn.LayerNorm):
    """Layer normalisation behind Megatron's builder interface."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():  # each tensor rank sees a stretch of the sequence: gradients are summed
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
