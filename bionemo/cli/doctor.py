# SPDX-License-Identifier: Apache-2.0
"""Print what this machine has: versions, devices, CPU features, launchers, disk space, and what is missing for what.

Started by a launcher, rank 0 prints this, and all processes test their connections with an all-reduce.
"""

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from bionemo.common.console import one_line_errors
from bionemo.common.cpu import amx_is_broken, read_cpu_fields
from bionemo.common.errors import install_command
from bionemo.common.launcher_environment import launched_process
from bionemo.common.version import __version__

_PACKAGES = ("torch", "megatron-core", "lightning", "nemo_toolkit", "triton")
# releases that the whole test suite or its slow part has passed with
_TESTED = {
    "torch": ("2.11.0", "2.13.0", "2.15.0"), "megatron-core": ("0.16.1", "0.19.2"), "lightning": ("2.5.6", "2.6.6"),
}  # fmt: skip
_TOOLS = {  # programs, and what needs them
    "sbatch": "cluster=bcm (Slurm)", "mpirun": "cluster=mpi", "kubectl": "cluster=k8s", "ngc": "cluster=bcp",
    "mmseqs": "split=similarity (preprocess, finetune), and faster search of training data (evaluate --suite loss)",
    "gcc": "torch.compile",
}  # fmt: skip
_EXTRAS = {  # optional dependencies of this package, and what needs them
    "molecules": "MegaMolBART and molecules", "plots": "plots of losses, heads and analyses",
    "wandb": "exp_manager.create_wandb_logger", "ray": "cluster=ray", "analysis": "UMAP (analysis map)",
    "evaluate": "evaluate --suite contacts, and similarity without MMseqs2", "report": "bionemo report",
    "hub": "models of the Hugging Face hub (hf://ORG/NAME)",
    "store": "training data in object stores (model.data.dataset_path=s3://BUCKET/PREFIX)",
}  # fmt: skip
_TIMEOUT = 60.0  # seconds to connect all processes
_CPU_FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_tile": "AMX"}
_GIB = 1 << 30


def main() -> None:
    """Run `bionemo doctor`."""
    with one_line_errors():
        argparse.ArgumentParser("bionemo doctor", description=__doc__).parse_args()
        process = launched_process()
        if process is None or process.rank == 0:
            for name, text in describe_machine():
                print(f"{name:12} {text}", flush=True)
        if process is not None:
            from bionemo.launch.check import check

            check(process, False, _TIMEOUT)


def describe_machine() -> Iterator[tuple[str, str]]:
    """Yield topics and what is known about them."""
    yield "bionemo", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in _PACKAGES)
    yield "tested with", "; ".join(f"{name} {', '.join(releases)}" for name, releases in _TESTED.items())
    requirements = []
    try:
        requirements = metadata.requires("bionemo") or []
    except metadata.PackageNotFoundError:
        yield "problem", "bionemo is not installed, so its requirements are unknown: pip install -e ."
    for problem in dependency_problems(requirements):
        yield "problem", problem
    yield "CPU", describe_cpu()
    yield from _describe_gpus()
    yield from _describe_storage()
    found = [name for name in _TOOLS if shutil.which(name)]
    yield "programs", ", ".join(found) or "none of those that bionemo uses"
    for name, use in _TOOLS.items():
        if name not in found:
            yield "missing", f"{name}, for {use}"
    for extra, use in _EXTRAS.items():
        for problem in (problems := list(dependency_problems(requirements, extra))):
            if " is installed, but " in problem:
                yield "problem", problem
        if problems:
            yield "missing", f"{install_command(extra)}, for {use}"


def dependency_problems(requirements: Sequence[str], extra: str = "") -> Iterator[str]:
    """Yield a text for each requirement (PEP 508) that is not installed in a suitable version.

    Args:
        requirements: requirements of a package.
        extra: check only those of this extra; by default those without one.
    """
    from packaging.requirements import Requirement

    for text in requirements:
        requirement = Requirement(text)
        optional = "extra" in str(requirement.marker or "")
        if optional != bool(extra) or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name} is not installed: pip install '{requirement.name}{requirement.specifier}'"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield (
                f"{requirement.name} {version} is installed, but {requirement.specifier} is required: pip install "
                f"'{requirement.name}{requirement.specifier}'"
            )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return model, cores, instruction sets and memory; `info` is a file in the format of Linux."""
    import psutil

    fields = read_cpu_fields(info)
    flags = fields.get("flags", "").split()
    features = [shown for flag, shown in _CPU_FEATURES.items() if flag in flags]
    if amx_is_broken():
        features[-1] = "AMX that does not work (oneDNN does not use it)"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    name = fields.get("model name", platform.machine())
    return (
        f"{name}, {cores} cores, {', '.join(features) or 'no known features'}; memory {memory.total / _GIB:.0f} GiB, "
        f"{memory.available / _GIB:.0f} GiB available"
    )


def _describe_gpus() -> Iterator[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        reason = "the installed torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield "GPU", f"none ({reason})"
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield (
            f"GPU {number}",
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / _GIB:.0f} GiB, CUDA "
            f"{torch.version.cuda}",
        )


def _describe_storage() -> Iterator[tuple[str, str]]:
    for topic, path in (("here", Path.cwd()), ("temporary", Path(tempfile.gettempdir())), ("shared mem", "/dev/shm")):
        try:
            usage = shutil.disk_usage(path)
        except OSError:  # /dev/shm exists on Linux only
            continue
        writable = "" if os.access(path, os.W_OK) else ", not writable"
        yield "disk", f"{path} ({topic}): {usage.free / _GIB:.0f} of {usage.total / _GIB:.0f} GiB free{writable}"
