# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding with cached keys and values.

Shapes: N sequences decoded in parallel, S maximum length of an encoder sequence, H heads of this rank, L maximum
number of generated tokens, d head size, D hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bionemo.megatron.layer_spec import EncoderOutput, PackedTransformerBlock

_PAD_MULTIPLE = 64  # pad the encoder output to a multiple of this: sums over other lengths may differ in the last bits


@contextmanager
def sequence_parallel_disabled(model: nn.Module) -> Iterator[None]:
    """Disable sequence parallelism: one token per sequence cannot be sharded."""
    owners: list[Any] = [module for module in model.modules() if vars(module).get("sequence_parallel") is True]
    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PackedTransformerBlock)}
    owners += configs.values()
    previous = [owner.sequence_parallel for owner in owners]
    for owner in owners:
        owner.sequence_parallel = False
    try:
        yield
    finally:
        for owner, value in zip(owners, previous, strict=True):
            owner.sequence_parallel = value


class CachedDecoder:
    """Decoder that processes one token of each sequence per call.

    Args:
        block: transformer block of a decoder.
        encoder_output: unsharded output of the encoder; decoded sequence i attends to its sequence i.
        max_tokens: maximum number of calls.

    Attributes:
        length: number of tokens processed so far.
    """

    def __init__(self, block: PackedTransformerBlock, encoder_output: EncoderOutput, max_tokens: int) -> None:
        self._block, self._max_tokens, self.length = block, max_tokens, 0
        hidden, sizes = encoder_output.hidden, encoder_output.sequences.lengths
        lengths = torch.tensor(sizes, device=hidden.device)
        hidden_SD = hidden.squeeze(1)[: int(lengths.sum())].split(sizes)
        padded_SND = nn.utils.rnn.pad_sequence(list(hidden_SD))
        padded_SND = F.pad(padded_SND, (0, 0, 0, 0, 0, -len(padded_SND) % _PAD_MULTIPLE))
        positions = torch.arange(len(padded_SND), device=lengths.device)
        self._mask_N11S = (positions < lengths[:, None])[:, None, None]
        self._cross_cache = [_cross_keys_values(layer.cross_attention, padded_SND) for layer in block.layers]
        self._self_cache: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Process the next token of each sequence; return the output of the final layer norm, [N, D]."""
        x_1ND = x_ND[None]
        for number, layer in enumerate(self._block.layers):
            normed = layer.input_layernorm(x_1ND)
            q, k, v = (part.permute(1, 2, 0, 3) for part in layer.self_attention.get_query_key_value_tensors(normed))
            keys, values = self._append(number, k, v)
            out = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype))
            x_1ND = x_1ND + layer.self_attention.linear_proj(_merge_heads(out))[0]

            normed = layer.pre_cross_attn_layernorm(x_1ND)
            q_1NP, _ = layer.cross_attention.linear_q(normed)
            keys, values = self._cross_cache[number]
            q = q_1NP.unflatten(-1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
            out = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), attn_mask=self._mask_N11S)
            x_1ND = x_1ND + layer.cross_attention.linear_proj(_merge_heads(out))[0]

            x_1ND = x_1ND + layer.mlp(layer.pre_mlp_layernorm(x_1ND))[0]
        self.length += 1
        assert self._block.final_layernorm is not None
        hidden: Tensor = self._block.final_layernorm(x_1ND)
        return hidden[0]

    def reorder(self, indices: Tensor) -> None:
        """Replace the generated tokens of sequence i by those of `indices[i]`, int64 [N]; the encoder input stays."""
        past = slice(0, self.length)
        for cache in self._self_cache:
            for x_NHLd in cache:
                x_NHLd[:, :, past] = x_NHLd[indices, :, past]

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices`, int64 [M], in this order; a sequence may be repeated."""
        self._mask_N11S = self._mask_N11S[indices]
        self._cross_cache = [(keys[indices], values[indices]) for keys, values in self._cross_cache]
        self._self_cache = [(keys[indices], values[indices]) for keys, values in self._self_cache]

    def _append(self, layer: int, k_NH1d: Tensor, v_NH1d: Tensor) -> tuple[Tensor, Tensor]:
        """Append to the cache of a layer and return its keys and values so far, [N, H, length + 1, d]."""
        if layer == len(self._self_cache):
            size = (*k_NH1d.shape[:2], self._max_tokens, k_NH1d.shape[-1])
            self._self_cache.append((k_NH1d.new_empty(size), v_NH1d.new_empty(size)))
        keys, values = self._self_cache[layer]
        new, all_tokens = slice(self.length, self.length + 1), slice(0, self.length + 1)
        keys[:, :, new], values[:, :, new] = k_NH1d, v_NH1d
        return keys[:, :, all_tokens], values[:, :, all_tokens]


def _cross_keys_values(attention: Any, hidden_SND: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of the encoder output, each [N, H, S, d]; Megatron interleaves them by head."""
    mixed, _ = attention.linear_kv(hidden_SND)
    heads = attention.num_attention_heads_per_partition
    keys, values = mixed.unflatten(-1, (heads, 2, -1)).permute(3, 1, 2, 0, 4)
    return keys, values


def _merge_heads(out_NH1d: Tensor) -> Tensor:
    """Return [1, N, H * d]."""
    return out_NH1d.permute(2, 0, 1, 3).flatten(2)
