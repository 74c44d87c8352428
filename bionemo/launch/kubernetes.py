# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a PyTorchJob of Kubeflow's Training Operator, one pod per node, in which torchrun starts the processes.

A PyTorchJob contains everything that its pods need. A TrainJob, its successor, refers to a runtime that an
administrator has installed, and sets volumes and node selectors only as changes to that runtime.

The command of the pods is torchrun, which reads PET_* variables. The Training Operator sets them in all containers of
a PyTorchJob. A TrainJob sets them only in the container `node` of a runtime with a `torch` policy, and the number of
processes to `auto` unless the TrainJob has `trainer.numProcPerNode`, so the pods here are not valid in a TrainJob.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path, PurePosixPath

from bionemo.common.errors import UserError
from bionemo.config.schema import KubernetesConfig
from bionemo.launch.job import MODULE, Job, JobStep
from bionemo.launch.secrets import check_secret_names
from bionemo.launch.shell import render

_CONFIG = Path("/etc/bionemo")  # where the pods find the configuration of the run
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/[^:]*?)/?(:R[WO])?")
_SECRET = re.compile(r"[a-z0-9][a-z0-9.-]*:[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?", re.ASCII)
_OBJECT = re.compile(r"[a-z0-9][a-z0-9.-]*")
_LONGEST_NAME = 50  # the operator appends -master-0 and -worker-N; names of services have 63 characters
_MARGIN = 30  # seconds between the end of the processes and that of the pod


class Kubernetes:
    """A Kubernetes cluster, configured by `cluster`."""

    def __init__(self, config: KubernetesConfig) -> None:
        self.config = config

    def render(self, job: Job) -> dict[Path, str]:
        """Return the manifest, in the current directory: a PyTorchJob, and a ConfigMap with the configuration."""
        if len(job.steps) > 1:
            raise UserError(
                "cluster=k8s starts one step: set only one of do_preprocessing, do_training and do_testing, and "
                "submit the others when it has ended"
            )
        if not self.config.image:
            raise UserError("missing value: set cluster.image=..., a container image with bionemo")
        return {self._file(job): self._manifest(job, job.steps[0])}

    def submit(self, job: Job) -> int:
        """Create both objects with kubectl, after the server has accepted both."""
        file = self._file(job)
        if not shutil.which("kubectl"):
            raise UserError(f"kubectl was not found: install and configure it, then kubectl create -f {file}")
        command = ["kubectl", "create", "-f", str(file)]
        for flags in (["--dry-run=server"], []):  # otherwise a job could start with the ConfigMap of an earlier one
            result = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
            if result.returncode:
                problem = " ".join(result.stderr.split())
                hint = f"; kubectl delete -f {file} removes an earlier job" if "AlreadyExists" in problem else ""
                raise UserError(f"kubectl refused {file}: {problem}{hint}")
        print(result.stdout, end="")
        print(f"logs: kubectl logs --follow {self._name(job)}-master-0")
        return 0

    @staticmethod
    def _file(job: Job) -> Path:
        return job.working_directory / f"{job.name}_k8s.yaml"

    @staticmethod
    def _name(job: Job) -> str:
        """Return the name of the objects: lower-case letters, digits and hyphens, starting with a letter."""
        name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}")[:_LONGEST_NAME].rstrip("-")

    def _manifest(self, job: Job, step: JobStep) -> str:
        config, name = self.config, self._name(job)
        check_secret_names(config.image_pull_secrets, _OBJECT, "image_pull_secrets")
        check_secret_names(config.secrets, _SECRET)
        gpus = str(step.tasks) if job.gpus and step.part != "prepare" else None
        resources = {"cpu": config.cpu, "memory": config.memory, config.gpu_resource: gpus}
        in_pod = replace(job, directory=_CONFIG, config_name=f"{name}_hydra.yaml")
        _, *arguments = in_pod.command(step)
        # torchrun reads nodes and processes from PET_* variables, and would kill the processes after 30 s
        timeout = str(max(config.grace_period - _MARGIN, 1))
        return render(
            "kubernetes.yaml.j2",
            job=job,
            step=step,
            cluster=config,
            name=name,
            config=_CONFIG,
            config_name=in_pod.config_name,
            command=["-m", MODULE, *(argument for line in arguments for argument in line)],
            variables={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": timeout, **config.variables},
            resources={resource: amount for resource, amount in resources.items() if amount is not None},
            volumes=self._volumes(job),
        )

    def _volumes(self, job: Job) -> list[tuple[str, str, bool]]:
        """Return the claim of each volume, where it is mounted, and whether it is read-only."""
        volumes = []
        for volume in self.config.volumes:
            match = _VOLUME.fullmatch(volume)
            if not match:
                raise UserError(
                    f"cluster.volumes is {volume!r}, expected CLAIM:/DIRECTORY, optionally followed by :RO"
                )
            volumes.append((match[1], match[2] or "/", match[3] == ":RO"))
        if not any(
            PurePosixPath(job.directory).is_relative_to(place) for _, place, read_only in volumes if not read_only
        ):
            raise UserError(
                f"exp_manager.exp_dir={job.directory} is on none of cluster.volumes, so checkpoints would be lost: "
                "set cluster.volumes=[CLAIM:/DIRECTORY] and exp_manager.exp_dir=/DIRECTORY/NAME"
            )
        return volumes
