# SPDX-License-Identifier: Apache-2.0
"""Transformer layers and blocks built from Megatron-Core's modules.

Without tensor parallelism the linear modules are plain ones, so that a whole layer is one torch.compile graph, which
is not the case for Megatron's own `local` specification. Shapes: T tokens (of this rank with sequence parallelism),
S tokens of an encoder's output, B = 1, D hidden size.
"""

import warnings
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import CrossAttentionSubmodules, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bionemo.config.schema import ModelConfig
from bionemo.megatron import groups
from bionemo.megatron.attention import PackedAttention, PackedSequences
from bionemo.megatron.dropout import ATTENTION_OUTPUT, CROSS_OUTPUT, MLP_OUTPUT, dropout, layer_site
from bionemo.megatron.linear import ColumnLinear, LayerNorm, LayerNormWithoutBias, Linear, RowLinear
from bionemo.megatron.projection import PackedCrossAttention, PackedSelfAttention

# "encoder": full self-attention; "causal": causal self-attention; "decoder": causal self- and cross-attention
BlockType = Literal["encoder", "causal", "decoder"]
_ACTIVATIONS = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "swiglu": nn.functional.silu,
}


class EncoderOutput(NamedTuple):
    """Output of an encoder, which a decoder attends to."""

    hidden: Tensor  # [S, B, D], sharded over the sequence like the decoder's hidden states
    sequences: PackedSequences


