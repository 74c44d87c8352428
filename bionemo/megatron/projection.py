# SPDX-License-Identifier: Apache-2.0
"""Self- and cross-attention whose projections are split into heads, and their gradients merged, in one pass each.

The projection has the heads' queries, keys and values (or keys and values) next to each other. Autograd would rotate
the gradients of the parts and then concatenate them. On a GPU, the backward pass here writes each gradient, rotated
back, to its place in the gradient of the projection.

Shapes: T tokens, B = 1, D hidden size, H heads of this rank, n parts of a head, d head size.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bionemo.megatron import attention
from bionemo.megatron.attention import PackedSequences
from bionemo.megatron.linear import HeadsNorm


class PackedSelfAttention(SelfAttention):
    """Self-attention within each sequence.

    Args:
        recompute: save only the projection for the backward pass.
        norm: normalize queries and keys, see HeadsNorm.
    """

    def __init__(self, *arguments: Any, recompute: bool = False, norm: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recompute, self.norm = recompute, norm
        if norm:
            channels = self.config.num_attention_heads * self.hidden_size_per_attention_head
            self.query_norm, self.key_norm = HeadsNorm(self.config, channels), HeadsNorm(self.config, channels)

    def forward(self, hidden_TBD: Tensor, *unused: Any, packed_seq_params: PackedSequences, **others: Any) -> Any:
        """Return [T, B, D] and None."""
        mixed, _ = self.linear_qkv(hidden_TBD)

        def attend(mixed: Tensor) -> Tensor:
            rotary = packed_seq_params.rotary
            q, k, v = split_heads(mixed, 3, self.num_attention_heads_per_partition, None if self.norm else rotary)
            if self.norm:
                q, k = (norm(x.squeeze(1)) for norm, x in ((self.query_norm, q), (self.key_norm, k)))
                q, k = (_Rotate.apply(x, *rotary)[:, None] if rotary else x[:, None] for x in (q, k))
            return cast(Tensor, self.core_attention(q, k, v, packed_seq_params=packed_seq_params))

        return self.linear_proj(_run(attend, self.recompute, mixed))


class PackedCrossAttention(CrossAttention):
    """Attention of each sequence to its sequence of `key_value_states`; otherwise as PackedSelfAttention."""

    def __init__(self, *arguments: Any, recompute: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recompute = recompute

    def forward(
        self, hidden_TBD: Tensor, *unused: Any, key_value_states: Tensor, packed_seq_params: PackedSequences,
        **others: Any,
    ) -> Any:  # fmt: skip
        """Return [T, B, D] and None."""
        heads = self.num_attention_heads_per_partition
        query, _ = self.linear_q(hidden_TBD)
        mixed, _ = self.linear_kv(key_value_states)

        def attend(query: Tensor, mixed: Tensor) -> Tensor:
            k, v = split_heads(mixed, 2, heads)
            q = query.unflatten(-1, (heads, -1))
            return cast(Tensor, self.core_attention(q, k, v, packed_seq_params=packed_seq_params))

        return self.linear_proj(_run(attend, self.recompute, query, mixed))


def _run(function: Callable[..., Tensor], recompute: bool, *inputs: Tensor) -> Tensor:
    if not recompute:
        return function(*inputs)
    return cast(Tensor, checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False))


def split_heads(
    mixed_TBP: Tensor, parts: int, heads: int, rotary: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Return the `parts` of a projection, each [T, B, H, d]; rotate the first two by their positions.

    Args:
        mixed_TBP: [T, B, H * parts * d].
        parts: 3 for queries, keys and values, 2 for keys and values.
        heads: H.
        rotary: cos and sin, each [T, 1, d]; None: no rotary positions.
    """
    mixed_THnd = mixed_TBP.squeeze(1).unflatten(-1, (heads, parts, -1))
    return tuple(x[:, None] for x in _Split.apply(mixed_THnd, *(rotary or (None, None))))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        parts = mixed.unbind(2)
        if cos is None or sin is None:
            return parts
        return rotate(parts[0], cos, sin), rotate(parts[1], cos, sin), *parts[2:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return merge_heads(gradients, *ctx.saved_tensors), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(gradients[0], cos, -sin), None, None


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by the angle of its position (Su et al. 2021, eq. 34, half-split layout)."""
    if x_THd.is_cuda and attention.gpu_has_triton():
        from bionemo.megatron.triton_rotary import rotate as triton_rotate

        return cast(Tensor, triton_rotate(x_THd, cos_T1d, sin_T1d))
    return _rotate(x_THd, cos_T1d, sin_T1d)


def merge_heads(gradients: tuple[Tensor, ...], cos_T1d: Tensor | None, sin_T1d: Tensor | None) -> Tensor:
    """Return the gradient of the projection, [T, H, n, d], from those of its parts; the inverse of `split_heads`."""
    if gradients[0].is_cuda and gradients[0].shape[-1] % 2 == 0 and attention.gpu_has_triton():
        from bionemo.megatron.triton_rotary import merge

        return cast(Tensor, merge(list(gradients), cos_T1d, sin_T1d))
    if cos_T1d is not None and sin_T1d is not None:
        gradients = *(_rotate(x, cos_T1d, -sin_T1d) for x in gradients[:2]), *gradients[2:]
    return torch.stack(gradients, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    if torch.compiler.is_compiling():  # the compiler fuses the operations
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
