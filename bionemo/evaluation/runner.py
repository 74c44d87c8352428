# SPDX-License-Identifier: Apache-2.0
"""Results of the tasks of an evaluation, which any number of processes compute and store."""

import json
import time
from pathlib import Path
from typing import ClassVar

import xxhash

from bionemo.analysis.files import write_table
from bionemo.common.errors import UserError
from bionemo.common.files import create_owned, identity_of, replacing, without_nan, write_atomic
from bionemo.common.redaction import redact_text
from bionemo.common.regular import load_json
from bionemo.evaluation.tasks import LeftOut, Problems, Result, Suite, Task
from bionemo.inference.fingerprint import digest, model_fingerprint
from bionemo.inference.model import TrainedModel
from bionemo.inference.processes import PartedWork
from bionemo.inference.progress import Advance

_FORMAT = 5  # increase it when a code change alters results
_MAX_RESULT = 1 << 24  # bytes


class Results(PartedWork):
    """Results of tasks in the output directory: `SUITE/TASK.json`, and `SUITE/TASK.csv` if a task has a table.

    A result is valid as long as the model, the precision, the settings and files of the task, and `keep_going` are the
    same. With `keep_going`, a task that cannot be computed has a result, too: the error.

    Args:
        suite: the suite.
        model: the model.
        output: directory of the results, one for each model.
        keep_going: leave out faulty rows and tasks, and count them.

    Raises:
        UserError: if the data of the suite cannot be used.
    """

    kind: ClassVar[str] = "an evaluation"
    unit: ClassVar[str] = "tasks"

    def __init__(self, suite: Suite, model: TrainedModel, output: Path, keep_going: bool) -> None:
        self.directory, self._suite, self._model, self._keep_going = output.absolute(), suite, model, keep_going
        self._tasks = suite.tasks()
        self.total = len(self._tasks)
        positions = model.network.config.max_position_embeddings
        model_digest = model_fingerprint(model.weights_checksum, positions, model.network.vocabulary)
        self.identity = {"model": model_digest, "precision": model.precision.name}
        self._checksums: dict[Path, str] = {}
        self._stored: dict[str, Result] = {}  # valid results that were read, by task

    def prepare(self) -> None:
        """Create the output directory, or continue in that of an earlier evaluation of the same model.

        Raises:
            UserError: if the directory belongs to another model, or was not created by this project.
        """
        found = identity_of(self.directory, self.kind)
        if found is None:
            create_owned(self.directory, self.kind, self.identity)
        elif found != self.identity:
            raise UserError(
                f"{self.directory} holds the evaluation of another model or precision: choose another --output"
            )

    def compute(self, rank: int, ranks: int, advance: Advance) -> None:
        """Compute the tasks of a rank that have no result yet, the most expensive ones first.

        Raises:
            UserError: if a task fails, unless `keep_going`.
            OSError: if a file cannot be read or written.
        """
        for task in sorted(self._tasks, key=lambda task: (-task.cost, task.name))[rank::ranks]:
            if self._read(task) is None:
                self._run(task)
            advance(1)

    def count_missing(self) -> int:
        """Return the number of tasks without a result."""
        return len(self._tasks) - len(self.found())

    def found(self) -> list[Result]:
        """Return the results that are stored, in the order of the tasks."""
        return [result for task in self._tasks if (result := self._read(task)) is not None]

    def _read(self, task: Task) -> Result | None:
        """Read a result, once; None if there is no valid one."""
        if task.name not in self._stored and (found := self._read_file(task)) is not None:
            self._stored[task.name] = found
        return self._stored.get(task.name)

    def _read_file(self, task: Task) -> Result | None:
        try:
            result = load_json(self._path(task, "json"), _MAX_RESULT)
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) and result.get("identity") == self._identity(task) else None

    def _run(self, task: Task) -> None:
        problems, start = Problems(self._keep_going), time.monotonic()
        self._path(task, "json").parent.mkdir(exist_ok=True)
        result: Result = {"task": task.name, "identity": self._identity(task), "files": self._file_checksums(task)}
        try:
            found = task.run(self._model, problems)
        except LeftOut as reason:
            result |= {"left_out": redact_text(str(reason))}
        except UserError as error:
            if not self._keep_going:
                raise
            result |= {"error": redact_text(str(error))}
        else:
            if found.table:
                with replacing(self._path(task, "csv")) as new:
                    write_table(new, found.table[0], found.table[1:])
            result |= {"metrics": found.metrics, **found.details}
        messages = [redact_text(text) for text in problems.messages]
        seconds = round(time.monotonic() - start, 3)
        result |= {"problems": problems.count, "messages": messages, "seconds": seconds}
        write_atomic(self._path(task, "json"), json.dumps(without_nan(result), indent=1) + "\n")

    def _identity(self, task: Task) -> str:
        files = self._file_checksums(task)
        return digest([_FORMAT, self._suite.name, task.name, task.settings, files, self.identity, self._keep_going])

    def _file_checksums(self, task: Task) -> list[tuple[str, str | None]]:
        """Return the name and XXH3-128 of each file of a task; None if there is no such file."""
        for path in task.files:
            if path not in self._checksums and path.is_file():
                with path.open("rb") as file:
                    content = xxhash.xxh3_128()
                    while block := file.read(1 << 20):
                        content.update(block)
                self._checksums[path] = content.hexdigest()
        return [(path.name, self._checksums.get(path)) for path in task.files]

    def _path(self, task: Task, suffix: str) -> Path:
        return self.directory / self._suite.name / f"{task.name}.{suffix}"
