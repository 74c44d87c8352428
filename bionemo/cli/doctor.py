# SPDX-License-Identifier: Apache-2.0
"""Print the versions of bionemo and its main dependencies, and the devices of this machine."""

import argparse
import os
import platform
from collections.abc import Iterator
from importlib import metadata

from bionemo.common.console import one_line_errors
from bionemo.common.cpu import amx_is_broken
from bionemo.common.version import __version__

_PACKAGES = ("torch", "megatron-core", "lightning", "nemo_toolkit", "hydra-core")
_GIB = 1 << 30


def main() -> None:
    """Run `bionemo doctor`."""
    with one_line_errors():
        argparse.ArgumentParser("bionemo doctor", description=__doc__).parse_args()
        for name, text in describe_machine():
            print(f"{name:12} {text}", flush=True)


def describe_machine() -> Iterator[tuple[str, str]]:
    """Yield topics and what is known about them."""
    yield "bionemo", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "packages", ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    yield "CPU", _describe_cpu()
    yield from _describe_gpus()


def _describe_cpu() -> str:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    amx = ", AMX that does not work (oneDNN does not use it)" if amx_is_broken() else ""
    return (
        f"{len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}{amx}; memory "
        f"{memory.total / _GIB:.0f} GiB, {memory.available / _GIB:.0f} GiB available"
    )


def _describe_gpus() -> Iterator[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        reason = "the installed torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield "GPU", f"none ({reason})"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield (
            f"GPU {number}",
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / _GIB:.0f} GiB, CUDA "
            f"{torch.version.cuda}",
        )
