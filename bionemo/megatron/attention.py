# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences: a token attends to its own sequence, all of it or what came before, or to another.

Shapes: T tokens of a pack, S those attended to, H heads, d head size, N sequences.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_pg_rank
from torch import Tensor, nn

from bionemo.megatron.cpu_attention import packed_attention
from bionemo.megatron.dropout import CROSS_PROBABILITIES, PROBABILITIES, AttentionDropout, keep_scale, site


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast as autocast casts the inputs of torch's own matrix products."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a pack lie, and what attention needs to know of them.

    Travels through Megatron's layers in the place of its PackedSeqParams.
    """

    lengths: tuple[int, ...]  # tokens of each sequence; filler tokens after the last one are in none
    boundaries: Tensor  # [N + 1 + fillers] int32 on the device: cumulative lengths, fillers included
    longest: int
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, each [T, 1, d], in the dtype of queries and keys
    keys: Tensor | None = None  # [T] int64, random key of each token, for dropout; None: nothing is dropped
    attended: "Segments | None" = None  # sequences that these attend to, one for each; None: to themselves
    qkv_format: ClassVar[str] = "packed"  # not one of Megatron's own: it leaves such tensors alone

    def towards(self, others: "Segments") -> "Segments":
        """These sequences, each attending to its partner among others, which has positions of its own."""
        return replace(self, attended=others, rotary=None)


class PackedAttention(nn.Module):
    """dropout(softmax(q k^T / sqrt(d))) v within each sequence, in the place of Megatron's core attention.

    Args:
        config: Megatron's.
        layer_number: from 1, over all pipeline stages.
        attn_mask_type: whether a token attends to later ones.
        attention_type: `self` or `cross`.
        softmax_scale: if not 1 / sqrt(d).
        pg_collection: tells which heads are ours; those of all tensor ranks make up the layer.
        unused: cp_comm_type, ..., which Megatron passes always.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.no_mask,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout, self.heads = config.attention_dropout, config.num_attention_heads
        self.site = site(layer_number, CROSS_PROBABILITIES if attention_type == "cross" else PROBABILITIES)
        self.rank = get_pg_rank(pg_collection.tp if pg_collection is not None else None)

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
            query: [T, 1, H, d].
            key: [S, 1, H, d], as is value.
            value: see key.
            attention_mask: unused, the segments say it all.
            packed_seq_params: the sequences of this pack, and those they attend to.
            unused: attn_mask_type and attention_bias, which Megatron passes always.

        Returns:
            [T, 1, H * d]
        """
        segments = packed_seq_params
        q_THd, k_SHd, v_SHd = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if segments.rotary is not None:
            q_THd, k_SHd = rotate(q_THd, *segments.rotary), rotate(k_SHd, *segments.rotary)
        drawn = self._drawn(segments, q_THd.shape[1])
        out_THd = attend(q_THd, k_SHd, v_SHd, segments, self.scale, drawn, self.causal)
        return out_THd.reshape(len(out_THd), 1, -1)

    def _drawn(self, segments: Segments, our_heads: int) -> AttentionDropout | None:
        """Which probabilities are dropped; None: none are."""
        if not self.training or self.dropout == 0:
            return None
        assert segments.keys is not None, "attention dropout needs the keys of the tokens"
        return AttentionDropout(segments.keys, self.site, self.rank * our_heads, self.heads, self.dropout)


def attend(
    q_THd: Tensor,
    k_SHd: Tensor,
    v_SHd: Tensor,
    segments: Segments,
    scale: float,
    dropout: AttentionDropout | None = None,
    causal: bool = False,
) -> Tensor:
    """Choose the fastest exact attention for the device; [T, H, d] and [S, H, d] in, [T, H, d] out."""
    to = segments.attended or segments
    if not q_THd.is_cuda:
        return _on_cpu(q_THd, k_SHd, v_SHd, segments.lengths, scale, dropout, to.lengths, causal)
    # The backward pass of varlen_attn adds up in any order.
    exact = dropout is not None or torch.are_deterministic_algorithms_enabled()
    if not exact and v_SHd.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        edges, longest, window = (segments.boundaries, to.boundaries), (segments.longest, to.longest), (-1, -1)
        if causal:
            window = (-1, 0)
        return cast(Tensor, varlen_attn(q_THd, k_SHd, v_SHd, *edges, *longest, scale=scale, window_size=window))
    return per_sequence(q_THd, k_SHd, v_SHd, segments.lengths, scale, dropout, to.lengths, causal)


# Sequence lengths differ in every batch, and each would be a graph of its own: these two stay out of torch.compile.
_on_cpu = torch.compiler.disable(packed_attention)


@torch.compiler.disable
def per_sequence(
    q_THd: Tensor,
    k_SHd: Tensor,
    v_SHd: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    dropout: AttentionDropout | None,
    key_lengths: tuple[int, ...] | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend in one sequence after the other, on any device; filler tokens get zeros."""
    edges, key_lengths = list(accumulate(lengths, initial=0)), lengths if key_lengths is None else key_lengths
    queries = q_THd[: edges[-1]].split(lengths)
    keys, values = (x[: sum(key_lengths)].split(key_lengths) for x in (k_SHd, v_SHd))
    pieces = []
    for tokens, *parts in zip(map(slice, edges, edges[1:]), queries, keys, values, strict=True):
        q_Hnd, k_Hmd, v_Hmd = (x.transpose(0, 1) for x in parts)
        if dropout is None:
            out_Hnd = F.scaled_dot_product_attention(
                q_Hnd[None], k_Hmd[None], v_Hmd[None], scale=scale, is_causal=causal
            )[0]
        else:
            s_Hnm = (q_Hnd @ k_Hmd.mT).float() * scale
            if causal:
                s_Hnm = s_Hnm.masked_fill(s_Hnm.new_ones(s_Hnm.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
            mask_Hnm = dropout.kept(slice(0, len(q_Hnd)), tokens, k_Hmd.shape[1]).bool()  # kept, a byte each
            p_Hnm = s_Hnm.softmax(-1) * mask_Hnm * keep_scale(dropout.probability)
            out_Hnd = p_Hnm.to(v_Hmd.dtype) @ v_Hmd
        pieces.append(out_Hnd.transpose(0, 1))
    return torch.cat([*pieces, torch.zeros_like(q_THd[edges[-1] :])])


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its position's angle (Su et al. 2021, eq. 34, half-split layout)."""
    left, right = x_THd.chunk(2, dim=-1)
    return x_THd * cos_T1d + torch.cat((-right, left), dim=-1) * sin_T1d


def rotary_angles(positions_T: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position / 10000^(2i/d), each [T, 1, d], the d/2 angles twice over.

    Computed in fp32, and given in what queries and keys will be in: all layers share them.
    """
    exponents = torch.arange(0, head_size, 2, device=positions_T.device, dtype=torch.float32) / head_size
    angles = torch.outer(positions_T.float(), 1.0 / 10000.0**exponents)
    angles_T1d = torch.cat((angles, angles), dim=-1)[:, None, :]
    return in_autocast_dtype(angles_T1d.cos()), in_autocast_dtype(angles_T1d.sin())
