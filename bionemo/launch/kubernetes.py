# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a job of Kubeflow with one pod per node, in which torchrun starts the processes.

The command of the pods is torchrun, which reads nodes, processes, rank of the node and address from PET_* variables.
`cluster.api` selects the kind of job:

v2: a TrainJob of Kubeflow Trainer, which refers to a runtime that an administrator has installed. The Trainer sets
PET_* in the container `node` of a runtime with a `torch` policy, the number of processes to `numProcPerNode`. Volumes
and the placement of pods are patches of the runtime; priority and restarts of pods cannot be patched.

v1: a PyTorchJob of the Training Operator, which contains everything and sets PET_* in all containers.
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
# Names of pods and services have at most 63 characters: v1 appends -worker-N, v2 -node-0-N and a hyphen with 5 letters
_LONGEST_NAME = {"v1": 50, "v2": 45}
_MARGIN = 30  # seconds between the end of the processes and that of the pod


class Kubernetes:
    """A Kubernetes cluster, configured by `cluster`."""

    def __init__(self, config: KubernetesConfig) -> None:
        self.config = config

    def render(self, job: Job) -> dict[Path, str]:
        """Return the manifest, in the current directory: a job, and a ConfigMap with the configuration."""
        if len(job.steps) > 1:
            raise UserError(
                "cluster=k8s starts one step: set only one of do_preprocessing, do_training and do_testing, and "
                "submit the others when it has ended"
            )
        if not self.config.image:
            raise UserError("missing value: set cluster.image=..., a container image with bionemo")
        for key in ("priority_class", "max_restarts"):
            if self.config.api == "v2" and (value := getattr(self.config, key)) is not None:
                raise UserError(
                    f"cluster.{key}={value}: the runtime of a TrainJob decides this: set cluster.runtime to a runtime "
                    "with this setting, or cluster.api=v1"
                )
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
        name, first = self._name(job), "batch.kubernetes.io/job-completion-index=0"
        pod = f"{name}-master-0" if self.config.api == "v1" else f"-l jobset.sigs.k8s.io/jobset-name={name},{first}"
        print(f"logs: kubectl logs --follow {pod}")
        return 0

    @staticmethod
    def _file(job: Job) -> Path:
        return job.working_directory / f"{job.name}_k8s.yaml"

    def _name(self, job: Job) -> str:
        """Return the name of the objects: lower-case letters, digits and hyphens, starting with a letter."""
        name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}")[: _LONGEST_NAME[self.config.api]].rstrip("-")

    def _manifest(self, job: Job, step: JobStep) -> str:
        config, name = self.config, self._name(job)
        check_secret_names(config.image_pull_secrets, _OBJECT, "image_pull_secrets")
        check_secret_names(config.secrets, _SECRET)
        gpus = str(step.tasks) if job.gpus and step.part != "prepare" else None
        resources = {"cpu": config.cpu, "memory": config.memory, config.gpu_resource: gpus, **config.resources}
        in_pod = replace(job, directory=_CONFIG, config_name=f"{name}_hydra.yaml")
        _, *arguments = in_pod.command(step)
        # torchrun would kill the processes after 30 s
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
