# SPDX-License-Identifier: Apache-2.0
"""What is to be started: the stages of a run, each a command for so many processes."""

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
from bionemo.config.durations import seconds
from bionemo.config.permissions import TRUST
from bionemo.config.references import as_literals
from bionemo.config.schema import RunConfig
from bionemo.launch.shell import lines

MODULE = "bionemo.pretrain"
_PARTS = {"prepare": "do_preprocessing", "": "do_training", "test": "do_testing"}  # in the order of the stages
_OF_CLUSTER = re.compile(r"[+~]*cluster([.=@]|$)")


@dataclass(frozen=True)
class Stage:
    """A part of a run that is started by itself, once the one before it has ended well.

    Attributes:
        part: behind the run's name in the names of its files; the training's is empty.
        nodes: machines.
        tasks: processes on each.
    """

    part: str
    nodes: int
    tasks: int

    @property
    def words(self) -> list[str]:
        """What tells the run's command to do this part and no other."""
        return [f"{key}={part == self.part}" for part, key in _PARTS.items()]


@dataclass(frozen=True)
class Job:
    """A run, as whoever starts it has to know it.

    Attributes:
        name: of the run.
        directory: for what starts it; what it writes itself goes into `results` there.
        stages: in order.
        accelerator: `trainer.accelerator`.
        goes_on: whether it writes checkpoints, and goes on from them when it is started again.
        max_time: seconds after which the training ends by itself; None: there is no such limit.
        words: of its command line, less those about the cluster.
        here: the directory that relative paths are of.
        python: the interpreter that has this package.
        text: its whole configuration, as YAML.
        invocation: what was typed.
    """

    name: str
    directory: Path
    stages: tuple[Stage, ...]
    accelerator: str
    goes_on: bool
    max_time: float | None
    words: tuple[str, ...]
    here: Path
    python: str
    text: str
    invocation: tuple[str, ...]

    @property
    def gpus(self) -> bool:
        """Whether its processes compute on GPUs; auto takes them where there are any."""
        return self.accelerator != "cpu"

    @property
    def settings(self) -> Path:
        """The file with its whole configuration."""
        return self.directory / f"{self.name}_hydra.yaml"

    @property
    def records(self) -> dict[Path, str]:
        """Files that say what was asked for, where the machines see the same directory as this one."""
        return {
            self.settings: self.text,
            self.directory / "launcher_cmd.log": lines(redact_arguments(list(self.invocation))) + "\n",
        }

    def stem(self, stage: Stage) -> str:
        """What the names of a stage's files have in common."""
        return f"{self.name}_{stage.part}" if stage.part else self.name

    def command(self, stage: Stage, python: str | None = None) -> list[list[str]]:
        """What does a stage, from the file of the configuration: its words, line by line."""
        return [
            [python or self.python, "-u", "-m", MODULE],
            [f"--config-path={self.settings.parent}"],
            [f"--config-name={self.settings.name}", TRUST],  # its values were checked when it was made
            stage.words,
        ]


class Cluster(Protocol):
    """A kind of cluster: `render` writes nothing and asks nobody, `submit` does the rest."""

    def render(self, job: Job) -> dict[Path, str]:
        """Give the files that start a job, and their content.

        Raises:
            UserError: for what cannot be said to this cluster.
        """

    def submit(self, job: Job) -> int:
        """Start it, its files being there; the exit status of what has been awaited.

        Raises:
            UserError: when it cannot be started. Nothing of it has been, then.
        """


def job_of(cfg: RunConfig, invocation: Sequence[str]) -> Job:
    """Work out what has to be started.

    Args:
        cfg: the run's configuration.
        invocation: the command line that made it.

    Raises:
        UserError: when the number of processes is not known here.
    """
    parts = [part for part, key in _PARTS.items() if getattr(cfg, key)] or ["prepare"]
    stages = [Stage("prepare", 1, 1)] if "prepare" in parts else []
    if others := [part for part in parts if part != "prepare"]:
        tasks = _devices(cfg.trainer.devices)
        stages += [Stage(part, cfg.trainer.num_nodes, tasks) for part in others]
    limit, directory = cfg.trainer.max_time, _directory(cfg)
    return Job(
        name=cfg.exp_manager.name or cfg.name,
        directory=directory,
        stages=tuple(stages),
        accelerator=cfg.trainer.accelerator,
        goes_on=cfg.exp_manager.create_checkpoint_callback and cfg.exp_manager.resume_if_exists,
        max_time=None if limit is None else seconds("trainer.max_time", limit),
        words=tuple(word for word in invocation[1:] if not _OF_CLUSTER.match(word)),
        here=Path.cwd(),
        python=sys.executable,
        text=_text(cfg, directory),
        invocation=tuple(invocation),
    )


def _directory(cfg: RunConfig) -> Path:
    """Where what starts a run is put: exp_manager.exp_dir; with UNIQUE_OUTPUT_DIR=1 below another one every time.

    That is `results-20301224-180000-123456/gpt3_126m` instead of `results/gpt3_126m`.
    """
    directory = Path(cfg.exp_manager.exp_dir or f"nemo_experiments/{cfg.name}").expanduser().absolute()
    if os.environ.get("UNIQUE_OUTPUT_DIR") == "1":
        now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        directory = directory.parent.with_name(f"{directory.parent.name}-{now}") / directory.name
    return directory


def _text(cfg: RunConfig, directory: Path) -> str:
    """The configuration with nothing left to compose; the run writes below the directory of what starts it."""
    manager = cfg.exp_manager
    if manager.explicit_log_dir in (None, manager.exp_dir):  # nobody wants it elsewhere
        manager = replace(manager, exp_dir=str(directory), explicit_log_dir=str(directory / "results"))
    return yaml.safe_dump(as_literals(asdict(replace(cfg, exp_manager=manager))), sort_keys=False)


def _devices(devices: int | str | list[int]) -> int:
    count = len(devices) if isinstance(devices, list) else devices
    if not isinstance(count, int) or count < 1:
        raise UserError(f"trainer.devices={devices}: give the number of devices of each node: it is not known here")
    return count
