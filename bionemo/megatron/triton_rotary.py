# SPDX-License-Identifier: Apache-2.0
"""Rotary positions for CUDA devices, in Triton.

torch.compile fuses the rotation with the split of queries, keys and values, and its gradient with their concatenation;
these kernels compute long index expressions and take several times as long (scripts/benchmark/RESULTS.md). This kernel
reads and writes every value once, at the speed of the memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROTATED = 2048  # pairs of values of a block


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, half, x_token, x_head, out_token, out_head, direction,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate a block of M rows; a row is one head of one token. `*_token` and `*_head` are strides."""
    rows_M, columns_D = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens_M1, heads_M1 = (rows_M // heads).to(tl.int64)[:, None], (rows_M % heads)[:, None]
    valid_MD = (rows_M < rows)[:, None] & (columns_D < half)[None, :]
    angles_MD = tokens_M1 * (2 * half) + columns_D[None, :]
    cos_MD = tl.load(cos_ptr + angles_MD, valid_MD, other=0.0).to(tl.float32)
    sin_MD = tl.load(sin_ptr + angles_MD, valid_MD, other=0.0).to(tl.float32) * direction
    x = x_ptr + tokens_M1 * x_token + heads_M1 * x_head + columns_D[None, :]
    left_MD = tl.load(x, valid_MD, other=0.0).to(tl.float32)
    right_MD = tl.load(x + half, valid_MD, other=0.0).to(tl.float32)
    out = out_ptr + tokens_M1 * out_token + heads_M1 * out_head + columns_D[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out, (left_MD * cos_MD - right_MD * sin_MD).to(dtype), valid_MD)
    tl.store(out + half, (right_MD * cos_MD + left_MD * sin_MD).to(dtype), valid_MD)


@torch.library.custom_op("bionemo::rotate", mutates_args=())
def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, direction: float) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by the angle of its position times `direction`.

    Args:
        x_THd: fp32, fp16 or bf16; d is even.
        cos_T1d: contiguous; its second half repeats the first.
        sin_T1d: same.
        direction: 1, or -1 for the opposite rotation, which is the gradient.

    Returns:
        [T, H, d], contiguous, in the dtype of `x_THd`.
    """
    x_THd = x_THd if x_THd.stride(-1) == 1 else x_THd.contiguous()
    out_THd = x_THd.new_empty(x_THd.shape)
    tokens, heads, size = x_THd.shape
    width = triton.next_power_of_2(size // 2)
    block = max(1, _ROTATED // width)
    if out_THd.numel():
        _rotate_kernel[(triton.cdiv(tokens * heads, block),)](
            x_THd, cos_T1d, sin_T1d, out_THd, tokens * heads, heads, size // 2,
            *x_THd.stride()[:2], *out_THd.stride()[:2], direction, BLOCK_M=block, BLOCK_D=width,
        )  # fmt: skip
    return out_THd


@rotate.register_fake
def _(x_THd: Tensor, *arguments: Any) -> Tensor:
    return x_THd.new_empty(x_THd.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos_T1d, sin_T1d, ctx.direction = inputs
    ctx.save_for_backward(cos_T1d, sin_T1d)


def _backward(ctx: Any, gradient_THd: Tensor) -> tuple[Tensor | None, ...]:
    return rotate(gradient_THd, *ctx.saved_tensors, -ctx.direction), None, None, None


rotate.register_autograd(_backward, setup_context=_setup_context)
