# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences (variable length) for CPUs.

Attention without dropout uses torch's FlashAttention for CPUs or the implementation here, whichever is faster on this
CPU (`_fastest_kernel`). The implementation here consists of plain PyTorch operations:

* Scores are in base 2: ATen vectorizes fp32 `exp2` itself but uses MKL for `exp`, which is slower on AMD's CPUs.
* Products of fp32 inputs use oneDNN or MKL, whichever is faster. torch calls oneDNN for them only if bf16 computation
  is allowed. oneDNN then computes in bf16 only on CPUs with AMX; there, fp32 inputs use MKL.
* For bf16 inputs, probabilities are bf16, scores fp32.
* A sequence is read as a masked window of the packed batch instead of a padded copy. Window sizes are multiples of
  `_WINDOW` because oneDNN compiles a kernel per shape (0.3 ms each).
* Subnormal fp32 numbers are flushed to zero: they are 3 to 5 times slower and occur when attention is sharp.

Both distribute tiles that fit the cache to Python threads. The result does not depend on the order.

The softmax uses a stored log-sum, and the backward pass recomputes scores and dropout masks, as in FlashAttention
(Dao et al. 2022). Shapes: T tokens, H heads, D head size.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bionemo.common.autotune import autotune
from bionemo.common.cpu import amx_is_possible
from bionemo.megatron.dropout import AttentionDropout, keep_scale

_WINDOW = 32
_STRIPE = 256  # Queries of a causal sequence that share one product, with the keys up to the last query.
_TILE = 3 * 2**19  # Maximum scores per tile; a tile has at least one head.
_MEASURED = 320  # Length of the sequence whose attention is measured: a usual protein.

Kernel = Literal["flash", "mkl", "onednn"]  # The last two: the implementation here with products of MKL or oneDNN.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Segment(NamedTuple):
    """One sequence of a packed batch, or a stripe of it: its tokens and the padded window in which they are read."""

    tokens: slice
    window: slice
    length: int


_Tile = tuple[slice, tuple[tuple[_Segment, _Segment], ...]]  # Heads, and (queries, keys) of each stripe.


