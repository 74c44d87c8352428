# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention over packed sequences: every token attends to the tokens of its own sequence.

Shapes: T tokens of a pack, H heads, d head size, N sequences.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from bionemo.megatron.cpu_attention import packed_attention


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a pack lie, and what attention needs to know of them.

    Travels through Megatron's layers in the place of its PackedSeqParams.
    """

    lengths: tuple[int, ...]  # tokens of each sequence; filler tokens after the last one are in none
    boundaries: Tensor  # [N + 1 + fillers] int32 on the device: cumulative lengths, fillers included
    longest: int
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, each [T, 1, d]
    qkv_format: ClassVar[str] = "packed"  # not one of Megatron's own: it leaves such tensors alone


class PackedAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v within each sequence, in the place of Megatron's core attention."""

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        **position: Any,  # layer_number, attn_mask_type, ...: Megatron tells, nothing here depends on it
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Segments,
        **unused: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, 1, H, d], as are key and value.
            key: see query.
            value: see query.
            attention_mask: unused, the segments say it all.
            packed_seq_params: the sequences of this pack.
            unused: attn_mask_type and attention_bias, which Megatron passes always.

        Returns:
            [T, 1, H * d]
        """
        segments = packed_seq_params
        q_THd, k_THd, v_THd = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if segments.rotary is not None:
            q_THd, k_THd = rotate(q_THd, *segments.rotary), rotate(k_THd, *segments.rotary)
        dropout = self.dropout if self.training else 0.0
        out_THd = attend(q_THd, k_THd, v_THd, segments, self.scale, dropout)
        return out_THd.reshape(len(out_THd), 1, -1)


def attend(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, segments: Segments, scale: float, dropout: float) -> Tensor:
    """Choose the fastest exact attention for the device; [T, H, d] in and out."""
    if dropout == 0.0 and not q_THd.is_cuda:
        return _on_cpu(q_THd, k_THd, v_THd, segments.lengths, scale)
    if dropout == 0.0 and v_THd.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        edges, longest = segments.boundaries, segments.longest
        return cast(Tensor, varlen_attn(q_THd, k_THd, v_THd, edges, edges, longest, longest, scale=scale))
    return _per_sequence(q_THd, k_THd, v_THd, segments.lengths, scale, dropout)


# Sequence lengths differ in every batch, and each would be a graph of its own: these two stay out of torch.compile.
_on_cpu = torch.compiler.disable(packed_attention)


@torch.compiler.disable
def _per_sequence(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, lengths: tuple[int, ...], scale: float, dropout: float
) -> Tensor:
    """One scaled_dot_product_attention a sequence; filler tokens get zeros."""
    filler = len(q_THd) - sum(lengths)
    pieces = [
        F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale, dropout_p=dropout
        )[0].transpose(0, 1)
        for q, k, v in zip(*(x[: len(x) - filler].split(lengths) for x in (q_THd, k_THd, v_THd)), strict=True)
    ]
    return torch.cat([*pieces, torch.zeros_like(v_THd[len(v_THd) - filler :])])


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its position's angle (Su et al. 2021, eq. 34, half-split layout)."""
    left, right = x_THd.chunk(2, dim=-1)
    return x_THd * cos_T1d.to(x_THd.dtype) + torch.cat((-right, left), dim=-1) * sin_T1d.to(x_THd.dtype)


def rotary_angles(positions_T: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position / 10000^(2i/d), each [T, 1, d] in fp32, the d/2 angles twice over."""
    exponents = torch.arange(0, head_size, 2, device=positions_T.device, dtype=torch.float32) / head_size
    angles = torch.outer(positions_T.float(), 1.0 / 10000.0**exponents)
    angles_T1d = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles_T1d.cos(), angles_T1d.sin()
