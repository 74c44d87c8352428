# SPDX-License-Identifier: Apache-2.0
"""Dropout with a counter-based random generator.

Whether an activation is dropped depends only on its token's key, on its site in the model and on its column, never on
earlier draws. The masks are therefore the same for every parallel layout, a recomputed layer draws the same mask
again, and there is no generator state to save. The generator is that of common/random_stream.py: draw c of key k is
mix(k + (c + 1) * GOLDEN). Each 64-bit draw provides 16 bits for each of four activations.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bionemo.common import random_stream

# The constants of common/random_stream.py as int64: torch has no arithmetic on uint64.
_GOLDEN, *_MULTIPLIERS = (bits - 2**64 for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_COUNTERS_PER_SITE = 1 << 20  # counters of one token at one site; each covers four columns
_LEVELS = 1 << 16  # dropout probabilities are multiples of 1 / 65,536
_CPU_CHUNK = 1 << 19  # activations per chunk on a CPU: their random bits (1 MiB) fit in the cache

# Sites outside of the layers. Each layer has five sites; layer numbers start at 1.
EMBEDDING, TASK_HEAD = 0, 1
PROBABILITIES, ATTENTION_OUTPUT, CROSS_PROBABILITIES, CROSS_OUTPUT, MLP_OUTPUT = range(5)


def layer_site(layer: int, location: int) -> int:
    """Return the number of a dropout site.

    Args:
        layer: number of the layer in the full model, from 1.
        location: location in the layer, such as MLP_OUTPUT.
    """
    return 5 * layer + location


def mix(bits: Tensor) -> Tensor:
    """Apply the bijective mixing function of common/random_stream.py to int64 values, in place."""
    if bits.is_cpu and not torch.compiler.is_compiling() and torch.get_num_threads() == 1:
        random_stream.mix(bits.numpy().view(np.uint64))  # twice as fast on one core
        return bits
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits.bitwise_xor_(_logical_shift(bits, shift)).mul_(multiplier)
    return bits.bitwise_xor_(_logical_shift(bits, 31))


def token_dropout_keys(dropout_keys: Tensor, segment_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the key of every token, int64 [T].

    Args:
        dropout_keys: int64 [N + 1], key of each sequence, and one of the padding.
        segment_ids: [T], index of each token's sequence.
        positions: [T], position of each token in its sequence.
    """
    return mix(dropout_keys.index_select(0, segment_ids) + (positions.long() + 1) * _GOLDEN)


def keep_mask(keys: Tensor, site: int, columns: int, probability: float) -> Tensor:
    """Draw a dropout mask.

    Args:
        keys: int64 [...], key of each token.
        site: number of the dropout site.
        columns: activations per token, at most 4 * 2^20.
        probability: dropout probability, rounded to a multiple of 1 / 65,536.

    Returns:
        int16 [..., columns], 1 for activations to keep, else 0. On CPUs bool is five times slower to write and
        multiply by.
    """
    if keys.is_cpu and torch.compiler.is_compiling():
        return _keep_mask_op(keys, site, columns, probability)
    # A compiled graph may compute sums and products of an arange as indices, which must not overflow. It does not
    # do so for ~c = -(c + 1).
    counters = site * _COUNTERS_PER_SITE - ~torch.arange(-(-columns // 4), device=keys.device)
    draws = mix(keys[..., None] + counters * _GOLDEN).view(torch.int16)
    return draws.ge_(round(probability * _LEVELS) - _LEVELS // 2)[..., :columns]


@torch.library.custom_op("bionemo::dropout_keep_mask", mutates_args=())
def _keep_mask_op(keys: Tensor, site: int, columns: int, probability: float) -> Tensor:
    """Draw outside of compiled C++ code, in which signed overflow is undefined and gave wrong masks."""
    return keep_mask(keys, site, columns, probability).contiguous()


@_keep_mask_op.register_fake
def _(keys: Tensor, site: int, columns: int, probability: float) -> Tensor:
    return keys.new_empty(*keys.shape, columns, dtype=torch.int16)


def keep_scale(probability: float) -> float:
    """Return the factor of kept activations that preserves the expectation, 1 / (1 - probability)."""
    return 1 / (1 - round(probability * _LEVELS) / _LEVELS)


def dropout(x: Tensor, keys: Tensor, site: int, probability: float) -> Tensor:
    """Apply dropout (Srivastava et al. 2014) to x [T, ..., D] with one key per token [T]."""
    dropped: Tensor = _Dropout.apply(x, keys, site, probability)
    return dropped


class _Dropout(torch.autograd.Function):
    """Draws the mask again in the backward pass instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, site: int, probability: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.arguments = site, probability
        return _apply_mask(x, keys, site, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _apply_mask(gradient, keys, *ctx.arguments), None, None, None


def _apply_mask(x: Tensor, keys: Tensor, site: int, probability: float) -> Tensor:
    columns, scale = x.shape[1:].numel(), keep_scale(probability)
    if not x.is_cpu or torch.compiler.is_compiling():
        return x * keep_mask(keys, site, columns, probability).view(x.shape) * scale
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens = max(1, _CPU_CHUNK // columns)
    for x_chunk, out_chunk, key_chunk in zip(*(tensor.split(tokens) for tensor in (x, out, keys)), strict=True):
        mask = keep_mask(key_chunk, site, columns, probability).to(torch.float32).mul_(scale)
        torch.mul(x_chunk, mask.view(x_chunk.shape), out=out_chunk)
    return out


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities: keyed by the query token, one column per key position.

    The counters of the site are divided evenly among all heads of the model.
    """

    keys: Tensor  # [T] int64, key of each token
    site: int
    first_head: int  # of this process
    num_heads: int  # of the full model
    probability: float

    def counters(self, columns: int) -> tuple[int, int]:
        """Return the first counter of the first head of this process, and the number of counters per head."""
        counters = _COUNTERS_PER_SITE // self.num_heads
        assert columns <= 4 * counters, (
            f"dropout in {self.num_heads} heads supports sequences of {4 * counters} tokens, got {columns}"
        )
        return self.site * _COUNTERS_PER_SITE + self.first_head * counters, counters

    def keep_mask(self, heads: slice, tokens: slice, columns: int) -> Tensor:
        """Draw the mask of one sequence of n tokens, int16 [heads, n, columns].

        Args:
            heads: heads of this process.
            tokens: tokens of the sequence in the packed batch.
            columns: number of key positions.
        """
        _, counters = self.counters(columns)
        head_numbers = torch.arange(heads.start, heads.stop, device=self.keys.device) + self.first_head
        keys = self.keys[tokens] + (head_numbers[:, None] * counters) * _GOLDEN
        return keep_mask(keys, self.site, columns, self.probability)


def _logical_shift(bits: Tensor, count: int) -> Tensor:
    """Shift right with zero fill; torch's shift of int64 extends the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
