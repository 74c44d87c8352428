# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences (variable length) with counter-based dropout for CUDA devices, in Triton.

The algorithm is FlashAttention-2 (Dao 2023): scores stay on chip, the forward pass stores a log-sum per query, and the
backward pass recomputes scores and dropout masks. Two kernels compute the gradients, one per block of queries and one
per block of keys; they use no atomic additions, so the results are deterministic. The masks equal those of
`AttentionDropout.keep_mask`.

Shapes: T query tokens, S key tokens, H heads of this rank, D head size, N sequences; in the kernels M queries and K
keys of a block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bionemo.megatron.dropout import AttentionDropout, keep_scale

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)  # constants of common/random_stream.py
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_LOG2_E = 1.4426950408889634


@triton.jit
def _lane_is_kept(bits, shift: tl.constexpr, threshold):  # type: ignore[no-untyped-def]
    """Compare 16 of the 64 bits, as a signed integer, with the threshold."""
    return ((bits >> shift).to(tl.int16).to(tl.int32) >= threshold).to(tl.int8)


@triton.jit
def _keep_mask(keys_M, first_key, threshold, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Draw the mask [M, K] of keys `first_key` and following; `keys_M` includes the counter of site and head."""
    counters = (first_key // 4 + tl.arange(0, BLOCK_K // 4) + 1).to(tl.uint64)
    bits = keys_M[:, None] + counters[None, :] * _GOLDEN
    bits = (bits ^ (bits >> 30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> 27)) * _MULTIPLIER_2
    bits = bits ^ (bits >> 31)
    even = tl.join(_lane_is_kept(bits, 0, threshold), _lane_is_kept(bits, 32, threshold))
    odd = tl.join(_lane_is_kept(bits, 16, threshold), _lane_is_kept(bits, 48, threshold))
    return tl.join(even, odd).reshape(keys_M.shape[0], BLOCK_K) != 0


@triton.jit
def _load_dropout_keys(keys_ptr, tokens_M, valid_M, head, first_counter, counters_per_head):  # type: ignore[no-untyped-def]
    """Return the keys of the queries, advanced to the counter of this site and head, uint64 [M]."""
    keys_M = tl.load(keys_ptr + tokens_M, mask=valid_M, other=0).to(tl.uint64)
    return keys_M + (first_counter + head * counters_per_head).to(tl.uint64) * _GOLDEN


@triton.jit
def _mask_scores(s_MK, queries_M, keys_K, num_keys, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set scores of keys beyond the sequence and, if causal, after the query to -inf."""
    visible_MK = keys_K[None, :] < num_keys
    if CAUSAL:
        visible_MK = visible_MK & (keys_K[None, :] <= queries_M[:, None])
    return tl.where(visible_MK, s_MK, float("-inf"))


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, query_starts_ptr, key_starts_ptr, dropout_keys_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, log_sum_head,
    score_scale, first_counter, counters_per_head, threshold, keep_factor, head_size,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one sequence and head. `*_token` and `*_head` are strides."""
    sequence, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start, key_start = tl.load(query_starts_ptr + sequence), tl.load(key_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    num_keys = tl.load(key_starts_ptr + sequence + 1) - key_start
    if block * BLOCK_M >= num_queries:
        return
    queries_M, columns_D = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid_M, valid_D = queries_M < num_queries, columns_D < head_size
    tokens_M = (query_start + queries_M).to(tl.int64)
    valid_MD = valid_M[:, None] & valid_D[None, :]
    q_MD = tl.load(q_ptr + tokens_M[:, None] * q_token + head * q_head + columns_D[None, :], valid_MD, other=0.0)
    if DROPOUT:
        dropout_keys_M = _load_dropout_keys(
            dropout_keys_ptr, tokens_M, valid_M, head, first_counter, counters_per_head
        )
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(num_keys, (block + 1) * BLOCK_M) if CAUSAL else num_keys
    for first in range(0, end, BLOCK_K):
        keys_K = first + tl.arange(0, BLOCK_K)
        valid_KD = (keys_K < num_keys)[:, None] & valid_D[None, :]
        rows_K = (key_start + keys_K).to(tl.int64)[:, None]
        k_KD = tl.load(k_ptr + rows_K * k_token + head * k_head + columns_D[None, :], valid_KD, other=0.0)
        v_KD = tl.load(v_ptr + rows_K * v_token + head * v_head + columns_D[None, :], valid_KD, other=0.0)
        s_MK = tl.dot(q_MD, tl.trans(k_KD), input_precision="ieee") * score_scale
        s_MK = _mask_scores(s_MK, queries_M, keys_K, num_keys, CAUSAL)
        new_top_M = tl.maximum(top_M, tl.max(s_MK, 1))
        p_MK = tl.exp2(s_MK - new_top_M[:, None])
        shrink_M = tl.exp2(top_M - new_top_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MK, 1)
        if DROPOUT:
            p_MK = tl.where(_keep_mask(dropout_keys_M, first, threshold, BLOCK_K), p_MK, 0.0)
        out_MD = out_MD * shrink_M[:, None]
        out_MD = tl.dot(p_MK.to(v_KD.dtype), v_KD, out_MD, input_precision="ieee")
        top_M = new_top_M
    # A sequence without keys has the output 0.
    factor_M = keep_factor / tl.where(sum_M > 0, sum_M, 1.0)
    out = out_ptr + tokens_M[:, None] * out_token + head * out_head + columns_D[None, :]
    tl.store(out, (out_MD * factor_M[:, None]).to(out_ptr.dtype.element_ty), valid_MD)
    tl.store(log_sum_ptr + head * log_sum_head + tokens_M, top_M + tl.log2(sum_M), valid_M)


@triton.jit
def _recompute(  # type: ignore[no-untyped-def]
    q_MD, k_KD, v_KD, do_MD, log_sum_M, delta_M, dropout_keys_M, queries_M, keys_K, first_key, num_keys,
    score_scale, threshold, keep_factor, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the probabilities after dropout and the gradient of the scores, both [M, K]."""
    s_MK = tl.dot(q_MD, tl.trans(k_KD), input_precision="ieee") * score_scale
    p_MK = tl.exp2(_mask_scores(s_MK, queries_M, keys_K, num_keys, CAUSAL) - log_sum_M[:, None])
    dp_MK = tl.dot(do_MD, tl.trans(v_KD), input_precision="ieee")
    dropped_MK = p_MK
    if DROPOUT:
        keep_MK = _keep_mask(dropout_keys_M, first_key, threshold, BLOCK_K)
        dropped_MK = tl.where(keep_MK, p_MK * keep_factor, 0.0)
        dp_MK = tl.where(keep_MK, dp_MK * keep_factor, 0.0)
    return dropped_MK, p_MK * (dp_MK - delta_M[:, None])


@triton.jit
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, log_sum_ptr, delta_ptr, dq_ptr,
    query_starts_ptr, key_starts_ptr, dropout_keys_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, do_token, do_head, dq_token, dq_head,
    log_sum_head, scale, score_scale, first_counter, counters_per_head, threshold, keep_factor, head_size,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries, and delta = sum(out * dout, -1), which the other kernel needs."""
    sequence, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start, key_start = tl.load(query_starts_ptr + sequence), tl.load(key_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    num_keys = tl.load(key_starts_ptr + sequence + 1) - key_start
    if block * BLOCK_M >= num_queries:
        return
    queries_M, columns_D = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid_M, valid_D = queries_M < num_queries, columns_D < head_size
    tokens_M = (query_start + queries_M).to(tl.int64)
    valid_MD = valid_M[:, None] & valid_D[None, :]
    rows_M = tokens_M[:, None]
    q_MD = tl.load(q_ptr + rows_M * q_token + head * q_head + columns_D[None, :], valid_MD, other=0.0)
    do_MD = tl.load(do_ptr + rows_M * do_token + head * do_head + columns_D[None, :], valid_MD, other=0.0)
    out_MD = tl.load(out_ptr + rows_M * out_token + head * out_head + columns_D[None, :], valid_MD, other=0.0)
    log_sum_M = tl.load(log_sum_ptr + head * log_sum_head + tokens_M, valid_M, other=0.0)
    delta_M = tl.sum(out_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    tl.store(delta_ptr + head * log_sum_head + tokens_M, delta_M, valid_M)
    dropout_keys_M = _load_dropout_keys(dropout_keys_ptr, tokens_M, valid_M, head, first_counter, counters_per_head)
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(num_keys, (block + 1) * BLOCK_M) if CAUSAL else num_keys
    for first in range(0, end, BLOCK_K):
        keys_K = first + tl.arange(0, BLOCK_K)
        valid_KD = (keys_K < num_keys)[:, None] & valid_D[None, :]
        rows_K = (key_start + keys_K).to(tl.int64)[:, None]
        k_KD = tl.load(k_ptr + rows_K * k_token + head * k_head + columns_D[None, :], valid_KD, other=0.0)
        v_KD = tl.load(v_ptr + rows_K * v_token + head * v_head + columns_D[None, :], valid_KD, other=0.0)
        _, ds_MK = _recompute(
            q_MD, k_KD, v_KD, do_MD, log_sum_M, delta_M, dropout_keys_M, queries_M, keys_K, first, num_keys,
            score_scale, threshold, keep_factor, CAUSAL, DROPOUT, BLOCK_K,
        )  # fmt: skip
        dq_MD = tl.dot(ds_MK.to(k_KD.dtype), k_KD, dq_MD, input_precision="ieee")
    dq = dq_ptr + rows_M * dq_token + head * dq_head + columns_D[None, :]
    tl.store(dq, (dq_MD * scale).to(dq_ptr.dtype.element_ty), valid_MD)


@triton.jit
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, do_ptr, log_sum_ptr, delta_ptr, dk_ptr, dv_ptr,
    query_starts_ptr, key_starts_ptr, dropout_keys_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, dk_token, dk_head, dv_token, dv_head,
    log_sum_head, scale, score_scale, first_counter, counters_per_head, threshold, keep_factor, head_size,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys."""
    sequence, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start, key_start = tl.load(query_starts_ptr + sequence), tl.load(key_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    num_keys = tl.load(key_starts_ptr + sequence + 1) - key_start
    if block * BLOCK_K >= num_keys:
        return
    keys_K, columns_D = block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    valid_D = columns_D < head_size
    valid_KD = (keys_K < num_keys)[:, None] & valid_D[None, :]
    rows_K = (key_start + keys_K).to(tl.int64)[:, None]
    k_KD = tl.load(k_ptr + rows_K * k_token + head * k_head + columns_D[None, :], valid_KD, other=0.0)
    v_KD = tl.load(v_ptr + rows_K * v_token + head * v_head + columns_D[None, :], valid_KD, other=0.0)
    dk_KD = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv_KD = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    begin = (block * BLOCK_K) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for first in range(begin, num_queries, BLOCK_M):
        queries_M = first + tl.arange(0, BLOCK_M)
        valid_M = queries_M < num_queries
        valid_MD = valid_M[:, None] & valid_D[None, :]
        tokens_M = (query_start + queries_M).to(tl.int64)
        rows_M = tokens_M[:, None]
        q_MD = tl.load(q_ptr + rows_M * q_token + head * q_head + columns_D[None, :], valid_MD, other=0.0)
        do_MD = tl.load(do_ptr + rows_M * do_token + head * do_head + columns_D[None, :], valid_MD, other=0.0)
        log_sum_M = tl.load(log_sum_ptr + head * log_sum_head + tokens_M, valid_M, other=0.0)
        delta_M = tl.load(delta_ptr + head * log_sum_head + tokens_M, valid_M, other=0.0)
        dropout_keys_M = _load_dropout_keys(
            dropout_keys_ptr, tokens_M, valid_M, head, first_counter, counters_per_head
        )
        dropped_MK, ds_MK = _recompute(
            q_MD, k_KD, v_KD, do_MD, log_sum_M, delta_M, dropout_keys_M, queries_M, keys_K, block * BLOCK_K,
            num_keys, score_scale, threshold, keep_factor, CAUSAL, DROPOUT, BLOCK_K,
        )  # fmt: skip
        dv_KD = tl.dot(tl.trans(dropped_MK.to(do_MD.dtype)), do_MD, dv_KD, input_precision="ieee")
        dk_KD = tl.dot(tl.trans(ds_MK.to(q_MD.dtype)), q_MD, dk_KD, input_precision="ieee")
    dk = dk_ptr + rows_K * dk_token + head * dk_head + columns_D[None, :]
    dv = dv_ptr + rows_K * dv_token + head * dv_head + columns_D[None, :]
    tl.store(dk, (dk_KD * scale).to(dk_ptr.dtype.element_ty), valid_KD)
    tl.store(dv, dv_KD.to(dv_ptr.dtype.element_ty), valid_KD)


def _blocks(head_size: int, dtype: torch.dtype, backward: bool) -> dict[str, int]:
    """Return block sizes whose operands fit the registers and 99 KiB of shared memory."""
    width = max(16, triton.next_power_of_2(head_size))
    if dtype == torch.float32:
        queries = keys = 32 if width <= 64 else 16
    elif width > 128 or (backward and width > 64):
        queries = keys = 32
    else:
        queries, keys = 64 if backward else 128, 64 if width <= 64 else 32
    return {"BLOCK_M": queries, "BLOCK_K": keys, "BLOCK_D": width, "num_warps": 8 if queries == 128 else 4}


def _scalars(dropout: tuple[int, int, float], scale: float) -> tuple[float, int, int, int, float]:
    """Return score scale for exp2, first counter, counters per head, threshold and keep factor."""
    first_counter, counters_per_head, probability = dropout
    threshold = round(probability * 65536) - 32768
    return scale * _LOG2_E, first_counter, counters_per_head, threshold, keep_scale(probability)


@torch.library.custom_op("bionemo::packed_attention", mutates_args=())
def triton_operator(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, max_queries: int, max_keys: int,
    scale: float, causal: bool, dropout_keys: Tensor | None, first_counter: int, counters_per_head: int,
    probability: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output [T, H, D] and the base-2 log-sum of the scores of every query, fp32 [H, T]."""
    out = q.new_empty(q.shape)
    log_sum = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    blocks = _blocks(q.shape[2], q.dtype, backward=False)
    grid = (len(query_starts) - 1, triton.cdiv(max_queries, blocks["BLOCK_M"]), q.shape[1])
    if all(grid):
        _forward_kernel[grid](
            q, k, v, out, log_sum, query_starts, key_starts, query_starts if dropout_keys is None else dropout_keys,
            *(stride for x in (q, k, v, out) for stride in x.stride()[:2]), log_sum.stride(0),
            *_scalars((first_counter, counters_per_head, probability), scale), q.shape[2],
            CAUSAL=causal, DROPOUT=dropout_keys is not None, **blocks,
        )  # fmt: skip
    return out, log_sum


@triton_operator.register_fake
def _(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("bionemo::packed_attention_backward", mutates_args=())
def triton_operator_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, query_starts: Tensor,
    key_starts: Tensor, max_queries: int, max_keys: int, scale: float, causal: bool, dropout_keys: Tensor | None,
    first_counter: int, counters_per_head: int, probability: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(log_sum)
    blocks = _blocks(q.shape[2], q.dtype, backward=True)
    scalars = (
        log_sum.stride(0), scale, *_scalars((first_counter, counters_per_head, probability), scale), q.shape[2],
    )  # fmt: skip
    keys = query_starts if dropout_keys is None else dropout_keys
    options: dict[str, Any] = {"CAUSAL": causal, "DROPOUT": dropout_keys is not None, **blocks}
    sequences, heads = len(query_starts) - 1, q.shape[1]
    grid = (sequences, triton.cdiv(max_queries, blocks["BLOCK_M"]), heads)
    if all(grid):
        _query_gradient_kernel[grid](
            q, k, v, out, do, log_sum, delta, dq, query_starts, key_starts, keys,
            *(stride for x in (q, k, v, out, do, dq) for stride in x.stride()[:2]), *scalars, **options,
        )  # fmt: skip
    grid = (sequences, triton.cdiv(max_keys, blocks["BLOCK_K"]), heads)
    if all(grid):
        _key_gradient_kernel[grid](
            q, k, v, do, log_sum, delta, dk, dv, query_starts, key_starts, keys,
            *(stride for x in (q, k, v, do, dk, dv) for stride in x.stride()[:2]), *scalars, **options,
        )  # fmt: skip
    return dq, dk, dv


@triton_operator_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_starts, key_starts, *arguments = inputs
    *before, dropout_keys, first_counter, counters_per_head, probability = arguments
    ctx.save_for_backward(q, k, v, *output, query_starts, key_starts, dropout_keys)
    ctx.arguments = before, (first_counter, counters_per_head, probability)


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, dropout_keys = ctx.saved_tensors
    before, after = ctx.arguments
    do = do if do.stride(-1) == 1 else do.contiguous()
    return *triton_operator_backward(do, *tensors, *before, dropout_keys, *after), *(10 * [None])


triton_operator.register_autograd(_backward, setup_context=_setup_context)


def triton_attention(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    dropout: AttentionDropout | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention within each sequence of a packed batch, or cross-attention between paired sequences.

    Args:
        q_THD: fp32, fp16 or bf16; the head size is at most 256.
        k_SHD: same dtype.
        v_SHD: same dtype.
        query_starts: [N + 1] int32, first token of each sequence, and T.
        key_starts: [N + 1] int32, first key token of each sequence, and S.
        max_queries: upper bound of the number of queries of a sequence.
        max_keys: upper bound of the number of keys of a sequence.
        scale: factor of the scores, usually D ** -0.5.
        dropout: dropout of the attention probabilities.
        causal: attend to earlier tokens only; not for cross-attention.

    Returns:
        [T, H, D], contiguous, in the dtype of `v_SHD`.
    """
    dtype = v_SHD.dtype
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD.to(dtype), k_SHD.to(dtype), v_SHD)]
    keys, probability = (None, 0.0) if dropout is None else (dropout.keys, dropout.probability)
    counters = (0, 0) if dropout is None else dropout.counters(max_keys)
    out: Tensor = triton_operator(
        *tensors, query_starts, key_starts, max_queries, max_keys, scale, causal, keys, *counters, probability
    )[0]
    return out
