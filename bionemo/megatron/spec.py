# SPDX-License-Identifier: Apache-2.0
"""The layer specification: which modules Megatron-Core's TransformerBlock is put together from.

With plain linear and normalisation modules a whole layer is one torch.compile graph, which Megatron's own `local`
specification is not. Shapes: T tokens of a pack, B = 1, D hidden size.
"""

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from bionemo.config.schema import EncoderConfig
from bionemo.megatron.attention import PackedAttention


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


class LayerNorm(nn.LayerNorm):
    """Layer normalisation behind Megatron's builder interface."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def residual_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return residual + dropout(x), keeping the residual stream in its own precision (Megatron casts it to x's)."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual_TBD: Tensor, probability: float) -> Tensor:
        x_TBD, _ = x_with_bias
        if training and probability > 0:
            x_TBD = nn.functional.dropout(x_TBD, p=probability)
        return residual_TBD + x_TBD

    return add


def encoder_layer() -> ModuleSpec:
    """One pre-LN encoder layer: x + Attention(LN(x)), then x + MLP(LN(x)), biases on every linear module."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LayerNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.padding},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=Linear, core_attention=PackedAttention, linear_proj=Linear
                ),
            ),
            self_attn_bda=residual_dropout_add,
            pre_mlp_layernorm=LayerNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=Linear, linear_fc2=Linear)),
            mlp_bda=residual_dropout_add,
        ),
    )


def encoder_block(config: EncoderConfig) -> TransformerBlock:
    """Stack `config.num_layers` encoder layers and the final layer normalisation."""
    layers = TransformerBlockSubmodules(layer_specs=[encoder_layer()] * config.num_layers, layer_norm=LayerNorm)
    return TransformerBlock(transformer_config(config), layers, pg_collection=_process_groups())


def transformer_config(config: EncoderConfig) -> TransformerConfig:
    """Say in Megatron's words what our configuration says."""
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
        perform_initialization=False,  # models/encoder.py draws the weights, equal for every layout
        calculate_per_token_loss=True,  # gradients are sums; training divides by the tokens of all ranks at once
        gradient_accumulation_fusion=False,
    )


def _process_groups() -> ProcessGroupCollection:
    """The groups Megatron has been initialised with, or none: a model can be built without any distributed set-up."""
    if parallel_state.model_parallel_is_initialized():
        return ProcessGroupCollection.use_mpu_process_groups()
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.pp = None
    return groups
