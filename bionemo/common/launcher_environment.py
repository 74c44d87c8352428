# SPDX-License-Identifier: Apache-2.0
"""Rank, world size and address of rank 0 from the environment variables of torchrun, mpirun, bcprun, Ray and srun.

mpirun is that of Open MPI, MPICH or Intel MPI. No other module reads these variables. This module does not import
torch, because errors are reported before torch is loaded.
"""

import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bionemo.common.errors import HostError, RankError, UserError, shorten

ERROR_DESCRIPTOR = "BIONEMO_ERROR_DESCRIPTOR"  # open file to which a worker of launch/spawn.py writes its error
_PORTS = 15000, 10000  # first port for MASTER_PORT, and the number of ports
_INTEGERS = (  # variables that torch, Lightning or this module reads
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "JSM_NAMESPACE_RANK",
)  # fmt: skip
# rank, local rank, size and local size of Open MPI, and of MPICH and Intel MPI; srun may set PMI_RANK as well
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
_MPICH = "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"


@dataclass(frozen=True)
class Process:
    """A process of a run that a launcher started."""

    launcher: str  # name of the launcher, for messages
    rank: int  # global rank
    local_rank: int  # rank within the node
    node: int  # number of the node, from 0
    world_size: int | None  # number of processes; None if the launcher does not set it
    local_size: int | None  # number of processes on the node; None if the launcher does not set it
    address: str  # host of rank 0 (MASTER_ADDR)
    port: int  # port of rank 0 (MASTER_PORT)

    def check(self, num_nodes: int, devices: int) -> None:
        """Raise a UserError unless the launcher's processes match `trainer.num_nodes` and `trainer.devices`."""
        expected = f"trainer.num_nodes={num_nodes} x trainer.devices={devices}"
        if self.world_size is not None and self.world_size != num_nodes * devices:
            nodes = f", as trainer.num_nodes={self._nodes} trainer.devices={self.local_size}" if self._nodes else ""
            raise UserError(
                f"{self.launcher} has started {self.world_size} processes, but {expected} requires "
                f"{num_nodes * devices}: set both to the same number{nodes}"
            )
        if self.local_size is not None and self.local_size != devices:
            raise UserError(
                f"{self.launcher} has started {self.local_size} processes on this node, but trainer.devices is "
                f"{devices}: set both to the same number"
            )
        if not (self.rank < num_nodes * devices and self.local_rank < devices and self.node < num_nodes):
            raise UserError(
                f"{self.launcher} started this process as rank {self.rank} (local rank {self.local_rank}, node "
                f"{self.node}), which is outside {expected}: give the launcher and trainer.* the same numbers"
            )

    def check_gpu(self, gpus: int) -> None:
        """Raise a RankError if this process has a higher local rank than its host has GPUs."""
        if self.local_rank >= gpus:
            raise RankError(
                f"{self.launcher} started this process with local rank {self.local_rank}, but it can use {gpus} "
                "GPU(s): start one process per GPU, and let each process see all GPUs of its host"
            )

    @property
    def _nodes(self) -> int | None:
        if not self.world_size or not self.local_size or self.world_size % self.local_size:
            return None
        return self.world_size // self.local_size


