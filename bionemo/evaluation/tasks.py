# SPDX-License-Identifier: Apache-2.0
"""Suites and tasks of an evaluation. A task computes its metrics independently of all other tasks."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bionemo.common.errors import UserError
from bionemo.inference.model import TrainedModel

_MAX_LISTED = 20  # problems in a result
_FILE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)


class LeftOut(Exception):
    """A task that is left out, counted and named, because it has nothing to evaluate; the message says why."""


@dataclass
class Problems:
    """Faulty rows of input files: the first one ends the task, unless `keep_going`.

    Attributes:
        keep_going: leave out faulty rows and count them.
        count: number of faulty rows.
        messages: the first messages.
    """

    keep_going: bool
    count: int = 0
    messages: list[str] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Record a UserError of the block instead of raising it, if `keep_going`."""
        try:
            yield
        except UserError as error:
            if not self.keep_going:
                raise
            self.count += 1
            if len(self.messages) < _MAX_LISTED:
                self.messages.append(str(error))


@dataclass(frozen=True)
class TaskResult:
    """Result of a task.

    Attributes:
        metrics: figures to compare models by.
        details: further JSON values for the report.
        table: rows of a CSV file, the header first; empty: none.
    """

    metrics: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    table: Sequence[Sequence[Any]] = ()


def is_file_name(name: str) -> bool:
    """Return whether a name from a file can be part of a path: letters, digits, '_', '-' and inner '.'."""
    return bool(_FILE_NAME.fullmatch(name))


Result = dict[str, Any]
"""Stored result of a task: JSON values, see `runner.py`."""


@dataclass(frozen=True)
class Task(ABC):
    """A task. Its suite, name, files and settings identify the result; see `runner.py`.

    Attributes:
        name: name within the suite, which is also a file name.
        files: input files.
        settings: JSON values that determine the result, besides the model and the files.
        cost: estimated duration, in a unit that all tasks of a suite share.
    """

    name: str
    files: list[Path]
    settings: dict[str, Any]
    cost: int

    @abstractmethod
    def run(self, model: TrainedModel, problems: Problems) -> TaskResult:
        """Compute the result.

        Args:
            model: the model; it must not be changed.
            problems: receives faulty rows.

        Raises:
            LeftOut: if there is nothing to evaluate.
            UserError: if the model or the files cannot be used.
        """


@dataclass(frozen=True)
class Suite(ABC):
    """A suite of tasks. The fields of a subclass are its settings, which are options of the command line.

    Attributes:
        name: name on the command line.
        about: what its figures are, for the page.
        data: directory or file that the user provides.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    data: Path

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """Return the tasks.

        Raises:
            UserError: if the data cannot be used, or a setting is invalid.
        """

    @abstractmethod
    def summarize(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the summary of all results, as JSON values; the page has a row for each dictionary of numbers in it.

        Args:
            results: results of the tasks that did not fail.

        Raises:
            UserError: if the data cannot be used.
        """

    @staticmethod
    @abstractmethod
    def describe(summary: Mapping[str, Any]) -> list[str]:
        """Return the lines of a summary for the console."""
