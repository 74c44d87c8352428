# SPDX-License-Identifier: Apache-2.0
"""`cluster`: where and how `bionemo launch` submits a run. The run itself does not use it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bionemo.config.schema.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, ProcessCount, Range


@dataclass(kw_only=True)
class ClusterConfig:
    """Keys of every cluster."""

    _target_: str  # a class with `render` and `submit`
    #: environment of the run; None unsets a variable; not for secrets, which stay in the submitter's environment
    env_vars: dict[str, str | None]

    @property
    def variables(self) -> dict[str, str]:
        """The variables of `env_vars` that have a value."""
        return {name: value for name, value in self.env_vars.items() if value is not None}


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """This machine: the run starts one process per device itself."""


@dataclass(kw_only=True)
class MpiConfig(ClusterConfig):
    """Machines started by mpirun of Open MPI, MPICH or Intel MPI."""

    hostfile: str | None  # lines of `HOST slots=8`, or `HOST:8` for MPICH and Intel MPI; None: mpirun's default
    mpirun_args: list[str]  # more options, such as --allow-run-as-root


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """Slurm, under the names of NeMo's launcher; None selects Slurm's default."""

    partition: str | None  # partition
    account: str | None  # account that is charged
    exclusive: bool  # no other job on its nodes
    gpus_per_task: PositiveInt | None  # GPUs of each process
    gpus_per_node: PositiveInt | Literal["auto"] | None  # auto: trainer.devices, or omitted if gres is set
    mem: NonNegativeInt | NonNegativeFloat | str | None  # per node; numbers are GB; 0: all memory
    job_name_prefix: str  # beginning of the job's name
    gres: str | None  # auto: gpu:N with N = gpus_per_node or, if that is None, trainer.devices
    srun_args: list[str] | str  # container options are used only with container_image
    stderr_to_stdout: bool  # write errors and output to one file
    time: str | None  # DD-HH:MM:SS; None: trainer.max_time plus half an hour, else the partition's limit
    dependency: str | None  # singleton: run jobs of one name one after the other, in the order of submission
    signal: str | None  # NAME@SECONDS: sent before the time limit; the run then saves a checkpoint
    requeue: bool  # continue in the same job afterwards
    additional_parameters: dict[str, str | int | bool | None]  # other options of sbatch, such as {qos: high}
    container_image: str | None  # for the Pyxis plugin: a .sqsh file or the name of an image
    container_mounts: list[str]  # SOURCE:TARGET[:FLAGS]; must include the directories of the run and its data
    python: str | None  # None: the submitting interpreter, or python3 in a container


@dataclass(kw_only=True)
class BcpConfig(ClusterConfig):
    """NVIDIA Base Command Platform through the NGC CLI; None selects the platform's default."""

    org: str | None  # organization
    team: str | None  # team of the organization
    ace: str | None  # accelerated computing environment
    instance: str | None  # such as dgxa100.80g.8.norm
    image: str | None  # container image
    array_type: Literal["PYTORCH", "MPI", "PARALLEL", "HOROVOD"]  # how the platform starts several machines
    total_runtime: str | None  # [nD][nH][nM][nS]
    preempt: Literal["RUNONCE", "RESTARTABLE", "RESUMABLE"]  # whether the platform may stop and restart the job
    priority: Literal["HIGH", "NORMAL", "LOW"]  # of the job in the queue
    order: Annotated[int, Range(1, 99)] | None  # among the jobs of one user
    result: str  # directory whose content is kept, for `ngc result download`
    datasets: list[str]  # ID:MOUNT, read-only
    workspaces: list[str]  # ID:MOUNT[:RW|RO]
    ports: list[str]  # PORT, or NAME:PORT/PROTOCOL
    labels: list[str]  # labels of the job
    secrets: list[str]  # NAME[:KEY[:ALIAS]] of the platform's secrets
    workdir: str  # the checkout in the image
    interactive: Literal["shell", "jupyter"] | None  # allocate the machines without starting a run


@dataclass(kw_only=True)
class KubernetesConfig(ClusterConfig):
    """Kubernetes with Kubeflow; None selects the cluster's default."""

    api: Literal["v1", "v2"]  # v2: TrainJob of Kubeflow Trainer; v1: PyTorchJob of the Training Operator
    runtime: str  # v2: ClusterTrainingRuntime, which decides on restarts and priority
    namespace: str | None  # namespace of the job; None: that of kubectl's context
    image: str | None  # container image with bionemo
    image_pull_secrets: list[str]  # names of Kubernetes secrets for the registry of the image
    volumes: list[str]  # CLAIM:MOUNT[:RO]; one must contain exp_manager.exp_dir, and all pods must be able to mount it
    secrets: list[str]  # NAME:KEY[:VARIABLE] of Kubernetes secrets, passed as environment variables
    cpu: str | None  # cores of a pod, such as 32
    memory: str | None  # memory of a pod, such as 500Gi
    shared_memory: str  # limit of /dev/shm, which the workers of the data loader use; part of the memory
    gpu_resource: str  # name of the GPUs in the resources of a node
    resources: dict[str, str]  # other resources of a pod, such as {rdma/ib: '8'}
    annotations: dict[str, str]  # of the pods, such as those that attach networks
    node_selector: dict[str, str]  # labels of the nodes
    tolerations: list[str]  # keys of taints that the pods tolerate, such as nvidia.com/gpu
    priority_class: str | None  # v1: name of the PriorityClass, which decides what is preempted
    max_restarts: NonNegativeInt | None  # v1: after failures and preemptions, in all pods together; None: 100
    grace_period: PositiveInt  # seconds that a preempted pod has to save a checkpoint


@dataclass(kw_only=True)
class RayConfig(ClusterConfig):
    """A Ray cluster that is running or starting."""

    address: str  # HOST:PORT of its head, or auto
    cpus_per_worker: ProcessCount  # cores reserved for each process
    timeout: NonNegativeInt  # seconds to wait until all machines have joined