def launched_process(environment: Mapping[str, str] = os.environ) -> Process | None:
    """Return rank and world size of this process; None if no launcher started it.

    If launchers are nested, this function reads the variables of the innermost one: in a Slurm job, those of torchrun
    or mpirun if one of them started the process.

    Raises:
        UserError: if a launcher's variables contradict each other, or the address of rank 0 is unknown.
    """
    first = _by_rank if "TORCHELASTIC_RUN_ID" in environment else _mpirun
    for read in (first, _mpirun, _by_rank, _srun):
        if found := read(environment):
            return found
    if environment.get("PMI_SIZE", "1") != "1":
        raise UserError(
            f"a launcher has started {shorten(environment['PMI_SIZE'])} processes (PMI_SIZE), but the local rank of "
            "this one is unknown: set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR for each process"
        )
    if (nodes := environment.get("PET_NNODES", "1")) != "1":
        raise UserError(
            f"PET_NNODES={shorten(nodes)}: Kubeflow has started several pods, but torchrun, which reads PET_*, did "
            "not start this process: start `torchrun -m bionemo.pretrain`, or unset PET_NNODES"
        )
    return None


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Raise a UserError for an integer variable of a launcher that is not an integer in its range.

    It runs before torch or Lightning reads them.
    """
    for name in _INTEGERS:
        if name in environment:
            _parse_integer(name, environment[name])


def check_master_address(process: Process | None, timeout: float = 5.0) -> None:
    """Check that the host of rank 0 can be resolved, before anything waits for a connection to it.

    Args:
        process: this process; None if no launcher started it (Lightning reads MASTER_ADDR then).
        timeout: seconds to wait for the name to be registered, for example of a container that has just started.

    Raises:
        HostError: if the name cannot be resolved.
    """
    import socket  # 3 ms, which --help need not wait for

    address = process.address if process is not None else os.environ.get("MASTER_ADDR", "127.0.0.1")
    until = time.monotonic() + timeout
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until:
                raise HostError(
                    f"MASTER_ADDR={address}: {socket.gethostname()} cannot resolve this host name of rank 0 "
                    f"({getattr(error, 'strerror', None) or error}): set MASTER_ADDR to a name or address that all "
                    "machines of the run know, or unset it for a run on one machine"
                ) from error
            time.sleep(0.5)


@contextmanager
def restored_variables() -> Iterator[None]:
    """Restore the variables that Lightning and `trainer.deterministic` set for a run."""
    names = "MASTER_ADDR", *_INTEGERS, "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "WANDB_MODE"
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a run of one process that this process starts: without the launcher's variables."""
    names = {*_INTEGERS, "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES", ERROR_DESCRIPTOR}
    return {name: value for name, value in environment.items() if name not in names}


