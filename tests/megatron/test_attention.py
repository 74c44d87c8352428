# SPDX-License-Identifier: Apache-2.0
"""Packed attention, compared with dropout(softmax(q k^T)) v computed in double precision, sequence by sequence."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from bionemo.common import random_stream
from bionemo.megatron import attention, cpu_attention
from bionemo.megatron.attention import (
    PackedAttention,
    PackedSequences,
    attend_per_sequence,
    rotary_cos_sin,
)
from bionemo.megatron.cpu_attention import Kernel, packed_attention
from bionemo.megatron.dropout import AttentionDropout
from bionemo.megatron.projection import rotate, split_heads

LENGTHS = (1, 37, 0, 64, 130, 2)
HEADS, SITE = 4, 10
KEYS = torch.randint(-(2**63), 2**63 - 1, (sum(LENGTHS) + 9,), generator=torch.Generator().manual_seed(5))
DROPPED = AttentionDropout(KEYS, SITE, first_head=0, num_heads=HEADS, probability=0.3)
WAYS = pytest.mark.parametrize("way", [packed_attention, attend_per_sequence])
SHARES = pytest.mark.parametrize("dropout", [None, DROPPED], ids=["whole", "dropped"])
KERNELS = pytest.mark.parametrize("kernel", ["flash", "mkl", "onednn"], indirect=True)
Way = Callable[..., Tensor]
fastest_kernel = cpu_attention._fastest_kernel


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Set the kernel of attention, which otherwise depends on measured times; MKL does not multiply bf16."""
    name: Kernel = getattr(request, "param", "mkl")
    if name == "onednn" and not cpu_attention._onednn_is_exact():
        pytest.skip("oneDNN may use AMX on this CPU")

    def fixed(head_size: int, dtype: torch.dtype, dropout: bool, backward: bool) -> Kernel:
        return "onednn" if dtype == torch.bfloat16 and name == "mkl" else name

    monkeypatch.setattr(cpu_attention, "_fastest_kernel", fixed)
    return name


def factors(keys: Tensor, columns: int, heads: int, probability: float) -> Tensor:
    """Return the dropout factor of each probability [h, n, m] of one sequence: 0 or 1 / (1 - p), drawn one by one."""
    words, n = keys.numpy().astype(np.uint64), len(keys)
    result = np.zeros((heads, n, columns))
    for head in range(heads):
        for j in range(columns):
            lanes = random_stream.draw(words, SITE * 2**20 + head * (2**20 // heads) + j // 4) >> np.uint64(
                16 * (j % 4)
            )
            result[head, :, j] = lanes.astype(np.uint16).astype(np.int16) >= round(probability * 65536) - 32768
    return torch.from_numpy(result) / (1 - round(probability * 65536) / 65536)


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    dropout: AttentionDropout | None = None,
    key_lengths: tuple[int, ...] = LENGTHS,
    causal: bool = False,
) -> Tensor:
    pieces = []
    parts = [x[: sum(lengths)].split(lengths) for x in (q, KEYS)]
    parts += [x[: sum(key_lengths)].split(key_lengths) for x in (k, v)]
    for a, keys, b, c in zip(*parts, strict=True):
        s = torch.einsum("qhd,khd->hqk", a, b) * scale
        if causal:
            later = torch.arange(len(b)) > torch.arange(len(a))[:, None]
            s = s.masked_fill(later, -1e9)
        p = s.softmax(-1)
        if dropout is not None:
            p = p * factors(keys, len(b), q.shape[1], dropout.probability)
        pieces.append(torch.einsum("hqk,khd->qhd", p, c))
    return torch.cat([*pieces, torch.zeros_like(q[sum(lengths) :])])


def projection(dtype: torch.dtype, filler: int = 9) -> Tensor:
    """Return a fused projection [T, heads, 3 x 16], the input of the attention."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(LENGTHS) + filler, HEADS, 48, generator=generator).to(dtype).requires_grad_()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@WAYS
@SHARES
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_output_and_gradients_equal_the_formula(
    way: Way, dropout: AttentionDropout | None, dtype: torch.dtype, tolerance: float, threads: int
) -> None:
    torch.set_num_threads(threads)
    fused = projection(dtype)
    exact = fused.detach().double().requires_grad_()
    weight = torch.randn(len(fused), HEADS, 16, generator=torch.Generator().manual_seed(1))
    weight[sum(LENGTHS) :] = 0  # the content of padding has no effect
    out = way(*fused.split(16, dim=-1), LENGTHS, 0.25, dropout)
    expected = written_out(*exact.split(16, dim=-1), LENGTHS, 0.25, dropout)
    assert out.dtype == dtype
    assert not out[sum(LENGTHS) :].any()
    assert relative(out, expected) < tolerance
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    assert relative(fused.grad, exact.grad) < tolerance
    torch.set_num_threads(1)


OTHERS = (40, 3, 0, 64, 33, 200)  # as many sequences, with an empty one at the same index


@pytest.fixture
def stripe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the number of queries of a causal sequence in one block."""
    monkeypatch.setattr(cpu_attention, "_STRIPE", request.param)
    cpu_attention._tiles.cache_clear()
    yield
    cpu_attention._tiles.cache_clear()


