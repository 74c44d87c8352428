# SPDX-License-Identifier: Apache-2.0
"""On a virtual machine that advertises AMX, AMX is disabled before torch computes anything."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from bionemo.common import cpu
from bionemo.megatron import cpu_attention, precision
from tests.conftest import ROOT

VARIABLE = "ONEDNN_MAX_CPU_ISA"
SIMULATED = ROOT / "tests" / "simulated_cpu"
AMX = {b"fpu", b"avx512_bf16", b"amx_bf16", b"amx_tile"}
VIRTUAL = AMX | {b"hypervisor"}
CACHED: list[Any] = [cpu_attention._onednn_is_exact, cpu_attention._fastest_kernel]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[bytes]], None]]:
    """Simulate a CPU with these flags, without environment variables."""

    def set_up(flags: set[bytes]) -> None:
        for name in (VARIABLE, "DNNL_MAX_CPU_ISA"):
            monkeypatch.setenv(name, "")  # so that a value set by the test is removed
            monkeypatch.delenv(name)
        monkeypatch.setattr(cpu, "_cpu_flags", lambda: flags)
        monkeypatch.setattr(cpu, "_TORCH_WAS_FIRST", False)
        for function in CACHED:
            function.cache_clear()

    yield set_up
    for function in CACHED:
        function.cache_clear()


@pytest.mark.parametrize(
    ("flags", "limited"),
    [
        (VIRTUAL, True),
        (AMX, False),
        ({b"avx512_bf16", b"hypervisor"}, False),
        (set[bytes](), False),  # no /proc/cpuinfo, or another architecture
    ],
)
def test_amx_is_avoided_on_virtual_machines(
    pretend: Callable[[set[bytes]], None], flags: set[bytes], limited: bool
) -> None:
    pretend(flags)
    cpu.limit_onednn()
    assert os.environ.get(VARIABLE) == ("AVX512_CORE_BF16" if limited else None)
    assert cpu.amx_is_avoided() == limited
    assert cpu.amx_is_possible() == (not limited and b"amx_tile" in flags)


@pytest.mark.parametrize("name", [VARIABLE, "DNNL_MAX_CPU_ISA"])
def test_a_value_set_by_the_user_is_kept(
    pretend: Callable[[set[bytes]], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(VIRTUAL)
    monkeypatch.setenv(name, "AVX2")
    cpu.limit_onednn()
    assert {key: os.environ.get(key) for key in (name, VARIABLE)} == {name: "AVX2"} | (
        {} if name == VARIABLE else {VARIABLE: None}
    )


@pytest.mark.parametrize("kernel", ["flash", "mkl"])
def test_fp32_attention_does_not_execute_amx(
    pretend: Callable[[set[bytes]], None], monkeypatch: pytest.MonkeyPatch, kernel: str
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

    pretend(AMX)
    monkeypatch.setattr(cpu_attention, "autotune", choose)
    for owner, name in ((torch, "bmm"), (cpu_attention, "_flash"), (cpu_attention, "_flash_backward")):
        watch(owner, name)
    q = torch.randn(8, 2, 16, requires_grad=True)
    cpu_attention.packed_attention(q, q, q, (5, 3), 0.25).sum().backward()
    assert candidates == [["flash", "mkl"]]
    assert len(seen) == (4 if kernel == "flash" else 14)  # forward and backward pass of two sequences
    assert set(seen) == {"ieee"}


def test_the_speed_is_measured_again_if_amx_is_possible(
    pretend: Callable[[set[bytes]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[str] = []

    def choose(name: str, version: str, functions: Iterable[str]) -> str:
        versions.append(version)
        return "mkl"

    monkeypatch.setattr(cpu_attention, "autotune", choose)
    for flags in (AMX, VIRTUAL):
        pretend(flags)
        cpu.limit_onednn()
        cpu_attention._fastest_kernel(16, False)
    assert len(set(versions)) == 2


def test_one_note_if_bf16_becomes_slower(
    pretend: Callable[[set[bytes]], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(VIRTUAL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True, "amx_bf16": True})
    precision._warn_of_avoided_amx.cache_clear()
    cpu.limit_onednn()
    precision.resolve_precision("32")
    assert not caplog.messages
    assert [precision.resolve_precision("bf16-mixed").name for _ in range(2)] == ["bf16-mixed"] * 2
    assert len(caplog.messages) == 1
    assert "AMX" in caplog.text
    precision._warn_of_avoided_amx.cache_clear()


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


def test_benchmarks_that_use_torch_import_the_package() -> None:
    """train_hf.py runs in an environment without bionemo and inherits the variable from compare.py."""
    found = set()
    for path in (ROOT / "scripts" / "benchmark").glob("*.py"):
        body = ast.parse(path.read_text()).body
        names = {alias.name.split(".")[0] for node in body if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module).split(".")[0] for node in body if isinstance(node, ast.ImportFrom)}
        if "torch" in names or path.name == "compare.py":
            found.add(path.name)
            assert "bionemo" in names or path.name == "train_hf.py", path
    assert len(found) > 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_libgomp_reports_the_number_of_rounds(variables: dict[str, str], expected: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", "import bionemo, torch"], capture_output=True, text=True, check=True,
        env=environment | variables | {"OMP_DISPLAY_ENV": "verbose"},
    )  # fmt: skip
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [expected]
