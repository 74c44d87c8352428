# SPDX-License-Identifier: Apache-2.0
"""A job: the steps of a run, each with its command, nodes and processes."""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

import yaml

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_arguments
from bionemo.config.schema import RunConfig
from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.config.text_values import escape_interpolations
from bionemo.launch.shell import lines

MODULE = "bionemo.pretrain"
_PARTS = {"prepare": "do_preprocessing", "": "do_training", "test": "do_testing"}  # in the order of execution
_CLUSTER_OVERRIDE = re.compile(r"[+~]*cluster([.=@]|$)")


@dataclass(frozen=True)
class JobStep:
    """A part of a run, such as the training, that starts when the previous step has succeeded."""

    part: str  # suffix of the names of its files, after the name of the run; empty for the training
    nodes: int  # number of nodes
    tasks: int  # processes per node

    @property
    def overrides(self) -> list[str]:
        """Overrides that select this step only."""
        return [f"{key}={part == self.part}" for part, key in _PARTS.items()]


@dataclass(frozen=True)
class Job:
    """A run to be submitted."""

    name: str  # name of the run
    directory: Path  # directory for the job script; the run writes to `results` in it
    steps: tuple[JobStep, ...]  # steps in the order of execution
    accelerator: str  # `trainer.accelerator`
    resumes: bool  # whether the run writes checkpoints and resumes from them when it is started again
    max_time: float | None  # seconds after which the training stops; None without a limit
    arguments: tuple[str, ...]  # flags and overrides of the command line, without overrides of the cluster
    working_directory: Path  # the current directory, which relative paths refer to
    python: str  # path of the Python interpreter
    config_name: str  # name of the file of the resolved configuration
    config_text: str  # the resolved configuration, as YAML
    invocation: tuple[str, ...]  # the command line of `bionemo launch`

    @property
    def gpus(self) -> bool:
        """Whether the processes may use GPUs; `auto` uses them if there are any."""
        return self.accelerator != "cpu"

    @property
    def config_file(self) -> Path:
        """Path of the resolved configuration."""
        return self.directory / self.config_name

    @property
    def records(self) -> dict[Path, str]:
        """The resolved configuration and the command line, for clusters that share the file system."""
        program, *arguments = redact_arguments(list(self.invocation))
        words = program.split() if program.startswith("bionemo ") else [program]
        return {
            self.config_file: self.config_text,
            self.directory / "launcher_cmd.log": lines([words, *arguments]) + "\n",
        }

    def stem(self, step: JobStep) -> str:
        """Return the common prefix of the names of a step's files."""
        return f"{self.name}_{step.part}" if step.part else self.name

    def command(self, step: JobStep, python: str | None = None) -> list[list[str]]:
        """Return the command of a step, which reads the resolved configuration; one list per line."""
        return [
            [python or self.python, "-u", "-m", MODULE],
            [f"--config-path={self.config_file.parent}"],
            [f"--config-name={self.config_file.name}"],
            step.overrides,
        ]


class Cluster(Protocol):
    """A kind of cluster. `render` has no side effects; `submit` runs after its files have been written."""

    def render(self, job: Job) -> dict[Path, str]:
        """Return the content of the files that start a job, by path.

        Raises:
            UserError: if the cluster does not support a setting.
        """

    def submit(self, job: Job) -> int:
        """Submit the job and return an exit status.

        Raises:
            UserError: if it cannot be submitted. No step has been started then.
        """


def create_job(cfg: RunConfig, invocation: Sequence[str]) -> Job:
    """Create the job of a configuration.

    Raises:
        UserError: if the number of processes cannot be determined.
    """
    parts = [part for part, key in _PARTS.items() if getattr(cfg, key)] or ["prepare"]
    steps = [JobStep("prepare", 1, 1)] if "prepare" in parts else []
    if others := [part for part in parts if part != "prepare"]:
        tasks = cfg.trainer.device_count
        if not tasks:
            raise UserError(
                f"trainer.devices={cfg.trainer.devices}: set the number of devices per node, which is unknown here"
            )
        steps += [JobStep(part, cfg.trainer.num_nodes, tasks) for part in others]
    limit, directory = cfg.trainer.max_time, _directory(cfg)
    name, config_text = cfg.exp_manager.name or cfg.name, _config_text(cfg, directory)
    return Job(
        name=name,
        directory=directory,
        steps=tuple(steps),
        accelerator=cfg.trainer.accelerator,
        resumes=cfg.exp_manager.create_checkpoint_callback and cfg.exp_manager.resume_if_exists,
        max_time=None if limit is None else duration_in_seconds("trainer.max_time", limit),
        arguments=tuple(each for each in invocation[1:] if not _CLUSTER_OVERRIDE.match(each)),
        working_directory=Path.cwd(),
        python=sys.executable,
        config_name=_config_name(directory, name, config_text),
        config_text=config_text,
        invocation=tuple(invocation),
    )


def _directory(cfg: RunConfig) -> Path:
    """Return the directory of the job: exp_manager.exp_dir.

    UNIQUE_OUTPUT_DIR=1 adds a time to its parent: `results-20301224-180000-123456/gpt3_126m`.
    """
    directory = Path(cfg.exp_manager.exp_dir or f"nemo_experiments/{cfg.name}").absolute()
    if os.environ.get("UNIQUE_OUTPUT_DIR") == "1":
        now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        directory = directory.parent.with_name(f"{directory.parent.name}-{now}") / directory.name
    return directory


def _config_name(directory: Path, name: str, text: str) -> str:
    """Return a file name for the configuration; a queued job may still read an earlier file with other content."""
    path = directory / f"{name}_hydra.yaml"
    try:
        is_other = path.is_file() and path.read_text() != text
    except (OSError, ValueError):
        is_other = True
    return f"{name}_hydra_{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml" if is_other else path.name


def _config_text(cfg: RunConfig, directory: Path) -> str:
    """Return the resolved configuration as YAML. The run writes to `results` in the directory of the job."""
    manager = cfg.exp_manager
    if manager.explicit_log_dir in (None, manager.exp_dir):  # not set to another directory
        manager = replace(manager, exp_dir=str(directory), explicit_log_dir=str(directory / "results"))
    return yaml.safe_dump(escape_interpolations(asdict(replace(cfg, exp_manager=manager))), sort_keys=False)
