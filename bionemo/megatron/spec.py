# SPDX-License-Identifier: Apache-2.0
"""The layer specification: which modules Megatron-Core's TransformerBlock is put together from.

Undivided, the linear modules are plain ones, and a whole layer is one torch.compile graph, which Megatron's own
`local` specification is not. Shapes: T tokens of a pack (of this rank's stretch of it, with sequence parallelism),
B = 1, D hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bionemo.config.schema import EncoderConfig
from bionemo.megatron import groups
from bionemo.megatron.attention import PackedAttention, Segments, in_autocast_dtype
from bionemo.megatron.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, dropout, site


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


class RecomputedAttention(PackedAttention):
    """Attention that keeps its inputs alone and computes again in the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend; see PackedAttention."""
        attend = partial(super().forward, **kwargs)
        recomputed: Tensor = checkpoint(attend, *args, use_reentrant=False, preserve_rng_state=False)
        return recomputed


class EncoderLayer(TransformerLayer):
    """One pre-LN layer: x + Attention(LN(x)), then x + MLP(LN(x)), biases on every linear module.

    Megatron builds it; what it computes stands here, because its dropout must know which tokens it sees. The residual
    stream stays in its own precision, whatever the products are computed in.
    """

    def forward(self, x_TBD: Tensor, segments: Segments, keys_T: Tensor | None) -> Tensor:
        """Encode [T, B, D]; `keys_T` are those of the tokens in x, which may be a stretch of the segments' tokens."""
        attended, _ = self.self_attention(self.input_layernorm(x_TBD), attention_mask=None, packed_seq_params=segments)
        x_TBD = x_TBD + self._drop(attended, keys_T, ATTENTION_OUTPUT)
        transformed, _ = self.mlp(self.pre_mlp_layernorm(x_TBD))
        return x_TBD + self._drop(transformed, keys_T, MLP_OUTPUT)

    def _drop(self, x_TBD: Tensor, keys_T: Tensor | None, place: int) -> Tensor:
        if not self.training or self.hidden_dropout == 0:
            return x_TBD
        assert keys_T is not None
        return dropout(x_TBD, keys_T, site(self.layer_number, place), self.hidden_dropout)


class EncoderBlock(TransformerBlock):
    """The layers of this pipeline stage, and after the last of all the final layer normalisation."""

    def __init__(self, config: EncoderConfig) -> None:
        layers = config.num_layers // groups.stages()
        super().__init__(
            transformer_config(config),
            TransformerBlockSubmodules(layer_specs=[encoder_layer(config)] * layers, layer_norm=LayerNorm),
            pre_process=groups.first_stage(),
            post_process=groups.last_stage(),
            pg_collection=groups.collection(),
        )
        self.stretches = list(_stretches(config, layers))

    def forward(self, x_TBD: Tensor | None, segments: Segments) -> Tensor:
        """Encode [T, B, D]; stages after the first take what `set_input_tensor` was given instead of `x_TBD`."""
        hidden = x_TBD if self.pre_process else self.input_tensor
        assert hidden is not None
        keys_T = segments.keys
        if keys_T is not None and self.config.sequence_parallel:
            keys_T = keys_T.chunk(groups.tensor_size())[groups.tensor_rank()]

        def run(hidden: Tensor, layers: range) -> Tensor:
            for number in layers:
                hidden = self.layers[number](hidden, segments, keys_T)
            return hidden

        for layers, recompute in self.stretches:
            if recompute and self.training:
                hidden = checkpoint(run, hidden, layers, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden, layers)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


def _stretches(config: EncoderConfig, layers: int) -> list[tuple[range, bool]]:
    """Which layers of a stage run together, and whether their activations are computed again instead of kept.

    `uniform` keeps the input of every `activations_checkpoint_num_layers` layers; `block` does so for each of the
    first that many layers and keeps everything of the others.
    """
    if config.activations_checkpoint_granularity != "full":
        return [(range(layers), False)]
    size = config.activations_checkpoint_num_layers or 1
    if config.activations_checkpoint_method == "block":
        return [*((range(n, n + 1), True) for n in range(min(size, layers))), (range(size, layers), False)]
    return [(range(first, min(first + size, layers)), True) for first in range(0, layers, size)]


def encoder_layer(config: EncoderConfig) -> ModuleSpec:
    """What a layer is put together from."""
    divided = groups.tensor_size() > 1
    column, row = (ColumnLinear, RowLinear) if divided else (Linear, Linear)
    selective = config.activations_checkpoint_granularity == "selective"
    return ModuleSpec(
        module=EncoderLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LayerNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.padding},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=RecomputedAttention if selective else PackedAttention,
                    linear_proj=row,
                ),
            ),
            pre_mlp_layernorm=LayerNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        ),
    )


def transformer_config(config: EncoderConfig) -> TransformerConfig:
    """Say in Megatron's words what our configuration says, for as many ranks as there are."""
    tensor, stages = groups.tensor_size(), groups.stages()
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        kv_channels=config.kv_channels,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        layernorm_epsilon=config.layernorm_epsilon,
        activation_func=nn.functional.gelu,  # exact, by the error function
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32 if stages > 1 else None,  # of the residual stream
        sequence_parallel=config.sequence_parallel and tensor > 1,
        use_cpu_initialization=True,  # that is, on the device torch has been told, which may be none
        perform_initialization=False,  # models/encoder.py draws the weights, equal for every layout
        calculate_per_token_loss=True,  # gradients are sums; training divides by the tokens of all ranks at once
        gradient_accumulation_fusion=False,
    )