@WAYS
@SHARES
@pytest.mark.usefixtures("stripe")
@pytest.mark.parametrize("stripe", [32, 256], indirect=True)
@pytest.mark.parametrize("pattern", [{"causal": True}, {"key_lengths": OTHERS}], ids=["causal", "cross"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_causal_and_cross_attention_equal_the_formula(
    way: Way, dropout: AttentionDropout | None, pattern: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    fused = projection(dtype)
    keys = sum(pattern.get("key_lengths", LENGTHS)) + 5
    other = torch.randn(keys, HEADS, 32, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    exact, exact_other = (x.detach().double().requires_grad_() for x in (fused, other))
    weight = torch.randn(len(fused), HEADS, 16, generator=torch.Generator().manual_seed(1))
    weight[sum(LENGTHS) :] = 0
    out = way(fused[..., :16], *other.split(16, dim=-1), LENGTHS, 0.25, dropout, **pattern)
    expected = written_out(exact[..., :16], *exact_other.split(16, dim=-1), LENGTHS, 0.25, dropout, **pattern)
    assert not out[sum(LENGTHS) :].any()
    assert relative(out, expected) < tolerance
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    assert relative(fused.grad, exact.grad) < tolerance
    assert relative(other.grad, exact_other.grad) < tolerance


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Divide long sequences into tiles of one head, and causal ones into short stripes."""
    monkeypatch.setattr(cpu_attention, "_TILE", 2**13)
    monkeypatch.setattr(cpu_attention, "_STRIPE", 32)
    cpu_attention._tiles.cache_clear()
    assert len(cpu_attention._tiles(LENGTHS, LENGTHS, HEADS, True)) > len(LENGTHS)
    yield
    cpu_attention._tiles.cache_clear()


NO_KEYS = (40, 0, 0, 64, 33, 200)  # the second sequence has queries, but no keys


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("kernel", "dropout"),
    [("flash", None), ("mkl", None), ("mkl", DROPPED), ("onednn", None), ("onednn", DROPPED)],
    ids=["flash", "mkl", "mkl-dropped", "onednn", "onednn-dropped"],
    indirect=["kernel"],
)
@pytest.mark.parametrize("pattern", [{}, {"causal": True}, {"key_lengths": NO_KEYS}], ids=["full", "causal", "cross"])
def test_every_kernel_equals_the_formula(dropout: AttentionDropout | None, pattern: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = sum(pattern.get("key_lengths", LENGTHS)) + 5
    shapes = [(HEADS, sum(LENGTHS) + 9, 16), (HEADS, keys, 16), (16, HEADS, keys)]
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    # neither its last dimension nor that of the values is contiguous
    weight = torch.randn(16, HEADS, sum(LENGTHS) + 9, generator=generator).permute(2, 1, 0)

    def views(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.transpose(0, 1), k.transpose(0, 1), v.permute(2, 1, 0)

    out = packed_attention(*views(q, k, v), LENGTHS, 0.25, dropout, **pattern)
    expected = written_out(*views(*exact), LENGTHS, 0.25, dropout, **pattern)
    assert out.is_contiguous()
    assert not out[sum(LENGTHS) :].any()
    assert relative(out, expected) < 2e-6
    out.backward(weight)
    weight[sum(LENGTHS) :] = 0
    expected.backward(weight.double())
    for found, wanted in zip((q, k, v), exact, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert relative(found.grad, wanted.grad) < 2e-6


def test_the_module_selects_causal_or_cross_attention() -> None:
    """Causal according to its mask type; cross-attention according to the segments, with its own dropout draws."""
    segments = PackedSequences(LENGTHS, torch.zeros(0), max_length=130, dropout_keys=KEYS)
    fused = projection(torch.float32).detach()
    parts = fused.split(16, dim=-1)
    wide = [x[:, None] for x in parts]
    causal = module(attn_mask_type=AttnMaskType.causal)(*wide, packed_seq_params=segments)
    assert torch.equal(causal, packed_attention(*parts, LENGTHS, 0.25, DROPPED, causal=True).view(len(fused), 1, -1))

    others = PackedSequences(OTHERS, torch.zeros(0), max_length=200)
    other = torch.randn(sum(OTHERS), HEADS, 32, generator=torch.Generator().manual_seed(3)).split(16, dim=-1)
    cross = module(attention_type="cross", attn_mask_type=AttnMaskType.no_mask)
    found = cross(wide[0], *(x[:, None] for x in other), packed_seq_params=segments.with_context(others))
    drawn = DROPPED._replace(site=SITE + 2)
    expected = packed_attention(parts[0], *other, LENGTHS, 0.25, drawn, key_lengths=OTHERS)
    assert torch.equal(found, expected.view(len(fused), 1, -1))


@pytest.mark.parametrize(
    ("kernel", "dtype", "dropout"),
    [
        ("mkl", torch.bfloat16, None),
        ("mkl", torch.bfloat16, DROPPED),
        ("flash", torch.float32, None),
        ("flash", torch.bfloat16, None),
        ("mkl", torch.float32, None),
        ("onednn", torch.float32, DROPPED),
    ],
    indirect=["kernel"],
)
def test_results_are_bitwise_equal_for_any_number_of_threads(
    dtype: torch.dtype, dropout: AttentionDropout | None
) -> None:
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        fused = projection(dtype)
        out = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25, dropout)
        out.float().square().sum().backward()
        results.append((out.detach(), fused.grad))
    torch.set_num_threads(1)
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(gradient, results[0][1])


@KERNELS
@pytest.mark.parametrize("threads", [1, 2])
def test_denormals_are_flushed_to_zero_only_inside_attention(threads: int) -> None:
    """Sharp attention produces many denormals, each of which costs as much as a hundred additions."""
    tiny = torch.full((20, 1, 8), 1e-40)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = packed_attention(torch.zeros_like(tiny), torch.zeros_like(tiny), tiny, (20,), 1.0)
    finally:
        torch.set_num_threads(before)
    assert not out.any()
    assert (tiny * 1.0).any()


@WAYS
def test_dropout_does_not_depend_on_tensor_parallelism(way: Way) -> None:
    q, k, v = projection(torch.float32).detach().split(16, dim=-1)
    halves = [
        way(q[:, part], k[:, part], v[:, part], LENGTHS, 0.25, DROPPED._replace(first_head=part.start))
        for part in (slice(0, HEADS // 2), slice(HEADS // 2, HEADS))
    ]
    torch.testing.assert_close(torch.cat(halves, 1), way(q, k, v, LENGTHS, 0.25, DROPPED), rtol=1e-5, atol=1e-6)


def test_dropout_of_a_sequence_does_not_depend_on_its_packed_batch() -> None:
    start, n = sum(LENGTHS[:4]), LENGTHS[4]
    whole, tokens = slice(0, HEADS), slice(start, start + n)
    alone = DROPPED._replace(keys=KEYS[tokens])
    assert torch.equal(alone.keep_mask(whole, slice(0, n), n), DROPPED.keep_mask(whole, tokens, n))
    fused = projection(torch.float32).detach()
    packed = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25, DROPPED)[tokens]
    found = packed_attention(*fused[tokens].split(16, dim=-1), (n,), 0.25, alone)
    torch.testing.assert_close(found, packed, rtol=1e-5, atol=1e-6)


def module(layer: int = SITE // 5, **options: Any) -> PackedAttention:
    config = TransformerConfig(
        num_layers=3, hidden_size=16 * HEADS, num_attention_heads=HEADS, attention_dropout=DROPPED.probability
    )
    return PackedAttention(config, layer, **options)


def test_module_dropout_uses_the_layer_and_the_heads_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = PackedSequences(LENGTHS, torch.zeros(0), max_length=130, dropout_keys=KEYS)
    fused = projection(torch.float32).detach()
    parts = [x[:, None] for x in fused.split(16, dim=-1)]
    dropped = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25, DROPPED).view(len(fused), 1, -1)
    assert torch.equal(module()(*parts, packed_seq_params=segments), dropped)

    whole = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25).view(len(fused), 1, -1)
    keyless = replace(segments, dropout_keys=None)
    assert torch.equal(module().eval()(*parts, packed_seq_params=keyless), whole)
    with pytest.raises(AssertionError, match="keys"):
        module()(*parts, packed_seq_params=keyless)

    monkeypatch.setattr(attention, "get_pg_rank", lambda group: 1)
    second = module()(*(x[:, :, HEADS // 2 :] for x in parts), packed_seq_params=segments)
    torch.testing.assert_close(second, dropped[:, :, 8 * HEADS :], rtol=1e-5, atol=1e-6)


def test_compiled_attention_is_equal() -> None:
    segments = PackedSequences(LENGTHS, torch.zeros(0), max_length=130, dropout_keys=KEYS)
    fused, again = projection(torch.float32), projection(torch.float32)
    compiled = torch.compile(module(), backend="aot_eager")
    for found, attend in ((fused, module()), (again, compiled)):
        out = attend(*(x[:, None] for x in found.split(16, dim=-1)), packed_seq_params=segments)
        out.square().sum().backward()
    assert torch.equal(fused.grad, again.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.needs_gpu
def test_gpu_dropout_is_equal_and_deterministic() -> None:
    fused = projection(torch.float32).detach()
    ends = torch.tensor([0, *LENGTHS, len(fused) - sum(LENGTHS)]).cumsum(0).int().cuda()
    segments = PackedSequences(LENGTHS, ends, max_length=130)
    found = attention.attend(*fused.cuda().split(16, dim=-1), segments, 0.25, DROPPED._replace(keys=KEYS.cuda()))
    expected = packed_attention(*fused.split(16, dim=-1), LENGTHS, 0.25, DROPPED)
    valid = slice(sum(LENGTHS))  # the values at padding differ
    torch.testing.assert_close(found[valid].cpu(), expected[valid], rtol=1e-4, atol=1e-5)

    torch.use_deterministic_algorithms(True)
    try:
        gradients = []
        for _ in range(3):
            half = fused.cuda().bfloat16().requires_grad_()
            attention.attend(*half.split(16, dim=-1), segments, 0.25).float().square().sum().backward()
            gradients.append(half.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients[1:])


def test_rotary_embeddings_depend_only_on_distance() -> None:
    cos, sin = rotary_cos_sin(torch.tensor([0, 3, 10, 13]), 16)
    x, y = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(2))
    turned_x, turned_y = rotate(x.expand(4, 1, 16), cos, sin), rotate(y.expand(4, 1, 16), cos, sin)
    near = (turned_x[0] * turned_y[1]).sum()
    far = (turned_x[2] * turned_y[3]).sum()
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned_x[0], x[0])  # position 0 is not rotated


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("compiling", [False, True])
def test_rotary_embeddings_are_complex_rotations(
    monkeypatch: pytest.MonkeyPatch, compiling: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """The pair (x_i, x_{i + 8}) is a complex number times exp(i * position * 10000^(-i/8)); so is the gradient."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    positions = torch.tensor([0, 1, 5, 300])
    fused = torch.randn(4, 3, 48, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    weights = torch.randn(3, 4, 3, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        parts = split_heads(fused.view(4, 1, 144), 3, 3, rotary_cos_sin(positions, 16))
    assert all(part.dtype == dtype and part.shape == (4, 1, 3, 16) for part in parts)
    sum((part.squeeze(1) * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    assert fused.grad is not None
    assert torch.equal(parts[2].squeeze(1), fused[..., 32:]) and torch.equal(fused.grad[..., 32:], weights[2])

    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(8.0, dtype=torch.float64) / 8)
    turn = torch.polar(torch.ones_like(angles), angles)
    for part, place in ((0, slice(16)), (1, slice(16, 32))):
        given, weight = (torch.complex(*x.detach().double().chunk(2, -1)) for x in (fused[..., place], weights[part]))
        for found, expected in (
            (parts[part].squeeze(1), given * turn),
            (fused.grad[..., place], weight * turn.conj()),
        ):
            assert relative(found, torch.cat((expected.real, expected.imag), dim=-1)) < tolerance


@pytest.mark.parametrize(("parts", "rotary"), [(3, True), (3, False), (2, False)])
def test_gradients_of_the_projection_equal_finite_differences(parts: int, rotary: bool) -> None:
    mixed = torch.randn(5, 1, 2 * parts * 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cos, sin = (angles.double() for angles in rotary_cos_sin(torch.arange(5), 6))
    angles = (cos, sin) if rotary else None
    assert torch.autograd.gradcheck(lambda x: split_heads(x, parts, 2, angles), mixed.requires_grad_())


Candidates = Mapping[str, Callable[[], object]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Candidates]]:
    """Record the measurements of kernels, of which the last candidate is the fastest."""
    calls: list[tuple[str, str, Candidates]] = []

    def record(name: str, version: str, candidates: Candidates) -> str:
        calls.append((name, version, candidates))
        return list(candidates)[-1]

    monkeypatch.setattr(cpu_attention, "autotune", record)
    monkeypatch.setattr(cpu_attention, "_fastest_kernel", cache(fastest_kernel.__wrapped__))
    return calls


@pytest.mark.parametrize("exact", [True, False])
def test_kernels_are_measured_once_per_process(
    measured: list[tuple[str, str, Candidates]], monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Once for each head size and with dropout; without the kernels that are not exact or have no dropout."""
    monkeypatch.setattr(cpu_attention, "_onednn_is_exact", lambda: exact)
    seen: list[Kernel] = []

    def attend(q: Tensor, *arguments: Any) -> Tensor:
        seen.append(arguments[-1])
        return q

    monkeypatch.setattr(cpu_attention, "_attend", attend)
    x = torch.zeros(3, 2, 16)
    for dropout in (None, DROPPED, None, DROPPED):
        packed_attention(x, x, x, (3,), 0.25, dropout)
    packed_attention(x[..., :8], x[..., :8], x[..., :8], (3,), 0.25)
    onednn = ["onednn"] if exact else []
    expected = [["flash", "mkl", *onednn], ["mkl", *onednn], ["flash", "mkl", *onednn]]
    expected = [each for each in expected if len(each) > 1]  # there is nothing to choose
    assert [list(candidates) for _, _, candidates in measured] == expected
    assert len({name for name, _, _ in measured}) == len(expected)
    assert seen == [*(2 * ["onednn" if exact else "mkl", "onednn" if exact else "mkl"]), expected[-1][-1]]


def test_bf16_kernels_are_measured_for_training_and_for_inference(
    measured: list[tuple[str, str, Candidates]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(cpu_attention, "_attend", lambda q, *_: q)
    x = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    packed_attention(x, x, x, (3,), 0.25)
    packed_attention(x, x, x.requires_grad_(), (3,), 0.25)
    with torch.no_grad():
        packed_attention(x, x, x, (3,), 0.25)
    packed_attention(x, x, x, (3,), 0.25, DROPPED)  # one kernel has dropout
    assert [list(candidates) for _, _, candidates in measured] == [["flash", "onednn"]] * 2
    assert [name for name, _, _ in measured] == [
        "bf16-forward-attention-of-head-size-16", "bf16-attention-of-head-size-16",
    ]  # fmt: skip


@pytest.mark.parametrize("dropout", [False, True])
def test_a_measurement_runs_each_kernel_on_one_core(
    measured: list[tuple[str, str, Candidates]], monkeypatch: pytest.MonkeyPatch, dropout: bool
) -> None:
    """Forward and backward pass, also for a caller without gradients; the number of threads is restored."""
    runs: list[tuple[Kernel, int]] = []
    attend = cpu_attention._attend

    def watched(*arguments: Any) -> Tensor:
        runs.append((arguments[-1], torch.get_num_threads()))
        out = attend(*arguments)
        out.register_hook(lambda gradient: runs.append((arguments[-1], torch.get_num_threads())))
        return out

    def measure(name: str, version: str, candidates: Candidates) -> str:
        for run in candidates.values():
            run()
        return "mkl"

    monkeypatch.setattr(cpu_attention, "_attend", watched)
    monkeypatch.setattr(cpu_attention, "autotune", measure)
    monkeypatch.setattr(cpu_attention, "_onednn_is_exact", lambda: True)
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            assert cpu_attention._fastest_kernel(16, torch.float32, dropout, backward=True) == "mkl"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert runs == [(name, 1) for name in ("flash", "mkl", "onednn")[dropout:] for _ in range(2)]


def test_the_measured_kernel_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = fastest_kernel.__wrapped__(16, torch.float32, False, True)
    [file] = (tmp_path / "bionemo" / "autotune").iterdir()
    assert file.read_text() == f"{chosen}\n"
    assert chosen in ("flash", "mkl", "onednn")
    monkeypatch.setattr(cpu_attention, "_attend", None)  # is not measured again
    assert fastest_kernel.__wrapped__(16, torch.float32, False, True) == chosen


@pytest.mark.parametrize("threads", [3, 8, 18])
def test_threads_of_the_pool_share_the_cores(threads: int) -> None:
    try:
        pool = cpu_attention._pool(threads)
        seen = set(pool.map(lambda _: torch.get_num_threads(), range(50)))
    finally:
        torch.set_num_threads(1)
        cpu_attention._pool.cache_clear()
    assert seen == {threads // min(threads, 8)}


def test_kernels_are_measured_in_inference_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_attention, "_fastest_kernel", fastest_kernel.__wrapped__)
    with torch.inference_mode():
        x = torch.ones(3, 2, 16)
        assert torch.equal(packed_attention(x, x, x, (3,), 0.25), x)
