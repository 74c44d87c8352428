# SPDX-License-Identifier: Apache-2.0
"""Triton attention: results in Triton's interpreter, compilation without a GPU, and when it is used.

`python -m tests.megatron.test_triton_attention` prints the registers, spills and shared memory of all kernels.
"""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import ROOT

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


def _print_kernels() -> None:
    for gpu, dtype, head_size in BUILDS:
        with TemporaryDirectory() as cache:
            for kernel in compiled(gpu, dtype, head_size, Path(cache)):
                print(f"sm_{gpu} {dtype} head size {head_size:3} {kernel}", flush=True)


if __name__ == "__main__":
    _print_kernels()
