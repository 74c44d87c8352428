# SPDX-License-Identifier: Apache-2.0
"""Packed (variable-length) attention for CPUs in plain PyTorch.

About twice as fast as one scaled_dot_product_attention a sequence, forward and backward, because:

* Scores are in base 2: ATen vectorises fp32 `exp2` itself but hands `exp` to MKL, which is several times slower.
* fp32 products go to oneDNN, up to twice as fast as MKL on AVX-512. torch passes them to oneDNN only if it may compute
  in bf16, which it does only with AMX: without AMX the result is fp32; where AMX is possible, MKL computes instead.
* For bf16 inputs, probabilities are bf16, scores fp32.
* A sequence is read as a window of the pack and masked, not copied to be padded. Windows are multiples of `_WINDOW`
  because oneDNN compiles a kernel per shape (0.3 ms each): there must be few.
* Numbers below fp32's normal range count as zero: they cost 3 to 5 times the time as soon as attention is sharp.
* Tiles that fit the cache go to Python threads, one core each, in any order: no bit of the result depends on it.

The softmax is computed from a stored log-sum and the backward pass recomputes it, as FlashAttention does (Dao et al.
2022); what is dropped is drawn again, too. Shapes: T tokens of a pack, H heads, D head size.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bionemo.common.cpu import amx_is_possible
from bionemo.megatron.dropout import AttentionDropout, keep_scale

_WINDOW = 32
_STRIPE = 256  # Queries of a causal sequence that are taken together, with the keys up to the last of them.
_TILE = 3 * 2**19  # Scores per tile, unless one head's are more.


class _Span(NamedTuple):
    """One sequence of a pack: its tokens, and the window in which they are read."""

    tokens: slice
    window: slice
    length: int


_Tile = tuple[slice, tuple[tuple[_Span, _Span], ...]]  # Heads, and the stripes of a sequence: queries, keys.


def _spans(lengths: tuple[int, ...]) -> list[_Span]:
    ends = accumulate(lengths)
    sizes = [-(-n // _WINDOW) * _WINDOW for n in lengths]
    return [
        _Span(slice(end - n, end), slice(end - n, end - n + size), n)
        for end, n, size in zip(ends, lengths, sizes, strict=True)
    ]


def _stripes(queries: _Span, keys: _Span, causal: bool) -> tuple[tuple[_Span, _Span], ...]:
    """Cuts causal attention where whole keys come after all queries: nearly half of a long sequence's scores."""
    if not causal:
        return ((queries, keys),)
    first, stop = queries.window.start, queries.window.stop
    stripes = []
    for begin in range(first, stop, _STRIPE):
        edge = min(begin + _STRIPE, stop)
        end = min(edge, queries.tokens.stop)
        rows = _Span(slice(begin, end), slice(begin, edge), end - begin)
        stripes.append((rows, _Span(slice(first, end), slice(first, edge), end - first)))
    return tuple(stripes)


