# SPDX-License-Identifier: Apache-2.0
"""Rotation by positions, and its gradient merged into that of the projection, for CUDA devices, in Triton.

torch.compile fuses the rotation with the split of queries, keys and values, and its gradient with their concatenation;
these kernels compute long index expressions and take several times as long (scripts/benchmark/RESULTS.md). The kernels
here read and write every value once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROTATED = 2048  # pairs of values of a block


@triton.jit
def _rotated(left, right, cos, sin):  # type: ignore[no-untyped-def]
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, half, x_token, x_head, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rotate a block of M rows; a row is one head of one token. `*_token` and `*_head` are strides."""
    rows_M, columns_D = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens_M1, heads_M1 = (rows_M // heads).to(tl.int64)[:, None], (rows_M % heads)[:, None]
    valid_MD = (rows_M < rows)[:, None] & (columns_D < half)[None, :]
    angles_MD = tokens_M1 * (2 * half) + columns_D[None, :]
    cos_MD = tl.load(cos_ptr + angles_MD, valid_MD, other=0.0).to(tl.float32)
    sin_MD = tl.load(sin_ptr + angles_MD, valid_MD, other=0.0).to(tl.float32)
    x = x_ptr + tokens_M1 * x_token + heads_M1 * x_head + columns_D[None, :]
    left_MD = tl.load(x, valid_MD, other=0.0).to(tl.float32)
    right_MD = tl.load(x + half, valid_MD, other=0.0).to(tl.float32)
    left_MD, right_MD = _rotated(left_MD, right_MD, cos_MD, sin_MD)
    out = out_ptr + rows_M.to(tl.int64)[:, None] * (2 * half) + columns_D[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out, left_MD.to(dtype), valid_MD)
    tl.store(out + half, right_MD.to(dtype), valid_MD)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, half,
    a_token, a_head, b_token, b_head, c_token, c_head,
    PARTS: tl.constexpr, ROTATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a block of M rows of each part to [T, H, PARTS, d]; rotate the first ROTATED parts back."""
    rows_M, columns_D = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens_M1, heads_M1 = (rows_M // heads).to(tl.int64)[:, None], (rows_M % heads)[:, None]
    valid_MD = (rows_M < rows)[:, None] & (columns_D < half)[None, :]
    out = out_ptr + rows_M.to(tl.int64)[:, None] * (2 * half * PARTS) + columns_D[None, :]
    dtype = out_ptr.dtype.element_ty
    for part in tl.static_range(PARTS):
        if part == 0:
            x = a_ptr + tokens_M1 * a_token + heads_M1 * a_head + columns_D[None, :]
        elif part == 1:
            x = b_ptr + tokens_M1 * b_token + heads_M1 * b_head + columns_D[None, :]
        else:
            x = c_ptr + tokens_M1 * c_token + heads_M1 * c_head + columns_D[None, :]
        left_MD = tl.load(x, valid_MD, other=0.0)
        right_MD = tl.load(x + half, valid_MD, other=0.0)
        if part < ROTATED:
            angles_MD = tokens_M1 * (2 * half) + columns_D[None, :]
            cos_MD = tl.load(cos_ptr + angles_MD, valid_MD, other=0.0).to(tl.float32)
            sin_MD = tl.load(sin_ptr + angles_MD, valid_MD, other=0.0).to(tl.float32)
            turned_left, turned_right = _rotated(left_MD.to(tl.float32), right_MD.to(tl.float32), cos_MD, -sin_MD)
            tl.store(out + part * 2 * half, turned_left.to(dtype), valid_MD)
            tl.store(out + part * 2 * half + half, turned_right.to(dtype), valid_MD)
        else:
            tl.store(out + part * 2 * half, left_MD, valid_MD)
            tl.store(out + part * 2 * half + half, right_MD, valid_MD)


@torch.library.custom_op("bionemo::rotate", mutates_args=())
def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) by the angle of its position; see `projection.rotate`. It has no gradient.

    Args:
        x_THd: fp32, fp16 or bf16; d is even.
        cos_T1d: contiguous; its second half repeats the first.
        sin_T1d: same.

    Returns:
        [T, H, d], contiguous, in the dtype of `x_THd`.
    """
    x_THd = x_THd if x_THd.stride(-1) == 1 else x_THd.contiguous()
    out_THd = x_THd.new_empty(x_THd.shape)
    rows, heads, half, grid, blocks = _launch(x_THd)
    if rows:
        _rotate_kernel[grid](
            x_THd, cos_T1d, sin_T1d, out_THd, rows, heads, half, *x_THd.stride()[:2], **blocks
        )  # fmt: skip
    return out_THd


@rotate.register_fake
def _(x_THd: Tensor, *arguments: Any) -> Tensor:
    return x_THd.new_empty(x_THd.shape)


@torch.library.custom_op("bionemo::merge_heads", mutates_args=())
def merge(gradients: list[Tensor], cos_T1d: Tensor | None, sin_T1d: Tensor | None) -> Tensor:
    """Return the gradient [T, H, n, d] of a projection from those of its n parts; see `projection.merge_heads`.

    Args:
        gradients: two or three of [T, H, d] in the same dtype; d is even.
        cos_T1d: as in `rotate`; None: no rotation.
        sin_T1d: same.
    """
    parts = [x if x.stride(-1) == 1 else x.contiguous() for x in gradients]
    out_THnd = _merged(parts)
    rows, heads, half, grid, blocks = _launch(parts[0])
    three = [*parts, parts[-1]][:3]  # the third is not read if there are two
    if rows:
        _merge_kernel[grid](
            *three, *(out_THnd if x is None else x for x in (cos_T1d, sin_T1d)), out_THnd, rows, heads, half,
            *(stride for x in three for stride in x.stride()[:2]),
            PARTS=len(parts), ROTATED=0 if cos_T1d is None else 2, **blocks,
        )  # fmt: skip
    return out_THnd


@merge.register_fake
def _(gradients: list[Tensor], *arguments: Any) -> Tensor:
    return _merged(gradients)


def _merged(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty(*parts[0].shape[:2], len(parts), parts[0].shape[2])


def _launch(x_THd: Tensor) -> tuple[int, int, int, tuple[int], dict[str, int]]:
    """Return rows, heads, pairs of a row, grid and block sizes."""
    tokens, heads, size = x_THd.shape
    width = triton.next_power_of_2(size // 2)
    block = max(1, _ROTATED // width)
    return (
        tokens * heads,
        heads,
        size // 2,
        (triton.cdiv(tokens * heads, block),),
        {"BLOCK_M": block, "BLOCK_D": width},
    )
