# SPDX-License-Identifier: Apache-2.0
"""Which implementation of attention a GPU uses."""

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from bionemo.megatron import attention
from bionemo.megatron.attention import PackedSequences, attend_on_gpu, attend_per_sequence, gpu_kernel
from bionemo.megatron.dropout import AttentionDropout
from tests.support.gpu_kernels import gpu_attention

HEAD_SIZES = 64, 12, 256, 264


def gpu_of(patch: pytest.MonkeyPatch, capability: tuple[int, int], triton: bool) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    patch.setattr(attention, "find_spec", lambda name: object() if triton or name != "triton" else None)


@pytest.mark.parametrize(
    ("triton", "capability", "half", "exact", "kernels"),
    [  # kernels for head sizes 64, 12, 256 and 264
        (True, (7, 0), True, False, "sequences sequences sequences sequences"),
        (True, (7, 0), True, True, "sequences sequences sequences sequences"),
        (True, (7, 0), False, False, "sequences sequences sequences sequences"),
        (True, (8, 0), True, False, "flash triton flash sequences"),
        (True, (8, 0), True, True, "triton triton triton sequences"),
        (True, (8, 0), False, False, "triton triton triton sequences"),
        (True, (9, 0), True, False, "flash triton flash sequences"),
        (True, (9, 0), True, True, "triton triton triton sequences"),
        (True, (9, 0), False, True, "triton triton triton sequences"),
        (False, (7, 0), True, False, "sequences sequences sequences sequences"),
        (False, (8, 0), True, False, "flash sequences flash sequences"),
        (False, (8, 0), True, True, "sequences sequences sequences sequences"),
        (False, (9, 0), False, False, "sequences sequences sequences sequences"),
    ],
)
def test_kernels_by_gpu_and_head_size(
    monkeypatch: pytest.MonkeyPatch, triton: bool, capability: tuple[int, int], half: bool, exact: bool, kernels: str
) -> None:
    gpu_of(monkeypatch, capability, triton)
    monkeypatch.setattr(attention, "fastest_gpu_attention", lambda head_size: "FA2")
    assert [gpu_kernel(head_size, half, exact) for head_size in HEAD_SIZES] == kernels.split()


@pytest.mark.parametrize("fastest", ["FA2", "FA3", "triton"])
@pytest.mark.parametrize("triton", [True, False])
def test_the_fastest_implementation_is_used(monkeypatch: pytest.MonkeyPatch, fastest: str, triton: bool) -> None:
    gpu_of(monkeypatch, (9, 0), triton)
    monkeypatch.setattr(attention, "fastest_gpu_attention", lambda head_size: fastest)
    assert gpu_kernel(16, half=True, exact=False) == ("triton" if fastest == "triton" else "flash")
    assert gpu_kernel(16, half=True, exact=True) == ("triton" if triton else "sequences")


@pytest.mark.parametrize(
    ("head_size", "triton", "version", "expected"),
    [
        (64, True, "2.13.0", "FA3 FA4"),
        (64, True, "2.15.0+cu132", "FA3 FA4 cuDNN"),
        (16, True, "2.13.0", "FA3 FA4 triton"),  # FlashAttention pads the heads
        (16, False, "2.13.0", "FA3 FA4"),
        (24, True, "2.13.0", "FA3 FA4"),
    ],
)
def test_alternatives_to_flash_attention_2(
    monkeypatch: pytest.MonkeyPatch, head_size: int, triton: bool, version: str, expected: str
) -> None:
    gpu_of(monkeypatch, (9, 0), triton)
    monkeypatch.setattr(torch, "__version__", version)
    assert list(attention._list_alternatives(head_size)) == expected.split()


def test_the_choice_is_a_constant_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    @cache
    def measure(head_size: int, device: str) -> str:
        return "triton" if torch.randn(head_size).sum() < torch.inf else "FA2"

    monkeypatch.setattr(attention, "_fastest_gpu_attention", measure)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def double(x: Tensor) -> Tensor:
        return 2 * x if attention.fastest_gpu_attention(16) == "triton" else x

    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert [node.op for node in graphs[0].graph.nodes if node.op.startswith("call")] == ["call_function"]