def _segments(lengths: tuple[int, ...]) -> list[_Segment]:
    ends = accumulate(lengths)
    sizes = [-(-n // _WINDOW) * _WINDOW for n in lengths]
    return [
        _Segment(slice(end - n, end), slice(end - n, end - n + size), n)
        for end, n, size in zip(ends, lengths, sizes, strict=True)
    ]


def _stripes(queries: _Segment, keys: _Segment, causal: bool) -> tuple[tuple[_Segment, _Segment], ...]:
    """Divide causal attention into stripes without keys after the last query, to skip nearly half of the scores."""
    if not causal:
        return ((queries, keys),)
    first, stop = queries.window.start, queries.window.stop
    stripes = []
    for begin in range(first, stop, _STRIPE):
        window_end = min(begin + _STRIPE, stop)
        end = min(window_end, queries.tokens.stop)
        stripe = _Segment(slice(begin, end), slice(begin, window_end), end - begin)
        stripes.append((stripe, _Segment(slice(first, end), slice(first, window_end), end - first)))
    return tuple(stripes)


@lru_cache(maxsize=64)
def _tiles(lengths: tuple[int, ...], key_lengths: tuple[int, ...], heads: int, causal: bool) -> list[_Tile]:
    """Divide a packed batch into tiles of a few heads of one sequence, the most expensive first."""
    tiles = []
    for queries, keys in zip(_segments(lengths), _segments(key_lengths), strict=True):
        scores = heads * (queries.window.stop - queries.window.start) * (keys.window.stop - keys.window.start)
        parts = min(heads, -(-scores // _TILE))  # 0 for an empty sequence.
        for part in range(parts):
            group = slice(heads * part // parts, heads * (part + 1) // parts)
            cost = (group.stop - group.start) * queries.length * keys.length
            tiles.append((-cost, group, queries, keys))
    return [
        (group, _stripes(queries, keys, causal)) for _, group, queries, keys in sorted(tiles, key=lambda tile: tile[0])
    ]


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return Python threads that share `threads` cores."""
    workers = min(threads, 8)  # More threads bring no speedup because of the GIL.
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread replaces its number of threads by the default
        torch.set_num_threads(threads // workers)
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)
        ready.wait()

    pool = ThreadPoolExecutor(workers, "attention", start)
    pool.map(int, range(workers))
    ready.wait()
    torch.set_num_threads(threads)  # The workers' calls have changed the default for new threads.
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)


@lru_cache(maxsize=1)
def _onednn_is_exact() -> bool:
    """Return whether oneDNN computes in fp32 although the caller has allowed bf16, as without AMX.

    Where AMX is possible this is not measured, because fp32 must not execute AMX instructions.
    """
    if amx_is_possible():
        return False
    a = torch.arange(256 * 64).remainder(1021).add(1).div(1021).view(1, 256, 64)
    return torch.allclose(torch.bmm(a, a.mT).double(), torch.bmm(a.double(), a.double().mT), rtol=1e-6, atol=0)


@contextmanager
def _flush_subnormals() -> Iterator[None]:
    """Flush subnormal numbers to zero in this thread, then restore the previous setting."""
    previous = not torch.full((), 1e-40).mul(1.0).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(previous)


def _run_tiles(tiles: list[_Tile], compute: Callable[..., None], onednn_allowed: bool) -> None:
    """Compute every tile, its stripes in order; multiply fp32 matrices by oneDNN if that is allowed."""

    def run_tile(tile: _Tile) -> None:
        heads, stripes = tile
        for queries, keys in stripes:
            compute(heads, queries, keys)

    onednn: Any = torch.backends.mkldnn
    matmul, threads = onednn.matmul, torch.get_num_threads()
    previous, matmul.fp32_precision = matmul.fp32_precision, "bf16" if onednn_allowed else "ieee"
    try:
        with torch.autocast("cpu", enabled=False), _flush_subnormals():
            map_tiles = map if threads == 1 else _pool(threads).map
            list(map_tiles(run_tile, tiles))
    finally:
        matmul.fp32_precision = previous


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> contiguous [H, T + _WINDOW, D]: the last window may reach beyond the packed batch."""
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
        kernel: Kernel,
    ) -> Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype)
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        q2, k2 = q.float() * (scale / math.log(2)), k.float()
        log_sum = q2.new_zeros(*q.shape[:2], 1)
        keep = keep_scale(dropout.probability) if dropout else 1.0

        def compute(heads: slice, queries: _Segment, keys: _Segment) -> None:
            n, m = queries.length, keys.length
            s = torch.bmm(q2[heads, queries.window], k2[heads, keys.window].mT)
            _mask_scores(s, queries, keys, causal)
            top = s.amax(-1, keepdim=True)
            total = s.sub_(top).exp2_().sum(-1, keepdim=True)
            p = s.to(v.dtype)
            if dropout:
                p[:, :n, :m].mul_(dropout.keep_mask(heads, queries.tokens, m))
            o = torch.bmm(p, v[heads, keys.window])
            torch.div(o[:, :n], total[:, :n] / keep, out=out[queries.tokens, heads].transpose(0, 1))
            log_sum[heads, queries.tokens] = top.add_(total.log2_())[:, :n]

        _run_tiles(tiles, compute, kernel == "onednn")
        ctx.save_for_backward(q, k, v, log_sum)
        ctx.arguments = tiles, scale, dropout, causal, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_sum = ctx.saved_tensors
        tiles, scale, dropout, causal, kernel = ctx.arguments
        do = _heads_first(dout)
        keep = keep_scale(dropout.probability) if dropout else 1.0
        dq = torch.zeros(dout.shape, dtype=q.dtype)
        # Causal stripes are summed here, in order.
        sum_dtype = torch.float32 if causal else q.dtype
        dk, dv = (torch.zeros(x.shape[1] - _WINDOW, x.shape[0], x.shape[2], dtype=sum_dtype) for x in (k, v))
        q2, k2 = q.float() * (scale / math.log(2)), k.float()

        def compute(heads: slice, queries: _Segment, keys: _Segment) -> None:
            n, m = queries.length, keys.length
            at, of = (heads, queries.window), (heads, keys.window)
            s = torch.bmm(q2[at], k2[of].mT)
            _mask_scores(s, queries, keys, causal)
            p = s.sub_(log_sum[at]).exp2_().to(q.dtype)
            p[:, n:] = 0  # Queries beyond the sequence.
            ds, dropped = torch.bmm(do[at], v[of].mT), p
            if dropout:
                mask = torch.zeros_like(p)
                mask[:, :n, :m] = dropout.keep_mask(heads, queries.tokens, m)
                ds.mul_(mask)
                dropped = mask.mul_(p)
            x = torch.bmm(dropped.mT, do[at])
            dv[keys.tokens, heads].transpose(0, 1).add_(x[:, :m], alpha=keep)
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
            for grad, to, x in ((dq, queries, torch.bmm(ds, k[of])), (dk, keys, torch.bmm(ds.mT, q[at]))):
                grad[to.tokens, heads].transpose(0, 1).add_(x[:, : to.length], alpha=scale * keep)

        _run_tiles(tiles, compute, kernel == "onednn")
        return dq, dk.to(q.dtype), dv.to(q.dtype), None, None, None, None, None


class _FlashAttention(torch.autograd.Function):
    """softmax(q k^T * scale) v within each sequence, and its gradient, by torch's FlashAttention for CPUs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[_Tile], scale: float, causal: bool) -> Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype)
        log_sum = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)

        def compute(heads: slice, queries: _Segment, keys: _Segment) -> None:
            part = (_one_sequence(x, each, heads) for x, each in ((q, queries), (k, keys), (v, keys)))
            o, sums = _flash(*part, 0.0, causal, scale=scale)
            out[queries.tokens, heads] = o[0].transpose(0, 1)
            log_sum[heads, queries.tokens] = sums[0]

        _run_tiles(tiles, compute, onednn_allowed=False)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.arguments = tiles, scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        tiles, scale, causal = ctx.arguments
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        gradients = [torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v)]

        def compute(heads: slice, queries: _Segment, keys: _Segment) -> None:
            at = queries, queries, keys, keys, queries
            part = (_one_sequence(x, each, heads) for x, each in zip((dout, q, k, v, out), at, strict=True))
            found = _flash_backward(*part, log_sum[heads, queries.tokens][None], 0.0, causal, scale=scale)
            for total, each, x in zip(gradients, (queries, keys, keys), found, strict=True):
                total[each.tokens, heads] = x[0].transpose(0, 1)

        _run_tiles(tiles, compute, onednn_allowed=False)
        return *gradients, None, None, None


def _one_sequence(x: Tensor, segment: _Segment, heads: slice) -> Tensor:
    """[T, H, D] -> view [1, heads, tokens, D]."""
    return x[segment.tokens, heads].transpose(0, 1)[None]


def _mask_scores(scores: Tensor, queries: _Segment, keys: _Segment, causal: bool) -> None:
    """Set the scores of keys beyond the sequence and, if causal, after the query to -inf."""
    scores[:, :, keys.length :] = -torch.inf
    if causal:
        first = queries.window.start - keys.window.start  # All queries attend to the keys before this one.
        diagonal = scores[:, :, first:]
        diagonal.masked_fill_(torch.ones(diagonal.shape[1:], dtype=torch.bool).triu_(1), -torch.inf)


@cache
@torch.inference_mode(False)
def _fastest_kernel(head_size: int, dtype: torch.dtype, dropout: bool, backward: bool) -> Kernel:
    """Return the fastest kernel for one sequence on one core: its forward and, if `backward`, its backward pass."""
    kernels: list[Kernel] = ["onednn"] if dtype == torch.bfloat16 else ["mkl"]
    if dtype == torch.float32 and _onednn_is_exact():
        kernels.append("onednn")
    if not dropout:
        kernels.insert(0, "flash")
    if len(kernels) == 1:
        return kernels[0]
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(_MEASURED, 4, head_size, generator=generator).to(dtype) for _ in range(4))
    keys = torch.zeros(len(q), dtype=torch.int64)
    mask = AttentionDropout(keys, site=0, first_head=0, num_heads=4, probability=0.1) if dropout else None

    def run(kernel: Kernel) -> None:
        a, b, c = (x.detach().requires_grad_(backward) for x in (q, k, v))
        out = _attend(a, b, c, (_MEASURED,), (_MEASURED,), head_size**-0.5, mask, False, kernel)
        if backward:
            torch.autograd.grad(out, (a, b, c), dout)

    version = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {amx_is_possible()}"
    kind = {torch.float32: "", torch.bfloat16: "bf16 " if backward else "bf16 forward "}[dtype]
    name = f"{kind}attention of head size {head_size}{' with dropout' if dropout else ''}".replace(" ", "-")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            choice = autotune(name, version, {kernel: partial(run, kernel) for kernel in kernels})
    finally:
        torch.set_num_threads(threads)
    return cast(Kernel, choice)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], key_lengths: tuple[int, ...], scale: float,
    dropout: AttentionDropout | None, causal: bool, kernel: Kernel,
) -> Tensor:  # fmt: skip
    if kernel == "flash":
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        tiles = _tiles(lengths, key_lengths, q.shape[1], causal=False)  # the kernel itself skips masked keys
        return _FlashAttention.apply(q, k, v, tiles, scale, causal)
    tiles = _tiles(lengths, key_lengths, q.shape[1], causal)
    return _PackedAttention.apply(q, k, v, tiles, scale, dropout, causal, kernel)


# Sequence lengths differ in every batch, and torch.compile would compile a graph for each combination.
@torch.compiler.disable
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
    """Compute attention within each sequence of a packed batch, or cross-attention between paired sequences.

    Args:
        q: [tokens, heads, head size], fp32 or bf16, any strides; cast to the dtype of `v`, as autocast does.
        k: [key tokens, heads, head size].
        v: same shape as `k`.
        lengths: length of each sequence; the output of the padding tokens after the last one is 0.
        scale: factor of the scores, usually head size ** -0.5.
        dropout: dropout of the attention probabilities.
        key_lengths: length of each key sequence for cross-attention; default `lengths`.
        causal: attend to earlier tokens only; not for cross-attention.

    Returns:
        [tokens, heads, head size], contiguous, in the dtype of `v`.
    """
    # Without AVX-512, oneDNN is ten times slower in bf16 than in fp32.
    slow = v.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.float32 if slow else v.dtype
    q, k, v, given = q.to(dtype), k.to(dtype), v.to(dtype), v.dtype
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    backward = needs_gradients or dtype == torch.float32  # one kernel for training and validation in fp32
    kernel = _fastest_kernel(v.shape[-1], dtype, dropout is not None, backward)
    key_lengths = lengths if key_lengths is None else key_lengths
    out = _attend(q, k, v, lengths, key_lengths, scale, dropout, causal, kernel)
    return out.to(given)