@lru_cache(maxsize=64)
def _tiles(lengths: tuple[int, ...], key_lengths: tuple[int, ...], heads: int, causal: bool) -> list[_Tile]:
    """Cuts a pack into tiles of a few heads of one sequence, the costliest first."""
    tiles = []
    for queries, keys in zip(_spans(lengths), _spans(key_lengths), strict=True):
        scores = heads * (queries.window.stop - queries.window.start) * (keys.window.stop - keys.window.start)
        parts = min(heads, -(-scores // _TILE))  # None for an empty sequence.
        for part in range(parts):
            ours = slice(heads * part // parts, heads * (part + 1) // parts)
            tiles.append(((ours.start - ours.stop) * queries.length * keys.length, ours, queries, keys))
    return [
        (ours, _stripes(queries, keys, causal)) for _, ours, queries, keys in sorted(tiles, key=lambda tile: tile[0])
    ]


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Returns Python threads that share `threads` cores. `set_num_threads` is per thread, its default global."""
    workers = min(threads, 8)  # Python's lock feeds about this many.
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        torch.set_num_threads(threads // workers)
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)
        ready.wait()

    pool = ThreadPoolExecutor(workers, "attention", start)
    pool.map(int, range(workers))
    ready.wait()
    torch.set_num_threads(threads)  # Restores the default.
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)


@lru_cache(maxsize=1)
def _onednn_is_exact() -> bool:
    """Whether oneDNN computes in fp32 even where it may use bf16, as without AMX; measured in that mode, which is set.

    Where AMX is possible, nothing is measured: fp32 must not execute its instructions.
    """
    if amx_is_possible():
        return False
    a = torch.arange(256 * 64).remainder(1021).add(1).div(1021).view(1, 256, 64)
    return torch.allclose(torch.bmm(a, a.mT).double(), torch.bmm(a.double(), a.double().mT), rtol=1e-6, atol=0)


@contextmanager
def _flushed() -> Iterator[None]:
    """Takes subnormal numbers for zero, in this thread. `set_flush_denormal` does not tell what was set before."""
    before = not torch.full((), 1e-40).mul(1.0).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _for_each(tiles: list[_Tile], compute: Callable[..., None], dtype: torch.dtype) -> None:
    """Computes every tile, its stripes in order; oneDNN does fp32 products where that costs `dtype` no accuracy."""

    def each(tile: _Tile) -> None:
        heads, stripes = tile
        for queries, keys in stripes:
            compute(heads, queries, keys)

    onednn: Any = torch.backends.mkldnn
    matmul, threads = onednn.matmul, torch.get_num_threads()
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        with torch.autocast("cpu", enabled=False), _flushed():
            if dtype != torch.bfloat16 and not _onednn_is_exact():
                matmul.fp32_precision = "ieee"
            over = map if threads == 1 else _pool(threads).map
            list(over(each, tiles))
    finally:
        matmul.fp32_precision = before


def _by_head(x: Tensor) -> Tensor:
    """[T, H, D] -> contiguous [H, T + _WINDOW, D]: the last window may reach beyond the pack."""
    out = x.new_zeros(x.shape[1], x.shape[0] + _WINDOW, x.shape[2])
    out[:, : x.shape[0]] = x.transpose(0, 1)
    return out


class _PackedAttention(torch.autograd.Function):
    """dropout(softmax(q k^T * scale)) v within each sequence, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: list[_Tile],
        scale: float,
        dropout: AttentionDropout | None,
        causal: bool,
    ) -> Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype)
        q, k, v = _by_head(q), _by_head(k), _by_head(v)
        q2, k2 = q.float() * (scale / math.log(2)), k.float()
        log_sum = q2.new_zeros(*q.shape[:2], 1)
        keep = keep_scale(dropout.probability) if dropout else 1.0

        def compute(heads: slice, queries: _Span, keys: _Span) -> None:
            n, m = queries.length, keys.length
            s = torch.bmm(q2[heads, queries.window], k2[heads, keys.window].mT)
            _hide(s, queries, keys, causal)
            top = s.amax(-1, keepdim=True)
            total = s.sub_(top).exp2_().sum(-1, keepdim=True)
            p = s.to(v.dtype)
            if dropout:
                p[:, :n, :m].mul_(dropout.kept(heads, queries.tokens, m))
            o = torch.bmm(p, v[heads, keys.window])
            torch.div(o[:, :n], total[:, :n] / keep, out=out[queries.tokens, heads].transpose(0, 1))
            log_sum[heads, queries.tokens] = top.add_(total.log2_())[:, :n]

        _for_each(tiles, compute, q.dtype)
        ctx.save_for_backward(q, k, v, log_sum)
        ctx.rest = tiles, scale, dropout, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_sum = ctx.saved_tensors
        tiles, scale, dropout, causal = ctx.rest
        do = _by_head(dout)
        keep = keep_scale(dropout.probability) if dropout else 1.0
        dq = torch.zeros(dout.shape, dtype=q.dtype)
        # Stripes add up here, in their order.
        total = torch.float32 if causal else q.dtype
        dk, dv = (torch.zeros(x.shape[1] - _WINDOW, x.shape[0], x.shape[2], dtype=total) for x in (k, v))
        q2, k2 = q.float() * (scale / math.log(2)), k.float()

        def compute(heads: slice, queries: _Span, keys: _Span) -> None:
            n, m = queries.length, keys.length
            at, of = (heads, queries.window), (heads, keys.window)
            s = torch.bmm(q2[at], k2[of].mT)
            _hide(s, queries, keys, causal)
            p = s.sub_(log_sum[at]).exp2_().to(q.dtype)
            p[:, n:] = 0  # Queries beyond the sequence.
            ds, dropped = torch.bmm(do[at], v[of].mT), p
            if dropout:
                mask = torch.zeros_like(p)
                mask[:, :n, :m] = dropout.kept(heads, queries.tokens, m)
                ds.mul_(mask)
                dropped = mask.mul_(p)
            x = torch.bmm(dropped.mT, do[at])
            dv[keys.tokens, heads].transpose(0, 1).add_(x[:, :m], alpha=keep)
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
            for grad, to, x in ((dq, queries, torch.bmm(ds, k[of])), (dk, keys, torch.bmm(ds.mT, q[at]))):
                grad[to.tokens, heads].transpose(0, 1).add_(x[:, : to.length], alpha=scale * keep)

        _for_each(tiles, compute, q.dtype)
        return dq, dk.to(q.dtype), dv.to(q.dtype), None, None, None, None


def _hide(scores: Tensor, queries: _Span, keys: _Span, causal: bool) -> None:
    """Takes out keys beyond the sequence and, if causal, those after a query."""
    scores[:, :, keys.length :] = -torch.inf
    if causal:
        later = queries.window.start - keys.window.start  # Keys before the first query, all of which are seen.
        ahead = scores[:, :, later:]
        ahead.masked_fill_(torch.ones(ahead.shape[1:], dtype=torch.bool).triu_(1), -torch.inf)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    dropout: AttentionDropout | None = None,
    key_lengths: tuple[int, ...] | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention within each sequence of a packed batch, or from each to its partner in another.

    Args:
        q: [tokens, heads, head size], fp32 or bf16, any strides; cast to the dtype of `v`, as autocast would.
        k: likewise, as many tokens as `v`.
        v: likewise.
        lengths: of the sequences, in order; tokens after their sum are padding and come out as 0.
        scale: what scores are multiplied by, usually head size ** -0.5.
        dropout: which probabilities are dropped; None for none.
        key_lengths: of the sequences attended to; None: these are the same ones.
        causal: whether a token attends to no later one; only within the same sequences.

    Returns:
        [tokens, heads, head size], contiguous, in the dtype of `v`; 0 where there is nothing to attend to.
    """
    # Without AVX-512, oneDNN's products in bf16 take ten times as long as in fp32.
    slow = v.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.float32 if slow else v.dtype
    tiles = _tiles(lengths, lengths if key_lengths is None else key_lengths, q.shape[1], causal)
    return _PackedAttention.apply(q.to(dtype), k.to(dtype), v.to(dtype), tiles, scale, dropout, causal).to(v.dtype)