def is_global_rank_zero(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is rank 0, without a process group; True if the variables are unset or invalid."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in environment:
            return _may_be_first(environment, name)
    if {"NODE_RANK", "LOCAL_RANK"} & environment.keys() and not _one_of_many_tasks(
        environment
    ):  # started by Lightning
        return _may_be_first(environment, "NODE_RANK", "LOCAL_RANK")
    return _may_be_first(environment, "SLURM_PROCID")


def is_local_rank_zero(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is local rank 0, without a process group; True if unset or invalid."""
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"]
    if "RANK" not in environment and _one_of_many_tasks(environment):
        names = names[1:]
    return next((_may_be_first(environment, name) for name in names if name in environment), True)


def _mpirun(environment: Mapping[str, str]) -> Process | None:
    """Read the variables of Open MPI, MPICH or Intel MPI; consecutive ranks must be on one node, as by default.

    OMPI_COMM_WORLD_NODE_RANK is not the number of a node.
    """
    if "OMPI_COMM_WORLD_RANK" in environment:
        names, per_node, forward = _OPEN_MPI, "-npernode N or --map-by ppr:N:node", "-x MASTER_ADDR=$(hostname)"
    elif "MPI_LOCALRANKID" in environment:
        names, per_node, forward = _MPICH, "-ppn N", "-genv MASTER_ADDR $(hostname)"
    else:
        return None
    number = _numbers("mpirun", environment)
    rank, local_rank, size, local_size = map(number, names)
    if rank % local_size != local_rank:
        raise UserError(
            f"mpirun gave rank {rank} the local rank {local_rank} of {local_size}: fill one node after the other with "
            f"the same number of ranks ({per_node})"
        )
    address = environment.get("MASTER_ADDR") or environment.get("NGC_MASTER_ADDR")
    if not address and size > local_size:
        raise UserError(f"MASTER_ADDR is not set: start mpirun on the first node with `mpirun {forward}`")
    # MPICH sets no number of the job: two runs on one machine need different MASTER_PORTs
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    port = number("MASTER_PORT", _port_of(zlib.crc32(job.encode())))
    return Process("mpirun", rank, local_rank, rank // local_size, size, local_size, address or "127.0.0.1", port)


def _by_rank(environment: Mapping[str, str]) -> Process | None:
    """Read RANK and LOCAL_RANK, which torchrun, bcprun, Ray (launch/ray_workers.py) and other torch launchers set."""
    if "RANK" not in environment or "LOCAL_RANK" not in environment:
        return None
    signs = {"TORCHELASTIC_RUN_ID": "torchrun", "BIONEMO_LAUNCHER": environment.get("BIONEMO_LAUNCHER", ""),
             "NGC_ARRAY_SIZE": "bcprun"}  # fmt: skip
    launcher = next((name for sign, name in signs.items() if sign in environment), "the launcher")
    number = _numbers(launcher, environment)
    rank, local_rank = number("RANK"), number("LOCAL_RANK")
    size = number("WORLD_SIZE") if "WORLD_SIZE" in environment else None
    local_size = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None
    named = next((name for name in ("GROUP_RANK", "NODE_RANK", "NGC_ARRAY_INDEX") if name in environment), None)
    if named is None and local_size is None and rank != local_rank:
        raise UserError(f"the node of rank {rank} is unknown ({launcher}): set NODE_RANK")
    node = number(named) if named else rank // local_size if local_size else 0
    address = environment.get("MASTER_ADDR") or environment.get("NGC_MASTER_ADDR") or "127.0.0.1"
    return Process(launcher, rank, local_rank, node, size, local_size, address, number("MASTER_PORT", 29500))


def _one_of_many_tasks(environment: Mapping[str, str]) -> bool:
    """Return whether this is a task of a Slurm step with several tasks, not a batch script or interactive shell."""
    in_step = {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environment.keys()
    return in_step and environment["SLURM_STEP_NUM_TASKS"] != "1"


def _srun(environment: Mapping[str, str]) -> Process | None:
    if not _one_of_many_tasks(environment):
        return None
    number = _numbers("srun", environment)
    size, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES", 0)
    local_size = size // nodes if nodes and size % nodes == 0 else None
    host = first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    address = environment.get("MASTER_ADDR") or host or "127.0.0.1"
    job = number("SLURM_JOB_ID", 0) * 7 + number("SLURM_STEP_ID", 0)  # steps of one job may run at the same time
    return Process(
        "srun", number("SLURM_PROCID"), number("SLURM_LOCALID"), number("SLURM_NODEID"), size, local_size, address,
        number("MASTER_PORT", _port_of(job)),
    )  # fmt: skip


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list, such as node01 of `node[01-03,7],x`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0] if first else "")


def _port_of(job: int) -> int:
    first, count = _PORTS
    return first + job % count


def _numbers(launcher: str, environment: Mapping[str, str]) -> Callable[..., int]:
    def number(name: str, default: int | None = None) -> int:
        value = environment.get(name, None if default is None else str(default))
        if value is None:
            raise UserError(f"{name} is not set; {launcher} sets it to an integer")
        return _parse_integer(name, value)

    return number


def _parse_integer(name: str, value: str) -> int:
    lowest = int(name.endswith(("SIZE", "NUM_TASKS")))
    highest = 2**16 - 1 if name == "MASTER_PORT" else 2**32 - 1
    if re.fullmatch(r"[0-9]{1,10}", value) and lowest <= int(value) <= highest:
        return int(value)
    raise UserError(
        f"{name} is {shorten(value)}: expected an integer from {lowest} to {highest}, set by a launcher; or unset it"
    )


def _may_be_first(environment: Mapping[str, str], *names: str) -> bool:
    """Return whether these variables are 0, unset, or no integers (so that an error about them is printed)."""
    for name in names:
        with suppress(UserError):
            if _parse_integer(name, environment.get(name, "0")):
                return False
    return True
