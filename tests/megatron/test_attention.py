# SPDX-License-Identifier: Apache-2.0
"""Packed attention against softmax(q k^T) v written out in double precision, sequence by sequence."""

import pytest
import torch
from torch import Tensor

from bionemo.megatron.attention import Segments, attend, rotary_angles, rotate
from bionemo.megatron.cpu_attention import packed_attention

LENGTHS = (1, 37, 0, 64, 130, 2)


def written_out(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    pieces = []
    for a, b, c in zip(*(x[: sum(lengths)].split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * scale
        pieces.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat([*pieces, torch.zeros_like(v[sum(lengths) :])])


def projection(dtype: torch.dtype, filler: int = 9) -> Tensor:
    """A fused projection [T, heads, 3 x 16], as the attention finds it."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(LENGTHS) + filler, 3, 48, generator=generator).to(dtype).requires_grad_()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_output_and_gradients_equal_the_formula(dtype: torch.dtype, tolerance: float, threads: int) -> None:
    torch.set_num_threads(threads)
    fused = projection(dtype)
    exact = fused.detach().double().requires_grad_()
    weight = torch.randn(len(fused), 3, 16, generator=torch.Generator().manual_seed(1))
    weight[sum(LENGTHS) :] = 0  # nothing depends on what filler says
    out = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25)
    expected = written_out(*exact.split(16, dim=-1), LENGTHS, 0.25)
    assert out.dtype == dtype
    assert relative(out, expected) < tolerance
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    assert relative(fused.grad, exact.grad) < tolerance
    torch.set_num_threads(1)


def test_every_run_gives_the_same_bits_on_any_number_of_threads() -> None:
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        fused = projection(torch.bfloat16)
        out = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25)
        out.float().square().sum().backward()
        results.append((out.detach(), fused.grad))
    torch.set_num_threads(1)
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_dropout_path_without_dropping_is_the_same_attention() -> None:
    fused = projection(torch.float32).detach()
    segments = Segments(LENGTHS, torch.zeros(0), longest=130)
    parts = fused.split(16, dim=-1)
    plain = attend(*parts, segments, 0.25, 0.0)
    nearly = attend(*parts, segments, 0.25, 1e-30)
    torch.testing.assert_close(plain, nearly, rtol=1e-5, atol=1e-6)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    torch.manual_seed(0)
    q = torch.zeros(400, 2, 8)  # equal scores: every output is the mean of the kept values
    v = torch.ones(400, 2, 8)
    out = attend(q, q, v, Segments((400,), torch.zeros(0), 400), 1.0, 0.25)
    assert abs(float(out.mean()) - 1) < 0.01
    assert float(out.std()) > 0.01


def test_rotation_depends_only_on_distance() -> None:
    cos, sin = rotary_angles(torch.tensor([0, 3, 10, 13]), 16)
    x, y = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(2))
    turned_x, turned_y = rotate(x.expand(4, 1, 16), cos, sin), rotate(y.expand(4, 1, 16), cos, sin)
    near = (turned_x[0] * turned_y[1]).sum()
    far = (turned_x[2] * turned_y[3]).sum()
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned_x[0], x[0])  # position 0 stays
