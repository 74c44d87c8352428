# SPDX-License-Identifier: Apache-2.0
"""The layer specification: which modules Megatron-Core's TransformerBlock is put together from.

Undivided, the linear modules are plain ones, and a whole layer is one torch.compile graph, which Megatron's own
`local` specification is not. Shapes: T tokens of a pack (of this rank's stretch of it, with sequence parallelism),
S tokens of another that is attended to, B = 1, D hidden size.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bionemo.config.schema import ModelConfig
from bionemo.megatron import groups
from bionemo.megatron.attention import PackedAttention, Segments
from bionemo.megatron.dropout import ATTENTION_OUTPUT, CROSS_OUTPUT, MLP_OUTPUT, dropout, site
from bionemo.megatron.linear import ColumnLinear, LayerNorm, Linear, RowLinear

Kind = Literal[
    "encoder", "causal", "decoder"
]  # sees all of its sequence; the past; the past and an encoder's sequence
_ACTIVATIONS = {"gelu": nn.functional.gelu, "gelu_tanh": partial(nn.functional.gelu, approximate="tanh")}


class Memory(NamedTuple):
    """What an encoder hands to a decoder."""

    hidden: Tensor  # [S, B, D], divided over the sequence as the decoder's own
    segments: Segments


class RecomputedAttention(PackedAttention):
    """Attention that keeps its inputs alone and computes again in the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend; see PackedAttention."""
        attend = partial(super().forward, **kwargs)
        recomputed: Tensor = checkpoint(attend, *args, use_reentrant=False, preserve_rng_state=False)
        return recomputed


class Layer(TransformerLayer):
    """One pre-LN layer: x + Attention(LN(x)), in a decoder x + CrossAttention(LN(x), memory), then x + MLP(LN(x)).

    Megatron builds it; what it computes stands here, because its dropout must know which tokens it sees. The residual
    stream stays in its own precision, whatever the products are computed in.
    """

    def forward(self, x_TBD: Tensor, segments: Segments, keys_T: Tensor | None, memory: Memory | None) -> Tensor:
        """Compute [T, B, D].

        Args:
            x_TBD: the residual stream.
            segments: the sequences of the pack; with a memory, those that they attend to in it, as well.
            keys_T: of the tokens in x, which may be a stretch of the segments' tokens; None: nothing is dropped.
            memory: for a decoder.
        """
        attended, _ = self.self_attention(self.input_layernorm(x_TBD), attention_mask=None, packed_seq_params=segments)
        x_TBD = x_TBD + self._drop(attended, keys_T, ATTENTION_OUTPUT)
        if memory is not None:
            attended, _ = self.cross_attention(
                self.pre_cross_attn_layernorm(x_TBD), attention_mask=None, key_value_states=memory.hidden,
                packed_seq_params=segments.towards(memory.segments),
            )  # fmt: skip
            x_TBD = x_TBD + self._drop(attended, keys_T, CROSS_OUTPUT)
        transformed, _ = self.mlp(self.pre_mlp_layernorm(x_TBD))
        return x_TBD + self._drop(transformed, keys_T, MLP_OUTPUT)

    def _drop(self, x_TBD: Tensor, keys_T: Tensor | None, place: int) -> Tensor:
        if not self.training or self.hidden_dropout == 0:
            return x_TBD
        assert keys_T is not None
        return dropout(x_TBD, keys_T, site(self.layer_number, place), self.hidden_dropout)


class Block(TransformerBlock):
    """The layers of this pipeline stage, and after the last of all the final layer normalisation."""

    def __init__(self, config: ModelConfig, kind: Kind) -> None:
        layers = config.num_layers // groups.stages()
        super().__init__(
            transformer_config(config),
            TransformerBlockSubmodules(layer_specs=[layer_spec(config, kind)] * layers, layer_norm=LayerNorm),
            pre_process=groups.first_stage(),
            post_process=groups.last_stage(),
            pg_collection=groups.collection(),
        )
        self.stretches = list(_stretches(config, layers))

    def forward(self, x_TBD: Tensor | None, segments: Segments, memory: Memory | None = None) -> Tensor:
        """Compute [T, B, D]; stages after the first take what `set_input_tensor` was given instead of `x_TBD`."""
        hidden = x_TBD if self.pre_process else self.input_tensor
        assert hidden is not None
        keys_T = segments.keys
        if keys_T is not None and self.config.sequence_parallel:
            keys_T = keys_T.chunk(groups.tensor_size())[groups.tensor_rank()]

        def run(hidden: Tensor, layers: range) -> Tensor:
            for number in layers:
                hidden = self.layers[number](hidden, segments, keys_T, memory)
            return hidden

        for layers, recompute in self.stretches:
            if recompute and self.training:
                hidden = checkpoint(run, hidden, layers, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden, layers)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


def _stretches(config: ModelConfig, layers: int) -> list[tuple[range, bool]]:
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


def layer_spec(config: ModelConfig, kind: Kind) -> ModuleSpec:
    """What a layer is put together from."""
    divided = groups.tensor_size() > 1
    column, row = (ColumnLinear, RowLinear) if divided else (Linear, Linear)
    core = RecomputedAttention if config.activations_checkpoint_granularity == "selective" else PackedAttention
    cross = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.no_mask},
        submodules=CrossAttentionSubmodules(linear_q=column, linear_kv=column, core_attention=core, linear_proj=row),
    )
    return ModuleSpec(
        module=Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=LayerNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.no_mask if kind == "encoder" else AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(linear_qkv=column, core_attention=core, linear_proj=row),
            ),
            pre_cross_attn_layernorm=LayerNorm if kind == "decoder" else IdentityOp,
            cross_attention=cross if kind == "decoder" else IdentityOp,
            pre_mlp_layernorm=LayerNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        ),
    )


def transformer_config(config: ModelConfig) -> TransformerConfig:
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
        activation_func=_ACTIVATIONS[config.activation],
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32 if stages > 1 else None,  # of the residual stream
        sequence_parallel=config.sequence_parallel and tensor > 1,
        use_cpu_initialization=True,  # that is, on the device torch has been told, which may be none
        perform_initialization=False,  # models/language_model.py draws the weights, equal for every layout
        calculate_per_token_loss=True,  # gradients are sums; training divides by the tokens of all ranks at once
        gradient_accumulation_fusion=False,
    )
