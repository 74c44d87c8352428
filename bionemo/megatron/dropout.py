# SPDX-License-Identifier: Apache-2.0
"""Dropout addressed by counters instead of by history.

Whether an activation is dropped depends on the token it belongs to and on where in the model it stands, never on the
draws before it. So the masks are the same for any split of the model or the batch over processes, a recomputed layer
draws again what it drew at first, and there is no generator state to save. The generator is that of
data/random_stream.py: draw c of key k is mix(k + (c + 1) * GOLDEN); each 64-bit word serves four activations.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bionemo.common import random_stream

# The constants of data/random_stream.py as signed words: torch has no arithmetic on unsigned ones.
_GOLDEN, *_MULTIPLIERS = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_COLUMNS = 1 << 20  # counters a site has for one token
_LEVELS = 1 << 16  # dropout probabilities are multiples of 1 / 65,536
_AT_ONCE = 1 << 19  # activations for which a CPU draws at a time: their words are a megabyte, and stay in the cache

# A site is a place where activations are dropped. Every layer has five; these are of none.
EMBEDDING, TASK_HEAD = 0, 1
PROBABILITIES, ATTENTION_OUTPUT, CROSS_PROBABILITIES, CROSS_OUTPUT, MLP_OUTPUT = range(5)


def site(layer: int, place: int) -> int:
    """Number of a place in a layer; layers count from 1 over the whole model, whichever pipeline stage holds them."""
    return 5 * layer + place


def mix(words: Tensor) -> Tensor:
    """Scramble int64 words one to one, in place, as data/random_stream.py does with unsigned ones."""
    if words.is_cpu and not torch.compiler.is_compiling() and torch.get_num_threads() == 1:
        random_stream.mix(words.numpy().view(np.uint64))  # on one core in half the time
        return words
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words.bitwise_xor_(_shifted(words, shift)).mul_(multiplier)
    return words.bitwise_xor_(_shifted(words, 31))


def token_keys(segment_keys: Tensor, segment_ids: Tensor, positions: Tensor) -> Tensor:
    """Key of every token, int64 [T], from the keys of the segments [N] and the tokens' segments and positions [T]."""
    return mix(segment_keys.index_select(0, segment_ids) + (positions.long() + 1) * _GOLDEN)


def kept(keys: Tensor, site: int, columns: int, probability: float) -> Tensor:
    """Draw which activations stay.

    Args:
        keys: int64 [...], one for each token.
        site: number of the place in the model.
        columns: activations of a token at that place, at most 4 * 2^20.
        probability: of being dropped; rounded to a multiple of 1 / 65,536.

    Returns:
        int16 [..., columns], ones and zeros; on CPUs bool takes five times as long to write and to multiply by
    """
    if keys.is_cpu and torch.compiler.is_compiling():
        return _kept_in_graph(keys, site, columns, probability)
    # A graph takes sums and products of an arange for an index, which must not overflow; not so ~c, which is -(c + 1).
    counters = site * _COLUMNS - ~torch.arange(-(-columns // 4), device=keys.device)
    draws = mix(keys[..., None] + counters * _GOLDEN).view(torch.int16)
    return draws.ge_(round(probability * _LEVELS) - _LEVELS // 2)[..., :columns]


@torch.library.custom_op("bionemo::kept", mutates_args=())
def _kept_in_graph(keys: Tensor, site: int, columns: int, probability: float) -> Tensor:
    """Draw outside of the C++ that a graph becomes: signed overflow is undefined there, and draws came out wrong."""
    return kept(keys, site, columns, probability).contiguous()


@_kept_in_graph.register_fake
def _(keys: Tensor, site: int, columns: int, probability: float) -> Tensor:
    return keys.new_empty(*keys.shape, columns, dtype=torch.int16)


def keep_scale(probability: float) -> float:
    """What the activations that stay are multiplied by, so that the expectation is unchanged."""
    return 1 / (1 - round(probability * _LEVELS) / _LEVELS)


def dropout(x: Tensor, keys: Tensor, site: int, probability: float) -> Tensor:
    """Drop activations of x [T, ..., D] with the keys of its tokens [T] (Srivastava et al. 2014)."""
    dropped: Tensor = _Dropout.apply(x, keys, site, probability)
    return dropped


class _Dropout(torch.autograd.Function):
    """Draws again in the backward pass what it drew in the forward pass: it keeps nothing but the keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, site: int, probability: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.where = site, probability
        return _dropped(x, keys, site, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _dropped(gradient, keys, *ctx.where), None, None, None


def _dropped(x: Tensor, keys: Tensor, site: int, probability: float) -> Tensor:
    columns, scale = x.shape[1:].numel(), keep_scale(probability)
    if not x.is_cpu or torch.compiler.is_compiling():
        return x * kept(keys, site, columns, probability).view(x.shape) * scale
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, _AT_ONCE // columns)
    for part, into, some in zip(*(tensor.split(rows) for tensor in (x, out, keys)), strict=True):
        mask = kept(some, site, columns, probability).to(torch.float32).mul_(scale)
        torch.mul(part, mask.view(part.shape), out=into)
    return out


class AttentionDropout(NamedTuple):
    """What decides which attention probabilities are dropped: a query token's, under its key, column by key position.

    The counters of the site are dealt out evenly to the heads of the whole model.
    """

    keys: Tensor  # [T] int64, of the tokens
    site: int
    first_head: int  # of this process
    all_heads: int  # of the model
    probability: float

    def kept(self, heads: slice, tokens: slice, columns: int) -> Tensor:
        """Draw which probabilities stay of one sequence of n tokens: int16 [heads, n, columns], ones and zeros.

        Args:
            heads: some of this process's.
            tokens: where the sequence lies in the pack.
            columns: tokens that are attended to.
        """
        share = _COLUMNS // self.all_heads
        assert columns <= 4 * share, f"{columns} tokens are too long a sequence for dropout in {self.all_heads} heads"
        first_H1 = (torch.arange(heads.start, heads.stop, device=self.keys.device) + self.first_head)[:, None] * share
        return kept(self.keys[tokens] + first_H1 * _GOLDEN, self.site, columns, self.probability)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right, a new tensor; torch's keeps the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)
