# SPDX-License-Identifier: Apache-2.0
"""Slurm: one batch script per step, in which srun starts one process per device.

The names of the files are those of NeMo's launcher.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from bionemo.common.errors import UserError, shorten
from bionemo.config.schema import SlurmConfig
from bionemo.launch.job import Job, JobStep
from bionemo.launch.shell import render

_SIGNAL = re.compile(r"(?:SIG)?(USR1|TERM)@(\d+)", re.IGNORECASE)  # signals after which a run saves and exits
# what sbatch --parsable prints, or wrappers that drop the option; with a site's banner, on a line of its own
_JOB_NUMBER = re.compile(r"^[ \t]*(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?[ \t]*\r?$", re.MULTILINE)
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
_SLACK = 1800  # seconds added to trainer.max_time, for starting and saving
_KEPT_IN_A_JOB = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")  # where and as whom to submit
_GPU_OPTIONS = ("gpus_per_node", "gpus_per_task", "gres")


class Slurm:
    """A Slurm cluster."""

    def __init__(self, config: SlurmConfig) -> None:
        self.config = config

    def render(self, job: Job) -> dict[Path, str]:
        """Return the configuration and one batch script per step."""
        config = self.config
        most = max(step.tasks for step in job.steps)
        if job.gpus and isinstance(config.gpus_per_node, int) and most > config.gpus_per_node:
            raise UserError(f"trainer.devices={most}, but a node has cluster.gpus_per_node={config.gpus_per_node}")
        return job.records | {self._script(job, step): self._batch(job, step) for step in job.steps}

    def submit(self, job: Job) -> int:
        """Submit one job per step; each waits for the previous one."""
        if not shutil.which("sbatch"):
            raise UserError(
                "sbatch was not found: submit from a login node of the cluster; --dry-run prints the script"
            )
        self._check_files_exist(job)
        numbers: list[str] = []
        for step in job.steps:
            script = self._script(job, step)
            command = ["sbatch", "--parsable", *_after(self.config.dependency, numbers), str(script)]
            result = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
            found = _JOB_NUMBER.findall(result.stdout)
            if result.returncode or not found:
                printed = " ".join((result.stderr if result.returncode else result.stdout + result.stderr).split())
                raise UserError(
                    f"sbatch refused {script}: {printed}{_cancel(numbers)}"
                    if result.returncode
                    else f"sbatch printed no job number for {script}, but {shorten(printed, 300)}{_cancel(numbers)}: "
                    "the job may be queued, see `squeue --me`"
                )
            numbers.append(found[-1])
            print(f"{job.stem(step)}: submitted batch job {numbers[-1]}")
        (job.directory / "launcher.log").write_text("".join(f"Submitted batch job {number}\n" for number in numbers))
        print(f"logs and results: {job.directory}")
        return 0

    def _script(self, job: Job, step: JobStep) -> Path:
        return job.directory / f"{self.config.job_name_prefix}{job.stem(step)}_submission.sh"

    def _batch(self, job: Job, step: JobStep) -> str:
        notice = self._signal(job, step)
        python = self.config.python or ("python3" if self.config.container_image else None)
        return render(
            "slurm.sh.j2",
            job=job,
            step=step,
            cluster=self.config,
            script=self._script(job, step),
            options=self._options(job, step, notice),
            srun_arguments=self._srun_arguments(job),
            command=job.command(step, python),
            requeue=self.config.requeue and job.resumes and not step.part,
            signal=notice[0] if notice else signal.SIGUSR1.value,
        )

    def _options(self, job: Job, step: JobStep, notice: tuple[int, int] | None) -> dict[str, str | int | bool | None]:
        config = self.config
        log = str(job.directory / f"log-{config.job_name_prefix}{job.stem(step)}").replace("%", "%%") + "_%j"
        gpus_per_node, gres = self._gpus(step)
        options: dict[str, str | int | bool | None] = {
            "account": config.account,
            "dependency": config.dependency,
            "error": None if config.stderr_to_stdout else f"{log}.err",
            "exclusive": config.exclusive,
            "gpus_per_node": gpus_per_node,
            "gpus_per_task": config.gpus_per_task,
            "gres": gres,
            "job_name": f"{config.job_name_prefix}{job.stem(step)}",
            "mem": _memory(config.mem),
            "nodes": step.nodes,
            "ntasks_per_node": step.tasks,
            "open_mode": "append",
            "output": f"{log}.out",
            "partition": config.partition,
            "requeue" if config.requeue else "no_requeue": True,
            "signal": f"{signal.Signals(notice[0]).name}@{notice[1]}" if notice else None,
            "time": self._time(job, step),
        }
        if not job.gpus or step.part == "prepare":
            options |= dict.fromkeys(_GPU_OPTIONS)
        for name, value in config.additional_parameters.items():
            known = name.replace("-", "_")
            if not _OPTION.fullmatch(name) or known in options:
                hint = f"set cluster.{known}" if known in vars(config) else "it is already set"
                raise UserError(f"cluster.additional_parameters.{name}: {hint}, or use another option of sbatch")
            options[known] = value
        return options

    def _gpus(self, step: JobStep) -> tuple[int | None, str | None]:
        """Return --gpus-per-node and --gres, which must not contradict each other."""
        count, gres = self.config.gpus_per_node, self.config.gres
        if count == "auto":
            count = step.tasks if gres in (None, "auto") else None
        if gres == "auto":
            gres = f"gpu:{step.tasks if count is None else count}"
        return count, gres

    def _signal(self, job: Job, step: JobStep) -> tuple[int, int] | None:
        """Return the signal that Slurm sends before the time limit, and how many seconds before."""
        given = self.config.signal
        if given is None or step.part or not job.resumes:  # without resuming, a requeued job would never finish
            return None
        if not (match := _SIGNAL.fullmatch(given)):
            raise UserError(f"cluster.signal is {given!r}, expected a value such as SIGUSR1@180 (without B:)")
        return signal.Signals[f"SIG{match[1].upper()}"].value, int(match[2])

    def _time(self, job: Job, step: JobStep) -> str | None:
        given = self.config.time
        if given is None and job.max_time is not None and not step.part:
            total = int(job.max_time) + _SLACK
            return f"{total // 86400}-{total // 3600 % 24:02}:{total // 60 % 60:02}:{total % 60:02}"
        return given

    def _srun_arguments(self, job: Job) -> list[str]:
        config = self.config
        given = shlex.split(config.srun_args) if isinstance(config.srun_args, str) else config.srun_args
        if not config.container_image:  # options of Pyxis
            return [argument for argument in given if not re.match(r"--(no-)?container-", argument)]
        mounts = ",".join([f"{job.directory}:{job.directory}", *config.container_mounts])
        image = [f"--container-image={config.container_image}", f"--container-mounts={mounts}"]
        names = list(config.env_vars)  # otherwise values of the image take precedence over them
        if names:
            option = "--container-env="
            names += [argument.removeprefix(option) for argument in given if argument.startswith(option)]
            given = [argument for argument in given if not argument.startswith(option)]
            image.append(option + ",".join(names))
        return [*image, *given]

    def _check_files_exist(self, job: Job) -> None:
        image = self.config.container_image
        if image and (image.startswith(("/", ".")) or image.endswith(".sqsh")) and not Path(image).exists():
            raise UserError(f"cluster.container_image={image}: the file does not exist")
        for mount in self.config.container_mounts if image else []:
            if not Path(mount.split(":")[0]).exists():
                raise UserError(f"cluster.container_mounts: {mount.split(':')[0]} does not exist")


def _environment() -> dict[str, str]:
    """Return the environment for sbatch, without the variables of a job in whose shell `bionemo launch` runs.

    The new job inherits them, and its srun reads them as options: SLURM_MEM_PER_NODE, SLURM_DISTRIBUTION, SLURM_GPUS.
    """
    in_a_job = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if not (in_a_job and name.startswith("SLURM_")) or name in _KEPT_IN_A_JOB
    }


def _cancel(numbers: list[str]) -> str:
    """Cancel jobs; return what the user must know if this fails."""
    if not numbers:
        return ""
    try:
        result = subprocess.run(["scancel", *numbers], capture_output=True, text=True, check=False)
        error = " ".join(result.stderr.split()) or f"status {result.returncode}" if result.returncode else ""
    except OSError as failed:
        error = str(failed)
    jobs = " ".join(numbers)
    return f"; the jobs {jobs} are still queued, because scancel failed ({error}): `scancel {jobs}`" if error else ""


def _after(dependency: str | None, numbers: list[str]) -> list[str]:
    """Return options that start a job after the previous job succeeds and cancel it if the previous job fails."""
    if not numbers:
        return []
    both = ",".join(part for part in (dependency, f"afterok:{numbers[-1]}") if part)
    return [f"--dependency={both}", "--kill-on-invalid-dep=yes"]


def _memory(memory: float | str | None) -> str | None:
    """Return the value of --mem; a number is in GB per node."""
    if memory is None or isinstance(memory, str):
        return memory
    if memory == 0:
        return "0"
    return f"{int(memory)}GB" if float(memory).is_integer() else f"{round(memory * 1024)}MB"
