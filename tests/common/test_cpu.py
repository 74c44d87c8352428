# SPDX-License-Identifier: Apache-2.0
"""On a CPU that advertises AMX without supporting it, AMX is disabled before torch computes anything."""

import ast
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo.common import cpu
from bionemo.megatron import cpu_attention, precision
from tests.conftest import ROOT

VARIABLE = "ONEDNN_MAX_CPU_ISA"
SIMULATED = ROOT / "tests" / "simulated_cpu"
AMX = b"flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n"
SAPPHIRE_RAPIDS = {
    (0, 0): (0x20, 1, 1, 1), (0x1D, 0): (1, 0, 0, 0), (0x1D, 1): (0x04002000, 0x00080040, 0x10, 0),
    (0x1E, 0): (0, 0x4010, 0, 0),
}  # fmt: skip
Leaves = dict[tuple[int, int], tuple[int, int, int, int]]
CACHED: list[Any] = [
    cpu._advertises_amx, cpu.amx_is_broken, cpu_attention._onednn_is_exact, cpu_attention._fastest_kernel
]  # fmt: skip


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, Leaves], None]]:
    """Simulate a CPU with these flags and CPUID leaves, without environment variables."""

    def set_up(flags: bytes, leaves: Leaves) -> None:
        for name in (VARIABLE, "DNNL_MAX_CPU_ISA"):
            monkeypatch.setenv(name, "")  # so that a value set by the test is removed
            monkeypatch.delenv(name)
        monkeypatch.setattr(cpu, "_cpu_flags", lambda: flags)
        monkeypatch.setattr(cpu, "cpuid", lambda leaf, subleaf: leaves.get((leaf, subleaf), (0, 0, 0, 0)))
        monkeypatch.setattr(cpu, "_TORCH_WAS_FIRST", False)
        for function in CACHED:
            function.cache_clear()

    yield set_up
    for function in CACHED:
        function.cache_clear()


@pytest.mark.parametrize(
    ("flags", "leaves", "limited"),
    [
        (AMX, SAPPHIRE_RAPIDS, False),
        (AMX, SAPPHIRE_RAPIDS | {(0, 0): (0x1C, 1, 1, 1)}, True),  # leaves beyond the highest alias another
        (AMX, SAPPHIRE_RAPIDS | {(0x1D, 0): (0, 0, 0, 0)}, True),  # no palette
        (AMX, SAPPHIRE_RAPIDS | {(0x1D, 1): (0, 0, 0, 0)}, True),  # a palette without tiles
        (AMX, SAPPHIRE_RAPIDS | {(0x1E, 0): (0, 0, 0, 0)}, True),
        (b"flags\t\t: fpu avx512_bf16\n", {(0, 0): (0x1C, 1, 1, 1)}, False),
        (b"", {}, False),  # no /proc/cpuinfo, or another architecture
    ],
)
def test_amx_is_disabled_if_cpuid_does_not_describe_its_tiles(
    pretend: Callable[[bytes, Leaves], None], flags: bytes, leaves: Leaves, limited: bool
) -> None:
    pretend(flags, leaves)
    cpu.limit_onednn()
    assert os.environ.get(VARIABLE) == ("AVX512_CORE_BF16" if limited else None)
    assert cpu.amx_is_possible() == (bool(flags) and not limited and b"amx" in flags)


