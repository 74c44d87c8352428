# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Base Command Platform: `ngc batch run` submits one job, in which bcprun starts one process per device."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text
from bionemo.config.paths import CHECKOUT
from bionemo.config.schema import BcpConfig
from bionemo.launch.job import MODULE, Job, JobStep
from bionemo.launch.secrets import check_secret_names
from bionemo.launch.shell import lines, one_line, render, variable

_SECRET = re.compile(r"[^:\s]+(:[A-Za-z_][A-Za-z0-9_]*){0,2}")

_SHELL = "sleep infinity"
# the platform authenticates users before they reach the port, so Jupyter needs no token
_JUPYTER = (
    "jupyter lab --allow-root --ip=* --port=8888 --no-browser --NotebookApp.token='' --NotebookApp.allow_origin='*' "
    "--ContentsManager.allow_hidden=True --notebook-dir=/ & sleep infinity"
)


class Bcp:
    """Base Command Platform, configured by `cluster`."""

    def __init__(self, config: BcpConfig) -> None:
        self.config = config

    def render(self, job: Job) -> dict[Path, str]:
        """Return `ngc-launch.sh`, in the current directory."""
        command = self._commandline(job)
        end = "COMMAND"
        while f"\n{end}\n" in f"\n{command}\n":  # the text contains this line
            end += "_"
        return {self._script(job): render("bcp.sh.j2", job=job, options=self._options(job), command=command, end=end)}

    def submit(self, job: Job) -> int:
        """Submit the job with the NGC CLI."""
        if not shutil.which("ngc"):
            raise UserError(
                f"ngc was not found: install the NGC CLI, run `ngc config set`, then bash {self._script(job)}"
            )
        result = subprocess.run(["bash", str(self._script(job))], capture_output=True, text=True, check=False)
        if result.returncode:
            raise UserError(f"ngc refused {self._script(job)}: {' '.join((result.stderr or result.stdout).split())}")
        print(redact_text(result.stdout), end="")
        return 0

    @staticmethod
    def _script(job: Job) -> Path:
        return job.working_directory / "ngc-launch.sh"

    def _options(self, job: Job) -> list[str]:
        config = self.config
        for key in ("instance", "image", "total_runtime"):
            if not getattr(config, key):
                raise UserError(f"missing value: set cluster.{key}=..., which BCP requires")
        check_secret_names(config.secrets, _SECRET)
        self._check_devices(job)
        nodes = max(step.nodes for step in job.steps)
        ports = [*config.ports, *(["8888"] if config.interactive == "jupyter" and "8888" not in config.ports else [])]
        many = {
            "datasetid": config.datasets, "workspace": config.workspaces, "port": ports,
            "label": config.labels, "secret": config.secrets,
            "env-var": [f"{variable(name)}:{value}" for name, value in config.variables.items()],
        }  # fmt: skip
        one = {
            "name": job.name, "org": config.org, "team": config.team, "ace": config.ace, "instance": config.instance,
            "array-type": config.array_type, "replicas": nodes, "image": config.image, "result": config.result,
            "total-runtime": config.total_runtime, "preempt": config.preempt, "priority": config.priority,
            "order": config.order,
        }  # fmt: skip
        options = [(name, str(value)) for name, value in one.items() if value is not None]
        options += [(name, value) for name, values in many.items() for value in values]
        return [f"--{name}={one_line(value, f'--{name}')}" for name, value in options]

    def _check_devices(self, job: Job) -> None:
        """Check `trainer.devices` against the number of GPUs in the instance name, such as 8 in dgxa100.80g.8.norm."""
        numbers = [part for part in (self.config.instance or "").split(".") if part.isdecimal()]
        most = max(step.tasks for step in job.steps)
        if job.gpus and numbers and most > int(numbers[-1]):
            raise UserError(f"trainer.devices={most}, but cluster.instance={self.config.instance} has {numbers[-1]}")

    def _commandline(self, job: Job) -> str:
        if self.config.interactive:
            return _SHELL if self.config.interactive == "shell" else _JUPYTER
        return " &&\n".join(self._bcprun(job, step) for step in job.steps)

    def _bcprun(self, job: Job, step: JobStep) -> str:
        """Return the bcprun command of a step, with the arguments; the configuration files are in the image."""
        command = shlex.join(["python", "-u", "-m", MODULE, *job.arguments, *step.overrides])
        bcprun = ["bcprun", f"--nnodes={step.nodes}", f"--npernode={step.tasks}"]
        bcprun += ["--launcher", "mpirun --allow-run-as-root"] if self.config.array_type == "MPI" else []
        return lines([bcprun, ["--workdir", self._workdir(job)], ["--cmd", command]])

    def _workdir(self, job: Job) -> str:
        """Return the directory of the image that corresponds to the current directory in the checkout."""
        try:
            return str(PurePosixPath(self.config.workdir) / job.working_directory.relative_to(CHECKOUT))
        except ValueError:
            return self.config.workdir
