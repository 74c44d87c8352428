"""Simulate a CPU that advertises AMX although its CPUID ends at leaf 0x1C, in every Python process with this path.

    PYTHONPATH=$PWD/tests/simulated_cpu bash scripts/quickstart.sh

`bionemo.common.cpu` sees this CPU. Like there, a process dies of SIGILL if oneDNN may use AMX: here already when torch
is imported before ONEDNN_MAX_CPU_ISA is set to an instruction set without AMX.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _crash_unless_limited(torch: ModuleType) -> None:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if not limit or "AMX" in limit:
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGILL)


def _advertise_amx(cpu: Any) -> None:
    cpu._cpu_flags = lambda: b"flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n"
    cpu.cpuid = lambda leaf, subleaf: (0x1C, 1, 1, 1)  # of Intel CPUs, which return their highest leaf


_ACTIONS: dict[str, Callable[[Any], None]] = {"torch": _crash_unless_limited, "bionemo.common.cpu": _advertise_amx}


class _Watch(MetaPathFinder):
    """Calls a function with a module after the module was executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = _ACTIONS.pop(name, None)
        spec = find_spec(name) if action else None
        if action is None or spec is None or spec.loader is None:
            return None
        execute: Any = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Watch())