class PackedTransformerLayer(TransformerLayer):
    """Pre-LN layer: x + Attention(LN(x)), in a decoder x + CrossAttention(LN(x), encoder), then x + MLP(LN(x)).

    The added terms are divided by `residual_divisor`. Megatron builds the submodules. The forward pass is our own
    because dropout depends on the tokens' keys. The residual stream keeps its dtype, also under autocast.
    """

    def __init__(self, *arguments: Any, residual_divisor: float = 1.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.residual_divisor = residual_divisor

    def forward(
        self,
        x_TBD: Tensor,
        sequences: PackedSequences,
        dropout_keys_T: Tensor | None,
        encoder_output: EncoderOutput | None,
    ) -> Tensor:
        """Compute the layer, [T, B, D].

        Args:
            x_TBD: residual stream.
            sequences: sequences of the packed batch.
            dropout_keys_T: dropout keys of the tokens in `x_TBD`; None without dropout.
            encoder_output: input of the cross-attention in a decoder; its sequences are `sequences` with a context.
        """
        output, _ = self.self_attention(self.input_layernorm(x_TBD), attention_mask=None, packed_seq_params=sequences)
        x_TBD = self._add(x_TBD, output, dropout_keys_T, ATTENTION_OUTPUT)
        if encoder_output is not None:
            output, _ = self.cross_attention(
                self.pre_cross_attn_layernorm(x_TBD), attention_mask=None, key_value_states=encoder_output.hidden,
                packed_seq_params=encoder_output.sequences,
            )  # fmt: skip
            x_TBD = self._add(x_TBD, output, dropout_keys_T, CROSS_OUTPUT)
        output, _ = self.mlp(self.pre_mlp_layernorm(x_TBD))
        return self._add(x_TBD, output, dropout_keys_T, MLP_OUTPUT)

    def _add(self, x_TBD: Tensor, output_TBD: Tensor, keys_T: Tensor | None, location: int) -> Tensor:
        if self.training and self.hidden_dropout > 0:
            assert keys_T is not None
            site = layer_site(self.layer_number, location)
            output_TBD = dropout(output_TBD, keys_T, site, self.hidden_dropout)
        return torch.add(x_TBD, output_TBD, alpha=1 / self.residual_divisor)


class GatedMLP(MLP):
    """SwiGLU: W_2 (silu(W_gate x) * W_up x) (Shazeer 2020, eq. 6).

    The rows of `linear_fc1.weight` are gate and up of the first channel, then of the second, and so on, so that each
    tensor rank holds consecutive rows.
    """

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        column, row = _linear_modules()
        super().__init__(
            config, MLPSubmodules(linear_fc1=column, linear_fc2=row), ffn_hidden_size=config.ffn_hidden_size,
            tp_group=groups.collection().tp,
        )  # fmt: skip

    def forward(self, x_TBD: Tensor, *unused: Any, **others: Any) -> tuple[Tensor, None]:
        """Return [T, B, D] and None."""
        inner, _ = self.linear_fc1(x_TBD)
        gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
        if torch.is_grad_enabled() or inner.is_cuda:
            product = nn.functional.silu(gate) * up
        else:  # on CPUs, only the exponential of contiguous channels is vectorized
            product = nn.functional.silu(gate.contiguous(), inplace=True).mul_(up)
        output, _ = self.linear_fc2(product)
        return output, None


class PackedTransformerBlock(TransformerBlock):
    """The layers of this pipeline stage, and on the last stage the final layer norm."""

    def __init__(self, config: ModelConfig, block_type: BlockType) -> None:
        layers = config.num_layers // groups.pipeline_size()
        super().__init__(
            transformer_config(config),
            TransformerBlockSubmodules(
                layer_specs=[layer_spec(config, block_type)] * layers,
                layer_norm=LayerNorm if config.final_norm_bias else LayerNormWithoutBias,
            ),
            pre_process=groups.is_first_stage(),
            post_process=groups.is_last_stage(),
            pg_collection=groups.collection(),
        )
        self.recompute_groups = _recompute_groups(config, layers)

    def forward(
        self, x_TBD: Tensor | None, sequences: PackedSequences, encoder_output: EncoderOutput | None = None
    ) -> Tensor:
        """Compute [T, B, D]; stages after the first use the tensor of `set_input_tensor` instead of `x_TBD`."""
        hidden = x_TBD if self.pre_process else self.input_tensor
        assert hidden is not None
        if encoder_output is not None:  # not in the layers, whose graphs would depend on the number of sequences
            encoder_output = encoder_output._replace(sequences=sequences.with_context(encoder_output.sequences))
        keys_T = sequences.dropout_keys
        if keys_T is not None and self.config.sequence_parallel:
            keys_T = keys_T.chunk(groups.tensor_size())[groups.tensor_rank()]

        def run(hidden: Tensor, layers: range) -> Tensor:
            for number in layers:
                hidden = self.layers[number](hidden, sequences, keys_T, encoder_output)
            return hidden

        for layers, recompute in self.recompute_groups:
            if recompute and self.training:
                hidden = checkpoint(run, hidden, layers, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden, layers)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


def _recompute_groups(config: ModelConfig, layers: int) -> list[tuple[range, bool]]:
    """Divide the layers of a pipeline stage into groups, each with a flag whether its activations are recomputed.

    `uniform` recomputes all layers in groups of `activations_checkpoint_num_layers`; `block` recomputes each of the
    first `activations_checkpoint_num_layers` layers and saves the activations of the others.
    """
    if config.activations_checkpoint_granularity != "full":
        return [(range(layers), False)]
    size = config.activations_checkpoint_num_layers
    if config.activations_checkpoint_method == "block":
        size = 1 if size is None else size
        return [*((range(n, n + 1), True) for n in range(min(size, layers))), (range(size, layers), False)]
    size = size or 1
    return [(range(first, min(first + size, layers)), True) for first in range(0, layers, size)]


def layer_spec(config: ModelConfig, block_type: BlockType) -> ModuleSpec:
    """Return Megatron's specification of a layer."""
    column, row = _linear_modules()
    recompute = config.activations_checkpoint_granularity == "selective"
    cross = ModuleSpec(
        module=PackedCrossAttention,
        params={"attn_mask_type": AttnMaskType.no_mask, "recompute": recompute},
        submodules=CrossAttentionSubmodules(
            linear_q=column, linear_kv=column, core_attention=PackedAttention, linear_proj=row
        ),
    )
    mask = AttnMaskType.no_mask if block_type == "encoder" else AttnMaskType.causal
    return ModuleSpec(
        module=PackedTransformerLayer,
        params={"residual_divisor": config.residual_divisor},
        submodules=TransformerLayerSubmodules(
            input_layernorm=LayerNorm,
            self_attention=ModuleSpec(
                module=PackedSelfAttention,
                params={"attn_mask_type": mask, "recompute": recompute, "norm": config.norm_of_queries_and_keys},
                submodules=SelfAttentionSubmodules(linear_qkv=column, core_attention=PackedAttention, linear_proj=row),
            ),
            pre_cross_attn_layernorm=LayerNorm if block_type == "decoder" else IdentityOp,
            cross_attention=cross if block_type == "decoder" else IdentityOp,
            pre_mlp_layernorm=LayerNorm,
            mlp=_mlp_spec(config, MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        ),
    )


def _linear_modules() -> tuple[type[nn.Module], type[nn.Module]]:
    return (ColumnLinear, RowLinear) if groups.tensor_size() > 1 else (Linear, Linear)


def _mlp_spec(config: ModelConfig, submodules: MLPSubmodules) -> Any:
    if config.activation == "swiglu":
        return GatedMLP
    if hasattr(MLP, "as_mlp_submodule"):  # megatron-core 0.18
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def transformer_config(config: ModelConfig) -> TransformerConfig:
    """Convert a model configuration to Megatron's, for the current process groups."""
    tensor, pipeline = groups.tensor_size(), groups.pipeline_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that the default of an unused option is deprecated
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
            gated_linear_unit=config.activation == "swiglu",
            add_bias_linear=config.linear_bias,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32 if pipeline > 1 else None,  # of the residual stream
            sequence_parallel=config.sequence_parallel and tensor > 1,
            use_cpu_initialization=True,  # allocate on torch's default device, which may be meta
            perform_initialization=False,  # the model initializes its weights, see models/language_model.py
            calculate_per_token_loss=True,  # gradients are sums; train_step.py divides by the number of tokens
            gradient_accumulation_fusion=False,
        )
