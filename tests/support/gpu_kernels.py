# SPDX-License-Identifier: Apache-2.0
"""Attention of GPUs on a CPU: the operators of FlashAttention and of our Triton kernels get CPU implementations.

They check the requirements of the kernels, or return zeros. Shapes: T query tokens, S key tokens, H heads, D head
size, N sequences.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import _scoped_library

from bionemo.common import random_stream
from bionemo.megatron import attention

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # distance of the counters of the generator
Triple = tuple[Tensor, Tensor, Tensor]


class _Mask(NamedTuple):
    """Which scores count: those of visible keys; of their probabilities dropout keeps some."""

    causal: bool
    keys: Tensor | None = None  # [T] int64, dropout key of each query token; None: no dropout
    first_counter: int = 0
    counters_per_head: int = 0
    probability: float = 0.0

    def factors(self, queries: slice, heads: int, columns: int) -> Tensor:
        """Return the factors [H, n, columns] of the probabilities of a sequence, 0 or 1 / (1 - probability)."""
        if self.keys is None:
            return torch.ones(())
        words, cut = self.keys[queries].numpy().view(np.uint64), round(self.probability * 2**16)
        counters = np.arange(-(-columns // 4)) + self.counters_per_head * np.arange(heads)[:, None, None]
        advanced = words[:, None] + (counters + self.first_counter).astype(np.uint64) * _GOLDEN
        lanes = random_stream.draw(advanced).astype("<u8").view("<i2")[:, :, :columns]
        kept = lanes >= cut - 2**15
        return torch.from_numpy(kept / (1 - cut / 2**16))


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Return the scores [H, n, m] of one sequence."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None]
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def _segments(query_starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and keys of each sequence that has both."""
    for queries, keys in zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield slice(*queries), slice(*keys)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, scale: float, mask: _Mask
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, D] and the log-sum-exp [H, T], computed in double precision."""
    out, log_sum = torch.zeros_like(q, memory_format=torch.contiguous_format), torch.zeros(q.shape[1], len(q))
    for queries, keys in _segments(query_starts, key_starts):
        scores = _scores(q[queries].double(), k[keys].double(), scale, mask.causal)
        p = scores.softmax(-1) * mask.factors(queries, q.shape[1], scores.shape[2])
        out[queries] = torch.einsum("hqk,khd->qhd", p, v[keys].double()).to(q.dtype)
        log_sum[:, queries] = scores.logsumexp(-1).float()
    return out, log_sum


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, scale: float, mask: _Mask
) -> Triple:
    """Return the gradients of q, k and v."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for queries, keys in _segments(query_starts, key_starts):
        q_, do_, k_, v_ = (x.double() for x in (q[queries], do[queries], k[keys], v[keys]))
        p = _scores(q_, k_, scale, mask.causal).softmax(-1)
        factors = mask.factors(queries, q.shape[1], len(k_))
        dp = torch.einsum("qhd,khd->hqk", do_, v_) * factors
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[queries] = torch.einsum("hqk,khd->qhd", ds, k_).to(q.dtype)
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, q_).to(k.dtype)
        dv[keys] = torch.einsum("hqk,qhd->khd", p * factors, do_).to(v.dtype)
    return dq, dk, dv


def _check_tensors(*tensors: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    q, k, v, *others = tensors
    assert q.ndim == 3 and k.shape == v.shape and q.shape[1:] == k.shape[1:]
    assert all(x.shape == q.shape for x in others)
    assert q.dtype in dtypes and all(x.dtype == q.dtype for x in tensors)
    assert all(x.stride(-1) == 1 for x in tensors)
    assert q.shape[2] <= 256


def _check_sequences(
    tokens: tuple[int, int], query_starts: Tensor, key_starts: Tensor, max_queries: int, max_keys: int
) -> None:
    assert len(query_starts) == len(key_starts)
    for number, starts, longest in zip(tokens, (query_starts, key_starts), (max_queries, max_keys), strict=True):
        assert starts.dtype == torch.int32 and starts.is_contiguous()
        assert starts[0] == 0 and starts[-1] == number  # every token, padding too, belongs to a segment
        lengths = starts.diff()
        assert lengths.min() >= 0 and lengths.max() <= longest
        assert type(longest) is int and longest > 0


def _flash_mask(tensors: tuple[Tensor, ...], causal: bool, window_size: list[int] | None) -> _Mask:
    """Check the requirements of FlashAttention 2."""
    _check_tensors(*tensors, dtypes=(torch.bfloat16, torch.float16))
    assert tensors[0].shape[2] % 8 == 0
    assert window_size == ([-1, 0] if causal else [-1, -1])
    return _Mask(causal)


def _triton_mask(
    tensors: tuple[Tensor, ...],
    causal: bool,
    keys: Tensor | None,
    first_counter: int,
    counters_per_head: int,
    probability: float,
    max_keys: int,
) -> _Mask:
    """Check the requirements of our Triton kernels."""
    _check_tensors(*tensors, dtypes=(torch.float32, torch.bfloat16, torch.float16))
    if keys is None:
        assert probability == 0
    else:
        assert keys.dtype == torch.int64 and keys.shape == tensors[0].shape[:1] and keys.is_contiguous()
        assert 0 < probability < 1
        assert max_keys <= 4 * counters_per_head and counters_per_head * tensors[0].shape[1] <= 2**20
    return _Mask(causal, keys, first_counter, counters_per_head, probability)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, max_queries: int, max_keys: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None, *unused: object,
) -> Triple:  # fmt: skip
    assert scale is not None and not any(x is not None and x is not False for x in unused)
    _check_sequences((len(q), len(k)), query_starts, key_starts, max_queries, max_keys)
    mask = _flash_mask((q, k, v), is_causal, window_size)
    return *_forward(q, k, v, query_starts, key_starts, scale, mask), torch.zeros(2, dtype=torch.uint64)


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, query_starts: Tensor,
    key_starts: Tensor, max_queries: int, max_keys: int, is_causal: bool, rng_state: Tensor,
    scale: float | None = None, window_size: list[int] | None = None,
) -> Triple:  # fmt: skip
    assert scale is not None and log_sum.shape == (q.shape[1], len(q)) and log_sum.dtype == torch.float32
    _check_sequences((len(q), len(k)), query_starts, key_starts, max_queries, max_keys)
    do = do.contiguous()  # as the operator of PyTorch does
    mask = _flash_mask((q, k, v, do, out), is_causal, window_size)
    return _backward(do, q, k, v, query_starts, key_starts, scale, mask)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, max_queries: int, max_keys: int,
    scale: float, causal: bool, dropout_keys: Tensor | None, first_counter: int, counters_per_head: int,
    probability: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_sequences((len(q), len(k)), query_starts, key_starts, max_queries, max_keys)
    counters = first_counter, counters_per_head, probability
    mask = _triton_mask((q, k, v), causal, dropout_keys, *counters, max_keys)
    return _forward(q, k, v, query_starts, key_starts, scale, mask)


