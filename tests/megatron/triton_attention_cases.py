# SPDX-License-Identifier: Apache-2.0
"""Tests of the Triton kernels, run by test_triton_attention.py in a process with TRITON_INTERPRET=1, or on a GPU.

The reference is dropout(softmax(q k^T)) v in double precision, sequence by sequence.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton import language as tl

from bionemo.megatron.attention import rotary_cos_sin
from bionemo.megatron.dropout import AttentionDropout, keep_scale
from bionemo.megatron.triton_attention import triton_attention, triton_operator, triton_operator_backward
from bionemo.megatron.triton_rotary import merge, rotate

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
HEADS = 2  # 2 and 3 of 8
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # relative to the largest value
Triple = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def filled_memory() -> Iterator[None]:
    """Fill new tensors with NaN, which shows elements that no kernel writes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply bf16 matrices in fp32: the interpreter multiplies their bits as integers."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def create_fp32_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_fp32_dot)


class Case(NamedTuple):
    """Sequences, dtype and mask; cross-attention if there are key lengths."""

    lengths: tuple[int, ...]
    head_size: int
    dtype: torch.dtype = torch.float32
    causal: bool = False
    probability: float = 0.0
    key_lengths: tuple[int, ...] | None = None
    scale: float = 0.25

    def dropout(self) -> AttentionDropout | None:
        """Return the dropout of heads 2 and 3 of 8, with random keys."""
        keys = torch.randint(-(2**63), 2**63 - 1, (sum(self.lengths),), generator=torch.Generator().manual_seed(5))
        return AttentionDropout(keys, 10, 2, 8, self.probability) if self.probability else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, margin: int = 0) -> Tensor:
        """Return the attention, with upper bounds of the lengths that exceed them by `margin`."""
        lengths = self.lengths, self.key_lengths or self.lengths
        starts = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=DEVICE) for each in lengths]
        queries, keys = (max(each) + margin for each in lengths)
        dropout = self.dropout()
        if dropout is not None:
            dropout = dropout._replace(keys=dropout.keys.to(DEVICE))
        return triton_attention(q, k, v, starts[0], starts[1], queries, keys, self.scale, dropout, self.causal)

    def expected(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout, outputs = self.dropout(), []
        ends = accumulate(self.lengths)
        parts = (x.split(n) for x, n in zip((q, k, v), self.split_lengths(), strict=True))
        for end, a, b, c in zip(ends, *parts, strict=True):
            scores = torch.einsum("qhd,khd->hqk", a, b) * self.scale
            if self.causal:
                scores = scores.masked_fill(torch.arange(len(b)) > torch.arange(len(a))[:, None], -torch.inf)
            p = scores.softmax(-1)
            if dropout is not None:
                mask = dropout.keep_mask(slice(0, HEADS), slice(end - len(a), end), len(b))
                p = p * mask / (1 - round(self.probability * 65536) / 65536)
            outputs.append(torch.einsum("hqk,khd->qhd", p, c))
        return torch.cat(outputs)

    def split_lengths(self) -> tuple[tuple[int, ...], ...]:
        keys = self.key_lengths or self.lengths
        return self.lengths, keys, keys

    def inputs(self) -> tuple[list[Tensor], Triple]:
        """Return projections [T, heads, parts x head size] and q, k and v, which are views of them."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(sum(self.lengths), 3)]
        if self.key_lengths is not None:
            shapes = [(sum(self.lengths), 1), (sum(self.key_lengths), 2)]
        fused = [torch.randn(n, HEADS, parts * self.head_size, generator=generator) for n, parts in shapes]
        fused = [x.to(DEVICE, self.dtype).requires_grad_() for x in fused]
        q, k, v = (view for x in fused for view in x.split(self.head_size, -1))
        return fused, (q, k, v)


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.detach().cpu().double() - expected).abs().max() / expected.abs().max())


def check(case: Case, qkv: Triple, out: Tensor, weight: Tensor, tolerance: float) -> None:
    """Compare the output and the gradients of q, k and v."""
    exact = [x.detach().cpu().to(out.dtype).double().requires_grad_() for x in qkv]
    expected = case.expected(*exact)
    assert relative(out, expected) < tolerance
    gradients = torch.autograd.grad(out, qkv, weight)
    wanted = torch.autograd.grad(expected, exact, weight.cpu().double())
    for x, found, each in zip(qkv, gradients, wanted, strict=True):
        assert found.dtype == x.dtype
        assert relative(found, each) < tolerance


PACKED = (1, 0, 40)
CROSS = (33, 5, 0, 3)
NO_KEYS = (35, 0, 7, 4)  # the second sequence has queries, but no keys
LONG = (1, 130)
CASES = {
    "full": Case(PACKED, 16),
    "causal with dropout": Case(PACKED, 16, causal=True, probability=0.3),
    "cross": Case(CROSS, 24, key_lengths=NO_KEYS),
    "cross with dropout": Case(CROSS, 24, probability=0.1, key_lengths=NO_KEYS),
    "fp16 with dropout": Case(LONG, 64, torch.float16, probability=0.3),
    "bf16 causal": Case(LONG, 64, torch.bfloat16, causal=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_equal_the_formula(case: Case) -> None:
    _, qkv = case.inputs()
    out = case.attend(*qkv)
    assert out.dtype == case.dtype and out.is_contiguous()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, case.dtype)
    check(case, qkv, out, weight, TOLERANCES[case.dtype])


def test_large_scores() -> None:
    """Their exponentials exceed fp32."""
    case = Case((40,), 64, scale=10.0)
    _, qkv = case.inputs()
    out = case.attend(*qkv)
    assert float(torch.einsum("qhd,khd->hqk", *qkv[:2]).max()) * case.scale > 200
    check(case, qkv, out, torch.ones_like(out), 1e-4)


def test_queries_of_a_sequence_without_keys_have_output_and_gradient_0() -> None:
    case = Case((5, 3, 1), 24, probability=0.1, key_lengths=(4, 0, 4))
    (query, _), qkv = case.inputs()
    out = case.attend(*qkv)
    (gradient,) = torch.autograd.grad(out.square().sum(), query)
    for x in (out, gradient[:, :, :24]):
        assert x[:5].all() and not x[5:8].any() and x[8].all()


def test_other_dtypes_and_strides() -> None:
    """The dtypes differ, as under autocast; heads of neither tensors nor the gradient of the output are contiguous."""
    case = Case((20,), 16, torch.float16, probability=0.3)
    shapes = (16, HEADS, 20), (20, 16, HEADS), (20, 1, 1)
    q, k, weight = (torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) for shape in shapes)
    v = case.inputs()[1][2]
    qkv = q.permute(2, 1, 0).requires_grad_(), k.transpose(1, 2).requires_grad_(), v
    check(case, qkv, case.attend(*qkv), weight.half().expand(20, HEADS, 16), TOLERANCES[torch.float16])


@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 37), (torch.bfloat16, 130)])
def test_masks_equal_those_of_cpus(dtype: torch.dtype, n: int) -> None:
    """Equal scores and v[j] = 2^(j // D) e_(j % D): the bits of the output are the mask, as are those of dv."""
    case, first, size = Case((3, n), 64, dtype, probability=0.5), 3, 64
    zeros = torch.zeros(first + n, HEADS, size, device=DEVICE, dtype=dtype)
    code = zeros.clone()
    for j in range(n):
        code[first + j, :, j % size] = 2 ** (j // size)
    v = code.clone().requires_grad_()
    out = case.attend(zeros, zeros, v)
    (dv,) = torch.autograd.grad(out, v, code)
    found = []
    for x in (out.detach(), dv):
        bits = (x[first:].cpu().double() * n / keep_scale(0.5)).round().long()
        found.append(torch.cat([bits >> chunk & 1 for chunk in range(3)], -1)[:, :, :n].transpose(0, 1))
    dropout = case.dropout()
    assert dropout is not None
    mask = dropout.keep_mask(slice(0, HEADS), slice(first, first + n), n).long()
    assert torch.equal(found[0], mask)
    assert torch.equal(found[1], mask.mT)


def test_results_are_bitwise_equal_for_any_upper_bound_of_the_lengths() -> None:
    case, results = Case((1, 34), 16, causal=True, probability=0.3), []
    for margin in (0, 40):
        (fused,), qkv = case.inputs()
        out = case.attend(*qkv, margin=margin)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), fused)))
    assert all(map(torch.equal, *results))


