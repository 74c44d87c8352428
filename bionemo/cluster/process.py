# SPDX-License-Identifier: Apache-2.0
"""Who am I: the rank of this process, as its launcher says it in the environment.

Nothing else of the package reads these variables. Imports nothing heavy: who tells a mistake is asked before torch is
loaded.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bionemo.errors import UserError

_PORTS = 15000, 10000  # the first of those that jobs are given, and their number


@dataclass(frozen=True)
class Process:
    """One of the processes of a run that a launcher has started.

    Attributes:
        launcher: who started it.
        rank: among all, from 0.
        local_rank: among those of its node.
        node: number of its node, from 0.
        world_size: number of all; None: the launcher does not say.
        local_size: number of those of its node; None: the launcher does not say.
        address: host of rank 0.
        port: where rank 0 listens.
    """

    launcher: str
    rank: int
    local_rank: int
    node: int
    world_size: int | None
    local_size: int | None
    address: str
    port: int

    def check(self, num_nodes: int, devices: int) -> None:
        """Hold what the launcher has started against what the run was told.

        Args:
            num_nodes: `trainer.num_nodes`.
            devices: of each node; `trainer.devices`.

        Raises:
            UserError: when they differ; another run would be trained than the one asked for.
        """
        told = f"trainer.num_nodes={num_nodes} x trainer.devices={devices}"
        if self.world_size is not None and self.world_size != num_nodes * devices:
            nodes = f", as trainer.num_nodes={self._nodes} trainer.devices={self.local_size}" if self._nodes else ""
            raise UserError(
                f"{self.launcher} has started {self.world_size} processes, but {told} makes {num_nodes * devices}: "
                f"give both the same number{nodes}"
            )
        if self.local_size is not None and self.local_size != devices:
            raise UserError(
                f"{self.launcher} has started {self.local_size} processes on this node, but trainer.devices is "
                f"{devices}: give both the same number"
            )
        if not (self.rank < num_nodes * devices and self.local_rank < devices and self.node < num_nodes):
            raise UserError(
                f"{self.launcher} has started this process as rank {self.rank} (local rank {self.local_rank}, node "
                f"{self.node}), of which {told} has none: give the launcher and trainer.* the same numbers"
            )

    @property
    def _nodes(self) -> int | None:
        if not self.world_size or not self.local_size or self.world_size % self.local_size:
            return None
        return self.world_size // self.local_size


def this_process(environment: Mapping[str, str] = os.environ) -> Process | None:
    """Read who this process is; None where nobody but a shell, or this package, has started it.

    The innermost launcher counts: torchrun or mpirun inside a job of Slurm's have started it, and Slurm has not.

    Raises:
        UserError: when a launcher's variables contradict each other, or rank 0 cannot be found.
    """
    for read in (_torchrun, _mpirun, _by_rank, _srun):
        if found := read(environment):
            return found
    return None


def speaks_for_all(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first of all processes, before there are process groups; one that cannot tell is."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in environment:
            return environment[name] == "0"
    if {"NODE_RANK", "LOCAL_RANK"} & environment.keys() and not _one_of_many_tasks(environment):  # Lightning starts it
        return {environment.get("NODE_RANK", "0"), environment.get("LOCAL_RANK", "0")} == {"0"}
    return environment.get("SLURM_PROCID", "0") == "0"


def first_of_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first process of its node, before there are process groups; one that cannot tell is."""
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"]
    if "RANK" not in environment and _one_of_many_tasks(environment):
        names = names[1:]
    return next((environment[name] == "0" for name in names if name in environment), True)


def _torchrun(environment: Mapping[str, str]) -> Process | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    number = _numbers("torchrun", environment)
    return Process(
        "torchrun", number("RANK"), number("LOCAL_RANK"), number("GROUP_RANK"), number("WORLD_SIZE"),
        number("LOCAL_WORLD_SIZE"), environment.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT", 29500),
    )  # fmt: skip


