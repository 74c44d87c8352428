# SPDX-License-Identifier: Apache-2.0
"""Triton attention: results in Triton's interpreter, compilation without a GPU, and when it is used.

`python -m tests.megatron.test_triton_attention` prints the registers, spills and shared memory of all kernels.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bionemo.megatron import attention
from bionemo.megatron.attention import PackedSequences, attend_on_gpu, attend_per_sequence, gpu_kernel
from bionemo.megatron.dropout import AttentionDropout
from tests.conftest import ROOT
from tests.support.gpu_kernels import gpu_attention

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HEAD_SIZES = 64, 12, 256, 264
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEFAULT = 90, "bf16", 64
BUILDS = [
    (gpu, dtype, head_size)
    for gpu in (90, 80, 100, 120)  # 120 and 86 have 99 KiB of shared memory, the others more
    for dtype, sizes in {"bf16": (16, 64, 128, 256), "fp32": (64, 256)}.items()
    for head_size in sizes
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.needs_gpu, NO_GPU])])
def test_outputs_and_gradients_equal_the_formula(device: str, tmp_path: Path) -> None:
    """Triton reads TRITON_INTERPRET when it is imported: the cases run in another process."""
    pytest.importorskip("triton")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": str(int(device == "cpu")), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, "tests/megatron/triton_attention_cases.py"],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


class Kernel(NamedTuple):
    """A compiled kernel; shared memory in bytes per block, spills in bytes per thread."""

    name: str
    registers: int
    spilled: int
    shared: int
    ptx: str

    def __str__(self) -> str:
        return f"{self.name}: {self.registers} registers, {self.spilled} B spilled, {self.shared} B shared memory"


class _CompileOnly:
    """A driver without a GPU."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.gpu, 32)

    def get_current_device(self) -> object:
        return self  # compiled kernels are cached per device

    def get_current_stream(self, device: object) -> int:
        return 0


def compiled(gpu: int, dtype: str, head_size: int, cache: Path) -> list[Kernel]:
    """Compile the kernels of causal attention with dropout and rotary positions for compute capability gpu / 10."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from bionemo.megatron.triton_attention import triton_operator, triton_operator_backward
    from bionemo.megatron.triton_rotary import merge, rotate

    kernels, launch = [], JITFunction.run

    def compile_kernel(self: Any, *arguments: Any, **options: Any) -> None:
        with redirect_stdout(StringIO()) as log:
            kernel = launch(self, *arguments, **options | {"warmup": True})
        usage = re.search(r"(\d+) bytes spill stores.*Used (\d+) registers", log.getvalue(), re.DOTALL)
        assert usage is not None, log.getvalue()
        spilled, registers = int(usage[1]), int(usage[2])
        kernels.append(Kernel(self.fn.__name__, registers, spilled, kernel.metadata.shared, kernel.asm["ptx"]))

    q, k, v, do = torch.zeros(4, 32, 2, head_size, dtype=DTYPES[dtype])
    starts, keys = torch.tensor([0, 32], dtype=torch.int32), torch.zeros(32, dtype=torch.int64)
    arguments = (starts, starts, 32, 32, 0.125, True, keys, 10 * 2**20, 2**18, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        patch.setattr(driver, "_active", _CompileOnly(gpu))
        patch.setattr(JITFunction, "run", compile_kernel)
        out, log_sum = triton_operator(q, k, v, *arguments)
        triton_operator_backward(do, q, k, v, out, log_sum, *arguments)
        cos, sin = torch.zeros(2, 32, 1, head_size, dtype=DTYPES[dtype])
        rotate(q, cos, sin)
        merge([q, k, v], cos, sin)
    return kernels


@pytest.mark.parametrize(
    ("gpu", "dtype", "head_size"),
    [pytest.param(*build, marks=[] if build == DEFAULT else pytest.mark.slow) for build in BUILDS],
)
def test_compiled_kernels_fit_registers_and_shared_memory(
    gpu: int, dtype: str, head_size: int, tmp_path: Path, record_property: Any
) -> None:
    pytest.importorskip("triton")
    kernels = compiled(gpu, dtype, head_size, tmp_path)
    assert [kernel.name for kernel in kernels] == [
        "_forward_kernel", "_query_gradient_kernel", "_key_gradient_kernel", "_rotate_kernel", "_merge_kernel",
    ]  # fmt: skip
    for kernel in kernels:
        record_property(f"sm_{gpu} {dtype} {head_size}", str(kernel))
    for kernel in kernels:  # no more than 255 registers: ptxas spills others
        assert f".target sm_{gpu}" in kernel.ptx
        assert kernel.spilled <= 256 and kernel.shared <= 99 * 1024, str(kernel)
        assert not re.search(r"\b(atom|red)\.", kernel.ptx)  # their order would change the sums


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
    assert [gpu_kernel(head_size, half, exact) for head_size in HEAD_SIZES] == kernels.split()


@pytest.mark.parametrize("faster", ["flash", "triton"])
@pytest.mark.parametrize("triton", [True, False])
def test_small_heads_use_the_faster_kernels(monkeypatch: pytest.MonkeyPatch, faster: str, triton: bool) -> None:
    gpu_of(monkeypatch, (9, 0), triton)
    monkeypatch.setattr(attention, "gpu_prefers_triton", lambda: faster == "triton")
    small = "triton" if triton and faster == "triton" else "flash"
    assert [gpu_kernel(size, half=True, exact=False) for size in (8, 16, 24, 32)] == [small, small, "flash", "flash"]


def test_the_choice_for_small_heads_is_a_constant_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    @cache
    def measure(device: str) -> bool:
        return bool(torch.randn(8).sum() < torch.inf)

    monkeypatch.setattr(attention, "_triton_is_faster", measure)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def double(x: Tensor) -> Tensor:
        return 2 * x if attention.gpu_prefers_triton() else x

    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert [node.op for node in graphs[0].graph.nodes if node.op.startswith("call")] == ["call_function"]


@pytest.mark.parametrize(
    ("change", "message"),
    [("none", ""), ("inexact", "differ from it on this GPU"), ("failing", "the Triton kernels fail: no resources")],
)
def test_kernels_for_small_heads_are_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str, message: str
) -> None:
    """On simulated kernels: those that fail or are inexact are not used, with one note."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(attention, "_MEASURED", 32)
    attend, ran = attention._attend_with, list[str]()

    def changed(kernel: str, *inputs: Any, **options: Any) -> Tensor:
        ran.append(kernel)
        if kernel == "triton" and change == "failing":
            raise RuntimeError("no resources\non this GPU")
        out: Tensor = attend("sequences", *inputs, **options)
        return out * 1.5 if kernel == "triton" and change == "inexact" else out

    def choose(name: str, version: str, candidates: dict[str, Callable[[], object]]) -> str:
        assert "Some GPU" in version
        for each in candidates.values():
            each()
        return "triton"

    monkeypatch.setattr(attention, "_attend_with", changed)
    monkeypatch.setattr(attention, "autotune", choose)
    assert attention._triton_is_faster.__wrapped__("cpu") == (change == "none")
    assert [record.getMessage().partition(message)[1] for record in caplog.records] == [message] * bool(message)
    assert ran[:2] == ["flash", "triton"]
    assert len(ran) == (4 if change == "none" else 2)


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


def _print_kernels() -> None:
    for gpu, dtype, head_size in BUILDS:
        with TemporaryDirectory() as cache:
            for kernel in compiled(gpu, dtype, head_size, Path(cache)):
                print(f"sm_{gpu} {dtype} head size {head_size:3} {kernel}", flush=True)


if __name__ == "__main__":
    _print_kernels()