@pytest.mark.parametrize(
    ("change", "fastest", "message"),
    [
        ("none", "FA3", ""),
        ("none", "triton", ""),
        ("missing", "triton", ""),
        ("failing", "triton", "does not use FA3, which fails: no resources"),
        ("inexact", "triton", "does not use FA3, which differs from FlashAttention 2 on this GPU"),
        ("inexact if causal", "FA2", "does not use FA3, which differs from FlashAttention 2 on this GPU"),
    ],
)
def test_implementations_are_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str, fastest: str, message: str
) -> None:
    """On simulated kernels: those that are missing, fail or are inexact are not used, with at most one note."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(attention, "_list_alternatives", lambda head_size: ["FA3", "triton"])
    monkeypatch.setattr(attention, "_MEASURED", 32)
    attend: Callable[..., Tensor] = attention._attend_with
    active: list[str] = []

    def activate(name: str) -> None:
        if name == "FA3" and change == "missing":
            raise ModuleNotFoundError
        active.append(name)

    def changed(kernel: str, *inputs: Any, causal: bool) -> Tensor:
        assert (kernel == "triton") == (active[-1] == "triton")
        if active[-1] == "FA3" and change == "failing":
            raise AssertionError("no resources\non this GPU")
        out = attend("sequences", *inputs, None, causal)
        wrong = change == "inexact" or (causal and change == "inexact if causal")
        return out * 1.5 if active[-1] == "FA3" and wrong else out

    def choose(name: str, version: str, candidates: dict[str, Callable[[], object]]) -> str:
        assert name.endswith("-16")
        assert "Some GPU" in version
        assert torch.__version__ in version
        assert list(candidates) == (["FA2", "FA3", "triton"] if change == "none" else ["FA2", "triton"])
        for each in candidates.values():
            each()
        return fastest

    monkeypatch.setattr(attention, "_activate", activate)
    monkeypatch.setattr(attention, "_attend_with", changed)
    monkeypatch.setattr(attention, "autotune", choose)
    assert attention._fastest_gpu_attention.__wrapped__(16, "cpu") == fastest == active[-1]
    assert [record.getMessage().partition(message)[1] for record in caplog.records] == [message] * bool(message)


def test_torch_calls_the_activated_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an implementation in place of FlashAttention 3; only one implementation is active at a time."""
    for name in ("FA3", "FA4"):
        with pytest.raises(ModuleNotFoundError):
            attention._activate(name)
    removed: list[str] = []
    handle = SimpleNamespace(remove=lambda: removed.append("FA3"))
    monkeypatch.setitem(_FLASH_ATTENTION_IMPLS, "FA3", lambda: handle)
    attention._activate("FA3")
    assert current_flash_attention_impl() == "FA3"
    attention._activate("cuDNN")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert (current_flash_attention_impl(), removed) == (None, ["FA3"])
    attention._activate("FA2")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "probability", "deterministic", "operator"),
    [
        (torch.bfloat16, 0.0, False, "torch_attn::_varlen_attn"),
        (torch.float16, 0.0, False, "torch_attn::_varlen_attn"),
        (torch.float32, 0.0, False, "bionemo::packed_attention"),
        (torch.bfloat16, 0.1, False, "bionemo::packed_attention"),
        (torch.bfloat16, 0.0, True, "bionemo::packed_attention"),
    ],
    indirect=["deterministic"],
)
@pytest.mark.usefixtures("deterministic")
def test_flash_attention_has_16_bits_and_neither_dropout_nor_determinism(
    dtype: torch.dtype, probability: float, operator: str
) -> None:
    q, k, v = torch.randn(3, 9, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    dropout = AttentionDropout(torch.arange(9), 10, 0, 1, probability) if probability else None
    sequences = PackedSequences((4, 5), torch.tensor([0, 4, 9], dtype=torch.int32), max_length=5)
    with gpu_attention() as calls:
        out = attend_on_gpu(q, k, v, sequences, 0.5, dropout, causal=True)
    assert calls == {operator: 1}
    expected = attend_per_sequence(q, k, v, sequences.lengths, 0.5, dropout, causal=True)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
