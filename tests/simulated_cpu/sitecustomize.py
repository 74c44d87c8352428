"""A CPU that advertises AMX while its CPUID stops at leaf 0x1C, for every Python process that finds this file.

    PYTHONPATH=$PWD/tests/simulated_cpu bash scripts/quickstart.sh

`bionemo.common.cpu` sees such a CPU. As there, a process dies of SIGILL if oneDNN is not kept from using AMX: here
already when torch is imported before ONEDNN_MAX_CPU_ISA is set to an instruction set without AMX.
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
    cpu.cpuid = lambda leaf, subleaf: (0x1C, 1, 1, 1)  # of Intel's, which answer with their highest leaf


_ACTIONS: dict[str, Callable[[Any], None]] = {"torch": _crash_unless_limited, "bionemo.common.cpu": _advertise_amx}


class _Watch(MetaPathFinder):
    """Calls an action for a module after it has been executed."""

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
