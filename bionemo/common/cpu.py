# SPDX-License-Identifier: Apache-2.0
"""Keep oneDNN from using AMX on CPUs that advertise it without supporting it.

Some virtual machines set the AMX flags of CPUID leaf 7 but lack leaves 0x1D and 0x1E, which describe the tiles.
oneDNN, torch's library for matrix products, then does not configure the tiles, and SIGILL kills the process in its
first bf16 matrix product.

`import bionemo` calls `limit_onednn`, which reads /proc/cpuinfo up to the flags of the first core, and executes CPUID
only if the flags include amx_tile. Imports nothing heavy.
"""

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_VARIABLES = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"  # oneDNN reads the second if the first is not set
_LIMIT = "AVX512_CORE_BF16"  # the highest instruction set without AMX that such CPUs have and every oneDNN knows
_TILE_LEAF, _TMUL_LEAF = 0x1D, 0x1E
_TORCH_WAS_FIRST = "torch" in sys.modules  # oneDNN may have read its settings already
# void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]), x86-64 System V
_CPUID = bytes.fromhex(
    "53"  # push rbx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "4989d0"  # mov r8, rdx
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8 + 4], ebx
    "41894808"  # mov [r8 + 8], ecx
    "4189500c"  # mov [r8 + 12], edx
    "5b"  # pop rbx
    "c3"  # ret
)


def limit_onednn() -> None:
    """Set ONEDNN_MAX_CPU_ISA, for this process and its children, if AMX is advertised but not usable.

    oneDNN reads the variable at its first primitive, not when torch is imported. An existing value is kept.
    """
    if not any(os.environ.get(name) for name in _VARIABLES) and amx_is_broken():
        os.environ[_VARIABLES[0]] = _LIMIT


def read_cpu_fields(info: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the fields of the first core in a file in the format of Linux, by name; empty on other systems."""
    with suppress(OSError):
        lines = info.read_text(errors="replace").split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


@cache
def amx_is_broken() -> bool:
    """Return whether the CPU advertises AMX without describing its tiles; True if CPUID cannot be read, to be safe."""
    if not _advertises_amx():
        return False
    try:
        return not _describes_tiles()
    except (ImportError, OSError, AttributeError):  # no ctypes, no executable memory: oneDNN generates no code either
        return True


def amx_is_possible() -> bool:
    """Return whether oneDNN may use AMX in this process; fp32 products must then avoid its reduced precision."""
    return _advertises_amx() and (_TORCH_WAS_FIRST or os.environ.get(_VARIABLES[0]) != _LIMIT)


@cache
def _advertises_amx() -> bool:
    return b"amx_tile" in _cpu_flags().split()


def _cpu_flags() -> bytes:
    """Return the flags of the first core; b"" without /proc/cpuinfo and on other architectures."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return next((line for line in file if line.startswith(b"flags")), b"")
    except OSError:
        return b""


def _describes_tiles() -> bool:
    """Return whether CPUID describes a palette of tiles and the unit that multiplies them."""
    highest = cpuid(0, 0)[0]
    if highest < _TMUL_LEAF or not cpuid(_TILE_LEAF, 0)[0]:  # above the highest leaf, CPUID returns another leaf
        return False
    sizes, rows_and_names, max_rows, _ = cpuid(_TILE_LEAF, 1)
    return bool(sizes and rows_and_names and max_rows and cpuid(_TMUL_LEAF, 0)[1])


def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
    """Execute CPUID (x86-64 only) and return the registers eax, ebx, ecx and edx.

    Raises:
        OSError: if the kernel refuses executable memory.
        ImportError: if Python was built without ctypes.
    """
    import ctypes
    import mmap

    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        memory.write(_CPUID)
        anchor = ctypes.c_char.from_buffer(memory)
        try:
            address = ctypes.addressof(anchor)
            protect = ctypes.CDLL(None, use_errno=True).mprotect
            protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            if protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):  # never writable and executable
                raise OSError(ctypes.get_errno(), "executable memory is refused")
            registers = (ctypes.c_uint32 * 4)()
            function = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32))
            function(address)(leaf, subleaf, registers)
        finally:
            del anchor  # a mapping with exported buffers cannot be closed
    eax, ebx, ecx, edx = registers
    return eax, ebx, ecx, edx
