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
from typing import Any

import yaml

from bionemo.common.errors import UserError
from bionemo.config.schema import KubernetesConfig
from bionemo.launch.job import MODULE, Job, JobStep
from bionemo.launch.secrets import check_secret_names
from bionemo.launch.shell import variable

_CONFIG = Path("/etc/bionemo")  # where the pods find the configuration of the run
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/[^:]*?)/?(:R[WO])?")
_SECRET = re.compile(r"[a-z0-9][a-z0-9.-]*:[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?", re.ASCII)
_OBJECT = re.compile(r"[a-z0-9][a-z0-9.-]*")
_LONGEST_NAME = 50  # the operator appends -master-0 and -worker-N; names of services have 63 characters
_MARGIN = 30  # seconds between the end of the processes and that of the pod
_CONTAINER = "pytorch"  # the name that the operator expects
_LABELS = {"app.kubernetes.io/name": "bionemo"}
Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Writes equal objects twice, and texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return whether an object gets no anchor."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


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
        documents = [self._pytorch_job(job, job.steps[0]), self._config_map(job)]
        text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10_000)
        return {self._file(job): text}

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

    def _metadata(self, name: str) -> Manifest:
        namespace = {"namespace": self.config.namespace} if self.config.namespace else {}
        return {"name": name, **namespace, "labels": _LABELS}

    def _config_map(self, job: Job) -> Manifest:
        return {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata(f"{self._name(job)}-config"),
            "immutable": True, "data": {self._in_pod(job).config_file.name: job.config_text},
        }  # fmt: skip

    def _pytorch_job(self, job: Job, step: JobStep) -> Manifest:
        """Return the job. Pods start again after failures and preemptions if the run resumes."""
        template = {"metadata": {"labels": _LABELS}, "spec": self._pod(job, step)}
        policy = "OnFailure" if job.resumes else "Never"
        replicas = {"Master": 1, "Worker": step.nodes - 1}
        return {
            "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": self._metadata(self._name(job)),
            "spec": {
                "nprocPerNode": str(step.tasks),
                "runPolicy": {
                    "backoffLimit": self.config.max_restarts if job.resumes else 0, "cleanPodPolicy": "None",
                },
                "pytorchReplicaSpecs": {
                    kind: {"replicas": number, "restartPolicy": policy, "template": template}
                    for kind, number in replicas.items() if number
                },
            },
        }  # fmt: skip

    def _pod(self, job: Job, step: JobStep) -> Manifest:
        config = self.config
        volumes, mounts = self._volumes(job)
        resources = {"cpu": config.cpu, "memory": config.memory}
        if job.gpus and step.part != "prepare":
            resources[config.gpu_resource] = str(step.tasks)
        resources = {name: value for name, value in resources.items() if value is not None}
        container = {
            "name": _CONTAINER, "image": config.image, "command": self._command(job, step),
            "env": self._environment(), "resources": {"requests": resources, "limits": resources},
            "volumeMounts": mounts,
        }  # fmt: skip
        check_secret_names(config.image_pull_secrets, _OBJECT, "image_pull_secrets")
        optional = {
            "imagePullSecrets": [{"name": name} for name in config.image_pull_secrets],
            "nodeSelector": config.node_selector,
            "tolerations": [{"key": key, "operator": "Exists"} for key in config.tolerations],
            "priorityClassName": config.priority_class,
        }
        return {
            "containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": config.grace_period,
            **{key: value for key, value in optional.items() if value},
        }  # fmt: skip

    def _volumes(self, job: Job) -> tuple[list[Manifest], list[Manifest]]:
        """Return the volumes of a pod and where they are mounted."""
        volumes: list[Manifest] = [
            {"name": "config", "configMap": {"name": f"{self._name(job)}-config"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": self.config.shared_memory}},
        ]
        mounts: list[Manifest] = [
            {"name": "config", "mountPath": str(_CONFIG), "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ]
        writable = []
        for number, volume in enumerate(self.config.volumes):
            match = _VOLUME.fullmatch(volume)
            if not match:
                raise UserError(
                    f"cluster.volumes is {volume!r}, expected CLAIM:/DIRECTORY, optionally followed by :RO"
                )
            read_only = match[3] == ":RO"
            claim = {"claimName": match[1], **({"readOnly": True} if read_only else {})}
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
            mounts.append({"name": f"volume-{number}", "mountPath": match[2] or "/"})
            writable += [] if read_only else [PurePosixPath(match[2] or "/")]
        if not any(PurePosixPath(job.directory).is_relative_to(place) for place in writable):
            raise UserError(
                f"exp_manager.exp_dir={job.directory} is on none of cluster.volumes, so checkpoints would be lost: "
                "set cluster.volumes=[CLAIM:/DIRECTORY] and exp_manager.exp_dir=/DIRECTORY/NAME"
            )
        return volumes, mounts

    def _environment(self) -> list[Manifest]:
        """Return environment variables, and references to secrets."""
        check_secret_names(self.config.secrets, _SECRET)
        timeout = max(self.config.grace_period - _MARGIN, 1)  # of torchrun, which would kill the processes after 30 s
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(timeout), **self.config.variables}
        found: list[Manifest] = [{"name": variable(name), "value": str(value)} for name, value in variables.items()]
        for entry in self.config.secrets:
            name, key, *alias = entry.split(":")
            reference = {"secretKeyRef": {"name": name, "key": key}}
            found.append({"name": alias[0] if alias else key, "valueFrom": reference})
        return found

    def _in_pod(self, job: Job) -> Job:
        """Return the job with the path of its configuration in a pod."""
        return replace(job, directory=_CONFIG, config_name=f"{self._name(job)}_hydra.yaml")

    def _command(self, job: Job, step: JobStep) -> list[str]:
        """Return the command of a pod; torchrun reads the number of nodes and processes from PET_* variables."""
        _, *arguments = self._in_pod(job).command(step)
        return ["torchrun", "-m", MODULE, *(argument for line in arguments for argument in line)]
