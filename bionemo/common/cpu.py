# SPDX-License-Identifier: Apache-2.0
"""Environment variables that make oneDNN and OpenMP work well on this CPU, set by `import bionemo`.

Some virtual machines set the AMX flags of CPUID leaf 7 but lack the leaves that describe the tiles. oneDNN, torch's
library for matrix products, then does not configure the tiles, and SIGILL kills the process in its first bf16 matrix
product. On virtual machines, oneDNN therefore does not use AMX, unless the user sets ONEDNN_MAX_CPU_ISA.

A waiting thread of libgomp, the OpenMP runtime of torch, repeats a loop 300,000 times before it sleeps. If another
process uses one of the cores, the looping thread keeps the other core from the thread that it waits for. Beside one
busy process on two cores, training was 5 to 16 times slower, and training of a head 40 to 120 times.

Imports nothing heavy.
"""

import os
import sys
from functools import cache

_VARIABLES = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"  # oneDNN reads the second if the first is not set
_LIMIT = "AVX512_CORE_BF16"  # the highest instruction set without AMX that such CPUs have and every oneDNN knows
_TORCH_WAS_FIRST = "torch" in sys.modules  # oneDNN may have read its settings already
_SPIN_COUNT = "1000"  # a few microseconds; with 0, short operations are slower on idle cores


def limit_onednn() -> None:
    """Set ONEDNN_MAX_CPU_ISA, for this process and its children, on a virtual machine that advertises AMX.

    oneDNN reads the variable at its first primitive, not when torch is imported. An existing value is kept.
    """
    if not any(os.environ.get(name) for name in _VARIABLES) and {b"amx_tile", b"hypervisor"} <= _cpu_flags():
        os.environ[_VARIABLES[0]] = _LIMIT


def limit_spinning() -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has set it or OMP_WAIT_POLICY.

    libgomp reads the variable when it is loaded, so this has no effect in a process that has imported torch before.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def amx_is_avoided() -> bool:
    """Return whether the CPU advertises AMX and oneDNN was told not to use it."""
    return b"amx_tile" in _cpu_flags() and os.environ.get(_VARIABLES[0]) == _LIMIT


def amx_is_possible() -> bool:
    """Return whether oneDNN may use AMX in this process; fp32 products must then avoid its reduced precision."""
    return b"amx_tile" in _cpu_flags() and (_TORCH_WAS_FIRST or not amx_is_avoided())


@cache
def _cpu_flags() -> frozenset[bytes]:
    """Return the flags of the first core; none without /proc/cpuinfo and on other architectures."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return frozenset(next((line for line in file if line.startswith(b"flags")), b"").split())
    except OSError:
        return frozenset()
