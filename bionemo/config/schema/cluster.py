# SPDX-License-Identifier: Apache-2.0
"""`cluster`: where `python -m bionemo.launch` sends a run, and how; a run itself does not look at it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bionemo.config.schema.ranges import NotNegative, NotNegativeFloat, Positive, Processes, Range


@dataclass(kw_only=True)
class ClusterConfig:
    """What every kind of cluster has."""

    _target_: str  # the kind: a class with `render` and `submit`
    env_vars: dict[str, str]  # set for the run; secrets stay in the environment of who submits, or in the platform's


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """This machine: torchrun starts a process for each of trainer.devices."""


@dataclass(kw_only=True)
class MpiConfig(ClusterConfig):
    """Machines that mpirun reaches."""

    hostfile: str | None  # one `HOST slots=8` a line; None: what mpirun takes without
    mpirun_args: list[str]  # more options, such as --allow-run-as-root


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """A cluster under Slurm, under the names of NeMo's launcher; None leaves a choice to Slurm."""

    partition: str | None
    account: str | None
    exclusive: bool  # no other job on its nodes
    gpus_per_task: Positive | None
    gpus_per_node: Positive | Literal["auto"] | None  # auto: trainer.devices, or left out where gres is given
    mem: NotNegative | NotNegativeFloat | str | None  # of a node, in GB where it is a number; 0: all of it
    job_name_prefix: str
    gres: str | None  # auto: gpu:N with as many as gpus_per_node or, where that is None, trainer.devices
    srun_args: list[str] | str  # those about containers count only where there is one
    stderr_to_stdout: bool  # one log for both
    time: str | None  # DD-HH:MM:SS; None: half an hour more than trainer.max_time, or the partition's
    dependency: str | None  # singleton: one job of a name at a time, in the order they were submitted
    signal: str | None  # NAME@SECONDS: notice before the time is over, at which a run saves
    requeue: bool  # and goes on in the same job
    additional_parameters: dict[str, str | int | bool | None]  # any other option of sbatch: {qos: high}
    container_image: str | None  # for the Pyxis plugin: a .sqsh file, or the name of an image
    container_mounts: list[str]  # SOURCE:TARGET[:FLAGS]; the directories of the run and of its data belong here
    python: str | None  # None: the one that submits, or python3 in a container


@dataclass(kw_only=True)
class BcpConfig(ClusterConfig):
    """NVIDIA Base Command Platform, through the NGC CLI; None leaves a choice to it."""

    org: str | None
    team: str | None
    ace: str | None
    instance: str | None  # such as dgxa100.80g.8.norm
    image: str | None
    array_type: Literal["PYTORCH", "MPI", "PARALLEL", "HOROVOD"]
    total_runtime: str | None  # [nD][nH][nM][nS]
    preempt: Literal["RUNONCE", "RESTARTABLE", "RESUMABLE"]
    priority: Literal["HIGH", "NORMAL", "LOW"]
    order: Annotated[int, Range(1, 99)] | None  # from 1 to 99 among the jobs of one user
    result: str  # directory whose content is kept, for `ngc result download`
    datasets: list[str]  # ID:MOUNT, read-only
    workspaces: list[str]  # ID:MOUNT[:RW|RO]
    ports: list[str]  # PORT, or NAME:PORT/PROTOCOL
    labels: list[str]
    secrets: list[str]  # NAME[:KEY[:ALIAS]] of the platform's secrets
    workdir: str  # the checkout in the image
    interactive: Literal["shell", "jupyter"] | None  # lend the machines, and start nothing on them


@dataclass(kw_only=True)
class RayConfig(ClusterConfig):
    """A Ray cluster, which runs already, or is being started."""

    address: str  # HOST:PORT of its head, or auto
    cpus_per_worker: Processes
    patience: NotNegative  # seconds to wait for it to be there, with all its machines