def test_operators_follow_the_rules_of_custom_operators() -> None:
    q, k, v = (x.detach().contiguous().requires_grad_() for x in Case((3,), 16).inputs()[1])
    starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    arguments = (starts, starts, 3, 3, 0.25, True, torch.arange(3, device=DEVICE), 0, 2**18, 0.25)
    torch.library.opcheck(triton_operator, (q, k, v, *arguments))
    out, log_sum = triton_operator(q, k, v, *arguments)
    tensors = (x.detach() for x in (out, q, k, v, out, log_sum))
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(triton_operator_backward, (*tensors, *arguments), test_utils=checks)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("size", "heads"), [(64, 5), (6, 3)])
@pytest.mark.parametrize(("parts", "rotated"), [(3, 2), (3, 0), (2, 0)])
def test_rotation_and_merged_gradient_are_complex_products(
    dtype: torch.dtype, size: int, heads: int, parts: int, rotated: int
) -> None:
    """The pair (x_i, x_{i + d/2}) is a complex number times exp(i * angle); x is a view of a projection."""
    positions, generator = torch.arange(0, 370, 10), torch.Generator().manual_seed(3)
    cos, sin = (angles.to(DEVICE, dtype) for angles in rotary_cos_sin(positions, size))
    fused = torch.randn(37, heads, parts * size, generator=generator).to(DEVICE, dtype)
    x = fused[..., size : 2 * size]
    weights = [
        torch.randn(heads, 37, size, generator=generator).to(DEVICE, dtype).transpose(0, 1) for _ in range(parts)
    ]
    out, gradient = rotate(x, cos, sin), merge(weights, *((cos, sin) if rotated else (None, None)))
    assert out.is_contiguous() and gradient.is_contiguous() and out.dtype == gradient.dtype == dtype
    assert gradient.shape == (37, heads, parts, size)

    def pairs(values: Tensor) -> Tensor:
        return torch.complex(*values.cpu().double().chunk(2, -1))

    turn = torch.complex(*(angles[..., : size // 2].cpu().double() for angles in (cos, sin)))
    expected = [pairs(x) * turn, *(pairs(weight) * turn.conj() for weight in weights[:rotated])]
    for found, product in zip((out, *gradient.unbind(2)), expected, strict=False):
        assert relative(found, torch.cat((product.real, product.imag), -1)) < TOLERANCES[dtype]
    for part in range(rotated, parts):
        assert torch.equal(gradient[:, :, part], weights[part])


def test_rotation_operators_follow_the_rules_of_custom_operators() -> None:
    x = torch.randn(3, 2, 3, 8, device=DEVICE)
    cos, sin = (angles.to(DEVICE) for angles in rotary_cos_sin(torch.arange(3), 8))
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(rotate, (x[:, :, 1], cos, sin), test_utils=checks)
    torch.library.opcheck(merge, (list(x.unbind(2)), cos, sin), test_utils=checks)
    torch.library.opcheck(merge, (list(x.unbind(2))[:2], None, None), test_utils=checks)