def _mpirun(environment: Mapping[str, str]) -> Process | None:
    """Open MPI's: ranks fill one node after the other, as its default and -npernode have it.

    OMPI_COMM_WORLD_NODE_RANK is no number of a node.
    """
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    number = _numbers("mpirun", environment)
    rank, local_rank = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_LOCAL_RANK")
    size, local_size = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_LOCAL_SIZE")
    if rank % local_size != local_rank:
        raise UserError(
            f"mpirun has given rank {rank} the local rank {local_rank} of {local_size}: let ranks fill one node after "
            "the other (-npernode N, --map-by ppr:N:node), with as many on each"
        )
    address = environment.get("MASTER_ADDR") or environment.get("NGC_MASTER_ADDR")
    if not address and size > local_size:
        raise UserError(
            "mpirun does not say where rank 0 is: start it on the first node, with `mpirun -x MASTER_ADDR=$(hostname)`"
        )
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    port = number("MASTER_PORT", _port_of(zlib.crc32(job.encode())))
    return Process("mpirun", rank, local_rank, rank // local_size, size, local_size, address or "127.0.0.1", port)


def _by_rank(environment: Mapping[str, str]) -> Process | None:
    """What bcprun and Ray (cluster/on_ray.py) set, and others that follow torch: RANK, and a node if there is one."""
    if "RANK" not in environment or "LOCAL_RANK" not in environment:
        return None
    launcher = environment.get("BIONEMO_LAUNCHER", "bcprun" if "NGC_ARRAY_SIZE" in environment else "the launcher")
    number = _numbers(launcher, environment)
    rank, local_rank = number("RANK"), number("LOCAL_RANK")
    size = number("WORLD_SIZE") if "WORLD_SIZE" in environment else None
    local_size = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None
    named = next((name for name in ("GROUP_RANK", "NODE_RANK", "NGC_ARRAY_INDEX") if name in environment), None)
    if named is None and local_size is None and rank != local_rank:
        raise UserError(f"{launcher} does not say which node rank {rank} is on: set NODE_RANK")
    node = number(named) if named else rank // local_size if local_size else 0
    address = environment.get("MASTER_ADDR") or environment.get("NGC_MASTER_ADDR") or "127.0.0.1"
    return Process(launcher, rank, local_rank, node, size, local_size, address, number("MASTER_PORT", 29500))


def _one_of_many_tasks(environment: Mapping[str, str]) -> bool:
    """Of a step; what runs in a batch script without srun is none, nor is a shell in an interactive step."""
    told = {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environment.keys()
    return told and environment["SLURM_STEP_NUM_TASKS"] != "1"


def _srun(environment: Mapping[str, str]) -> Process | None:
    if not _one_of_many_tasks(environment):
        return None
    number = _numbers("srun", environment)
    size, node = number("SLURM_STEP_NUM_TASKS"), number("SLURM_NODEID")
    tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    host = first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    address = environment.get("MASTER_ADDR") or host or "127.0.0.1"
    job = number("SLURM_JOB_ID", 0) * 7 + number("SLURM_STEP_ID", 0)  # steps of one job may run side by side
    return Process(
        "srun", number("SLURM_PROCID"), number("SLURM_LOCALID"), node, size,
        tasks[node] if node < len(tasks) else None, address, number("MASTER_PORT", _port_of(job)),
    )  # fmt: skip


def first_host(hosts: str) -> str:
    """The first name in a list of Slurm's: node01 of `node[01-03,7],x`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0] if first else "")


def _tasks_per_node(counts: str) -> list[int]:
    """Slurm's `2(x3),1`: 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _port_of(job: int) -> int:
    first, count = _PORTS
    return first + job % count


def _numbers(launcher: str, environment: Mapping[str, str]) -> Callable[..., int]:
    def number(name: str, default: int | None = None) -> int:
        value = environment.get(name, None if default is None else str(default))
        if value is None or not value.isdecimal():
            said = "is not set" if value is None else f"is {value!r}"
            raise UserError(f"{launcher} was to say who this process is, but {name} {said}: set it to a number")
        return int(value)

    return number
