# SPDX-License-Identifier: Apache-2.0
"""Files in the directory of a pretraining run: TensorBoard events, config.yaml, command line, log, checkpoints."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_arguments, redact_text, redact_tree
from bionemo.evaluation import event_files
from bionemo.evaluation.event_files import EventFile, Scalars

_MESSAGE = re.compile(r"\[NeMo [IWE] (\S+ \S+) (\w+):\d+\] (.*)")


@dataclass(frozen=True)
class Run:
    """Directory of a run, the parent of its checkpoints."""

    path: Path
    name: str  # unique in a report

    @cached_property
    def events(self) -> list[EventFile]:
        """Event files of the processes, the first process first; those without values are left out."""
        files = [event_files.read_events(path) for path in self._find(event_files.PATTERN)]
        return sorted((each for each in files if each.scalars or each.problem), key=lambda each: each.begin)

    @cached_property
    def scalars(self) -> dict[str, Scalars]:
        """Values by metric."""
        tags = dict.fromkeys(tag for file in self.events for tag in file.scalars)
        return {
            tag: event_files.join([file.scalars[tag] for file in self.events if tag in file.scalars]) for tag in tags
        }

    @cached_property
    def config(self) -> dict[str, Any]:
        """Values of config.yaml by key; empty without this file."""
        path = self.path / "config.yaml"
        try:
            found = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return flatten(redact_tree(found)) if isinstance(found, dict) else {}

    @cached_property
    def command(self) -> str:
        """The last command line, or ""."""
        files = [path for path in self._find("cmd-args.log") if path.parent == self.path]
        words = files[0].read_text("utf-8", errors="replace").strip().split(" ") if files else []
        return " ".join(redact_arguments(words))

    @cached_property
    def messages(self) -> list[tuple[str, str]]:
        """Time and text of the messages of our loggers, of all processes of rank 0."""
        found = []
        for path in self._find("nemo_log_globalrank-0_*.txt"):
            for line in path.read_text("utf-8", errors="replace").splitlines():
                match = _MESSAGE.match(line)
                if match and match[2] != "exp_manager":
                    found.append((match[1], redact_text(match[3])))
        return sorted(found)

    @cached_property
    def checkpoints(self) -> list[tuple[str, float]]:
        """Name of each complete checkpoint and the time when it was written, in seconds since 1970."""
        found = []
        for path in (self.path / "checkpoints").glob("*/manifest.json"):
            with suppress(FileNotFoundError):  # a running process has replaced the checkpoint
                found.append((path.parent.name, path.stat().st_mtime))
        return sorted(found, key=lambda each: each[1])

    @property
    def problems(self) -> Iterator[str]:
        """What is missing or damaged."""
        if not self.events:
            yield "no event files with values: there are no curves (exp_manager.create_tensorboard_logger)"
        for file in self.events:
            if file.problem:
                yield f"{file.path.name}: {file.problem}; the values before it are shown"
        if not self.config:
            yield "config.yaml is missing or damaged"
        if not self.messages:
            yield "no log of rank 0 (nemo_log_globalrank-0_*.txt)"

    def _find(self, pattern: str) -> list[Path]:
        """Return files of the run; NeMo moves those of earlier processes to run_0, run_1 and so on."""
        return sorted(path for place in (pattern, f"run_[0-9]*/{pattern}") for path in self.path.glob(place))


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in these directories, named by the shortest distinct ends of their paths.

    Raises:
        UserError: if a directory does not exist, or is not that of a run.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"{path} is not a directory: give the directory of a run, which contains config.yaml")
        if not any((path / name).exists() for name in ("config.yaml", "checkpoints", "cmd-args.log")) and not any(
            path.glob(event_files.PATTERN)
        ):
            raise UserError(
                f"{path} is not the directory of a run: it contains neither config.yaml nor event files of TensorBoard"
            )
        full = path.resolve()
        if full not in [run.path for run in runs]:
            runs.append(Run(full, ""))
    depth = 1
    while depth < 20 and len({run.path.parts[-depth:] for run in runs}) < len(runs):
        depth += 1
    return [Run(run.path, "/".join(run.path.parts[-depth:])) for run in runs]


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