def test_amx_is_disabled_if_cpuid_cannot_be_executed(
    pretend: Callable[[bytes, Leaves], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        raise PermissionError(13, "executable memory is refused")

    pretend(AMX, {})
    monkeypatch.setattr(cpu, "cpuid", refused)
    assert cpu.amx_is_broken()


@pytest.mark.parametrize("name", [VARIABLE, "DNNL_MAX_CPU_ISA"])
def test_a_value_set_by_the_user_is_kept(
    pretend: Callable[[bytes, Leaves], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(AMX, {})
    monkeypatch.setenv(name, "AVX2")
    cpu.limit_onednn()
    assert {key: os.environ.get(key) for key in (name, VARIABLE)} == {name: "AVX2"} | (
        {} if name == VARIABLE else {VARIABLE: None}
    )


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="CPUID is of x86-64")
@pytest.mark.skipif(cpu.cpuid.__module__ != cpu.__name__, reason="the CPU is simulated")
def test_cpuid_returns_the_values_of_this_machine() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    reported = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    highest, b, c, d = cpu.cpuid(0, 0)
    assert b"".join(part.to_bytes(4, "little") for part in (b, d, c)).decode() == reported["vendor_id"]
    assert highest == int(reported["cpuid level"])


@pytest.mark.parametrize("kernel", ["flash", "mkl"])
def test_fp32_attention_does_not_execute_amx(
    pretend: Callable[[bytes, Leaves], None], monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Whether or not AMX works: oneDNN must compute in fp32 only as long as it may use AMX."""
    seen: list[str] = []
    candidates: list[list[str]] = []

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    def choose(name: str, version: str, functions: Iterable[str]) -> str:
        candidates.append(list(functions))
        return kernel

    pretend(AMX, SAPPHIRE_RAPIDS)
    monkeypatch.setattr(cpu_attention, "autotune", choose)
    for owner, name in ((torch, "bmm"), (cpu_attention, "_flash"), (cpu_attention, "_flash_backward")):
        watch(owner, name)
    q = torch.randn(8, 2, 16, requires_grad=True)
    cpu_attention.packed_attention(q, q, q, (5, 3), 0.25).sum().backward()
    assert candidates == [["flash", "mkl"]]
    assert len(seen) == (4 if kernel == "flash" else 14)  # forward and backward pass of two sequences
    assert set(seen) == {"ieee"}


def test_the_speed_is_measured_again_if_amx_is_possible(
    pretend: Callable[[bytes, Leaves], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[str] = []

    def choose(name: str, version: str, functions: Iterable[str]) -> str:
        versions.append(version)
        return "mkl"

    monkeypatch.setattr(cpu_attention, "autotune", choose)
    for leaves in (SAPPHIRE_RAPIDS, {}):  # without leaves, AMX is disabled
        pretend(AMX, leaves)
        cpu.limit_onednn()
        cpu_attention._fastest_kernel(16, torch.float32, False, True)
    assert len(set(versions)) == 2


def test_one_note_if_bf16_becomes_slower(
    pretend: Callable[[bytes, Leaves], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(AMX, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True, "amx_bf16": True})
    precision._warn_of_broken_amx.cache_clear()
    precision.resolve_precision("32")
    assert not caplog.messages
    assert [precision.resolve_precision("bf16-mixed").name for _ in range(2)] == ["bf16-mixed"] * 2
    assert len(caplog.messages) == 1
    assert "AMX" in caplog.text
    precision._warn_of_broken_amx.cache_clear()


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the simulated CPU."""
    places = os.pathsep.join([str(SIMULATED), str(ROOT)])
    unset = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, *arguments], env=unset | {"PYTHONPATH": places} | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_the_simulated_cpu_kills_a_process_that_may_use_amx() -> None:
    assert process("-c", "import torch").returncode == -signal.SIGILL
    assert process("-c", "import torch", **{VARIABLE: "AVX512_CORE_BF16"}).returncode == 0


def test_importing_bionemo_protects_this_process_and_its_children() -> None:
    child = "import torch; x = torch.ones(8, 8, dtype=torch.bfloat16); print((x @ x).sum().item())"
    done = process(
        "-c", f"import bionemo, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    assert (done.returncode, done.stdout) == (0, "512.0\n"), done.stderr


def test_onednn_obeys_a_limit_set_after_torch_was_imported() -> None:
    """A notebook may import torch first. AVX512_CORE stands for any limit that is observable on this machine."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has nothing above AVX512_CORE to be limited from")
    code = (
        f"import torch, os; os.environ['{VARIABLE}'] = 'AVX512_CORE'; "
        "x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ONEDNN_VERBOSE": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    [verbose] = [line for line in done.stdout.splitlines() if "info,cpu,isa" in line]
    assert "bfloat16" not in verbose


@pytest.mark.skipif(b"amx_tile" in cpu._cpu_flags(), reason="this CPU advertises AMX")
def test_cpuid_is_not_executed_on_other_machines() -> None:
    code = "import bionemo, sys; print({'torch', 'ctypes', 'mmap'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_benchmarks_that_use_torch_import_the_package() -> None:
    """train_hf.py, with peer.py, runs in an environment without bionemo and inherits the variable from compare.py."""
    found = set()
    for path in (ROOT / "scripts" / "benchmark").glob("*.py"):
        body = ast.parse(path.read_text()).body
        names = {alias.name.split(".")[0] for node in body if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module).split(".")[0] for node in body if isinstance(node, ast.ImportFrom)}
        if "torch" in names or path.name == "compare.py":
            found.add(path.name)
            assert "bionemo" in names or path.name in ("train_hf.py", "peer.py"), path
    assert len(found) > 4
