# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers one token at a time: keys and values of earlier tokens, and of what is attended to, are kept.

Shapes: N sequences that are written side by side, R tokens that there is room for, S of the longest one attended to,
H heads of this rank, d head size, D hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bionemo.megatron.layer_spec import Block, Memory

_GRAIN = 64  # places of a padded memory come in multiples of it: sums over a ragged number end in other bits


@contextmanager
def undivided_sequences(model: nn.Module) -> Iterator[None]:
    """Let every tensor rank see all tokens: there is nothing to divide in one token of each sequence."""
    divided: list[Any] = [part for part in model.modules() if vars(part).get("sequence_parallel") is True]
    divided += {id(part.config): part.config for part in model.modules() if isinstance(part, Block)}.values()
    before = [part.sequence_parallel for part in divided]
    for part in divided:
        part.sequence_parallel = False
    try:
        yield
    finally:
        for part, value in zip(divided, before, strict=True):
            part.sequence_parallel = value


class IncrementalDecoder:
    """Layers that have read a memory, and some tokens of each sequence.

    Args:
        block: of a decoder.
        memory: of the encoder, whole; each of its sequences is attended to by one that is written.
        room: tokens that may be written.
    """

    def __init__(self, block: Block, memory: Memory, room: int) -> None:
        self._block, self._room, self.written = block, room, 0
        lengths = torch.tensor(memory.segments.lengths, device=memory.hidden.device)
        hidden_SD = memory.hidden.squeeze(1)[: int(lengths.sum())].split(memory.segments.lengths)
        padded_SND = nn.utils.rnn.pad_sequence(list(hidden_SD))
        padded_SND = F.pad(padded_SND, (0, 0, 0, 0, 0, -len(padded_SND) % _GRAIN))
        places = torch.arange(len(padded_SND), device=lengths.device)
        self._mask_N11S = (places < lengths[:, None])[:, None, None]
        self._cross = [_heads(layer.cross_attention, padded_SND) for layer in block.layers]
        self._own: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Read one more token of each sequence: its vectors after the final norm, [N, D]."""
        x_1ND = x_ND[None]
        for number, layer in enumerate(self._block.layers):
            normed = layer.input_layernorm(x_1ND)
            q, k, v = (part.permute(1, 2, 0, 3) for part in layer.self_attention.get_query_key_value_tensors(normed))
            keys, values = self._kept(number, k, v)
            out = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype))
            x_1ND = x_1ND + layer.self_attention.linear_proj(_joined(out))[0]

            normed = layer.pre_cross_attn_layernorm(x_1ND)
            q_1NP, _ = layer.cross_attention.linear_q(normed)
            keys, values = self._cross[number]
            q = q_1NP.unflatten(-1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
            out = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), attn_mask=self._mask_N11S)
            x_1ND = x_1ND + layer.cross_attention.linear_proj(_joined(out))[0]

            x_1ND = x_1ND + layer.mlp(layer.pre_mlp_layernorm(x_1ND))[0]
        self.written += 1
        assert self._block.final_layernorm is not None
        hidden: Tensor = self._block.final_layernorm(x_1ND)
        return hidden[0]

    def follow(self, rows: Tensor) -> None:
        """Let each sequence go on with what another one of the same memory has written: which, int64 [N]."""
        past = slice(0, self.written)
        for kept in self._own:
            for x_NHRd in kept:
                x_NHRd[:, :, past] = x_NHRd[rows, :, past]

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences, int64 [M], in this order; one that is named twice goes two ways."""
        self._mask_N11S = self._mask_N11S[rows]
        self._cross = [(keys[rows], values[rows]) for keys, values in self._cross]
        self._own = [(keys[rows], values[rows]) for keys, values in self._own]

    def _kept(self, layer: int, k_NH1d: Tensor, v_NH1d: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, [N, H, written + 1, d]."""
        if layer == len(self._own):
            size = (*k_NH1d.shape[:2], self._room, k_NH1d.shape[-1])
            self._own.append((k_NH1d.new_empty(size), v_NH1d.new_empty(size)))
        now, end = slice(self.written, self.written + 1), slice(0, self.written + 1)
        keys, values = self._own[layer]
        keys[:, :, now], values[:, :, now] = k_NH1d, v_NH1d
        return keys[:, :, end], values[:, :, end]


def _heads(attention: Any, memory_SND: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a memory, each [N, H, S, d]; Megatron keeps those of a head together."""
    mixed, _ = attention.linear_kv(memory_SND)
    heads = attention.num_attention_heads_per_partition
    keys, values = mixed.unflatten(-1, (heads, 2, -1)).permute(3, 1, 2, 0, 4)
    return keys, values


def _joined(out_NH1d: Tensor) -> Tensor:
    """[1, N, H d]."""
    return out_NH1d.permute(2, 0, 1, 3).flatten(2)