def _triton_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, query_starts: Tensor,
    key_starts: Tensor, max_queries: int, max_keys: int, scale: float, causal: bool, dropout_keys: Tensor | None,
    first_counter: int, counters_per_head: int, probability: float,
) -> Triple:  # fmt: skip
    assert log_sum.shape == (q.shape[1], len(q)) and log_sum.dtype == torch.float32 and log_sum.is_contiguous()
    _check_sequences((len(q), len(k)), query_starts, key_starts, max_queries, max_keys)
    counters = first_counter, counters_per_head, probability
    mask = _triton_mask((q, k, v, do, out), causal, dropout_keys, *counters, max_keys)
    return _backward(do, q, k, v, query_starts, key_starts, scale, mask)


def _zeros(q: Tensor, *unused: object) -> tuple[Tensor, Tensor]:
    return q.new_zeros(q.shape), torch.zeros(q.shape[1], len(q))


def _flash_zeros(q: Tensor, *unused: object) -> Triple:
    return *_zeros(q), torch.zeros(2, dtype=torch.uint64)


def _gradient_zeros(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *unused: object) -> Triple:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert x.shape[2] % 2 == 0
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (len(x), 1, x.shape[2])
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def _merge(gradients: list[Tensor], cos: Tensor | None, sin: Tensor | None) -> Tensor:
    assert len(gradients) in (2, 3) and len({(x.shape, x.dtype) for x in gradients}) == 1
    if cos is not None and sin is not None:
        gradients = [*(_rotate(x, cos, -sin) for x in gradients[:2]), *gradients[2:]]
    return torch.stack(gradients, 2)


def _rotate_zeros(x: Tensor, *unused: object) -> Tensor:
    return x.new_zeros(x.shape)


def _merge_zeros(gradients: list[Tensor], *unused: object) -> Tensor:
    return torch.zeros(*gradients[0].shape[:2], len(gradients), gradients[0].shape[2], dtype=gradients[0].dtype)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # operator: with checks, only zeros
    "torch_attn::_varlen_attn": (_flash, _flash_zeros),
    "torch_attn::_varlen_attn_backward": (_flash_backward, _gradient_zeros),
    "bionemo::rotate": (_rotate, _rotate_zeros),
    "bionemo::merge_heads": (_merge, _merge_zeros),
    "bionemo::packed_attention": (_triton, _zeros),
    "bionemo::packed_attention_backward": (_triton_backward, _gradient_zeros),
}


@contextmanager
def gpu_attention(zeros: bool = False) -> Iterator[Counter[str]]:
    """Compute attention of CPU tensors like that of CUDA tensors on a GPU with FlashAttention and Triton.

    Args:
        zeros: the kernels return zeros and check nothing.

    Yields:
        Number of calls of each operator.
    """
    pytest.importorskip("triton")
    import torch.nn.attention.varlen

    import bionemo.megatron.triton_attention  # registers the operators
    import bionemo.megatron.triton_rotary  # noqa: F401

    calls = Counter[str]()

    def counted(operator: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[operator] += 1
            return kernel(*arguments)

        return call

    supported = torch.compiler.assume_constant_result(lambda: True)
    with ExitStack() as stack:
        for operator, kernels in _KERNELS.items():
            library = stack.enter_context(_scoped_library(operator.partition("::")[0], "IMPL"))
            library.impl(operator, counted(operator, kernels[zeros]), "CPU")
        functions = {"attend": attention.attend_on_gpu, "gpu_has_flash_attention": supported}
        unmeasured = torch.compiler.assume_constant_result(lambda head_size: "FA2")
        functions |= {"gpu_has_triton": supported, "fastest_gpu_attention": unmeasured}
        stack.enter_context(patch.multiple(attention, **functions))
        torch.backends.cuda.enable_cudnn_sdp(False)  # as use_gpu
        stack.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        yield calls
