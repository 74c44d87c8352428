# SPDX-License-Identifier: Apache-2.0
"""Run the tasks of an evaluation in any number of processes, and store the result of each.

A result depends on its task and the model only. Tasks that have a result are not computed again, so an interrupted
evaluation continues where it ended, with any number of processes.
"""

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from bionemo.common.errors import UserError
from bionemo.common.files import create_owned, identity_of, without_nan, write_atomic
from bionemo.common.redaction import redact_text
from bionemo.common.regular import load_json
from bionemo.evaluation.tasks import LeftOut, Problems, Result, Suite, Task
from bionemo.inference.fingerprint import digest, model_fingerprint
from bionemo.inference.model import TrainedModel
from bionemo.inference.progress import Advance

_KIND = "an evaluation"  # of the output directory, see `create_owned`
_FORMAT = 3  # increase it when a code change alters results
_MAX_RESULT = 1 << 24  # bytes
_POLL_SECONDS = 0.2


class Results:
    """Results of tasks in the output directory: `SUITE/TASK.json`, and `SUITE/TASK.csv` if a task has a table.

    A result is valid as long as the model, the precision, the settings and files of the task, and `keep_going` are the
    same. With `keep_going`, a task that cannot be computed has a result, too: the error.

    Args:
        suites: suites by their names in the report.
        model: the model.
        output: directory of the results, one for each model.
        keep_going: leave out faulty rows and tasks, and count them.

    Attributes:
        tasks: tasks by the names of their results, such as `proteingym/A0A1I9GEU1_NEIME`.

    Raises:
        UserError: if the data of a suite cannot be used.
    """

    def __init__(self, suites: Mapping[str, Suite], model: TrainedModel, output: Path, keep_going: bool) -> None:
        self.output, self._model, self._keep_going = output.absolute(), model, keep_going
        self.tasks = {f"{name}/{task.name}": task for name, suite in suites.items() for task in suite.tasks()}
        self._suites = {name: suite.name for name, suite in suites.items()}
        network = model.network
        positions = network.config.max_position_embeddings
        model_digest = model_fingerprint(model.weights_checksum, positions, network.vocabulary)
        self._model_identity = {"model": model_digest, "precision": model.precision.name}
        self._checksums: dict[Path, str] = {}

    def assign(self, rank: int, ranks: int) -> list[str]:
        """Return the tasks of a process: the most expensive ones go first, each to the process with the least work."""
        costs, share = [0] * ranks, []
        for name, task in sorted(self.tasks.items(), key=lambda item: (-item[1].cost, item[0])):
            least = costs.index(min(costs))
            costs[least] += task.cost
            if least == rank:
                share.append(name)
        return share

    def prepare_output(self) -> None:
        """Create the output directory, or continue in that of an earlier evaluation of the same model.

        Raises:
            UserError: if the directory belongs to another model, or was not created by this project.
        """
        found = identity_of(self.output, _KIND)
        if found is None:
            create_owned(self.output, _KIND, self._model_identity)
        elif found != self._model_identity:
            raise UserError(
                f"{self.output} holds the evaluation of another model or precision: choose another --output"
            )

    def wait_for_output(self, timeout: float) -> None:
        """Wait until the first process has created the output directory.

        Raises:
            UserError: if it has not after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while identity_of(self.output, _KIND) != self._model_identity:
            if time.monotonic() > until:
                raise UserError(
                    f"{self.output} was not created within {timeout:.0f} s: check that all processes can access it"
                )
            time.sleep(_POLL_SECONDS)

    def run(self, names: Iterable[str], advance: Advance) -> None:
        """Compute the tasks that have no result yet.

        Args:
            names: tasks of this process.
            advance: called with the cost that was finished since the last call.

        Raises:
            UserError: if a task fails, unless `keep_going`.
            OSError: if a file cannot be read or written.
        """
        for name in names:
            if self._read(name) is None:
                self._run(name, self.tasks[name], advance)
            else:
                advance(self.tasks[name].cost)

    def wait(self, check_workers: Callable[[], object]) -> dict[str, Result]:
        """Wait until all tasks have a result, and return the results.

        `check_workers` is called regularly and raises an error if a process has failed.
        """
        found: dict[str, Result] = {}
        for name in self.tasks:
            while (result := self._read(name)) is None:
                check_workers()
                time.sleep(_POLL_SECONDS)
            found[name] = result
        return found

    def _read(self, name: str) -> Result | None:
        """Read a result; None if there is no valid one."""
        try:
            result = load_json(self._path(name, "json"), _MAX_RESULT)
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) and result.get("identity") == self._identity(name) else None

    def _run(self, name: str, task: Task, advance: Advance) -> None:
        problems, start = Problems(self._keep_going), time.monotonic()
        self._path(name, "json").parent.mkdir(exist_ok=True)
        result: Result = {"task": task.name, "identity": self._identity(name), "files": self._file_checksums(task)}
        try:
            found = task.run(self._model, problems, advance)
        except LeftOut as reason:
            result |= {"left_out": redact_text(str(reason))}
        except UserError as error:
            if not self._keep_going:
                raise
            result |= {"error": redact_text(str(error))}
        else:
            if found.table:
                write_atomic(self._path(name, "csv"), _to_csv(found.table))
            result |= {"metrics": found.metrics, **found.details}
        messages = [redact_text(text) for text in problems.messages]
        seconds = round(time.monotonic() - start, 3)
        result |= {"problems": problems.count, "messages": messages, "seconds": seconds}
        write_atomic(self._path(name, "json"), json.dumps(without_nan(result), indent=1) + "\n")

    def _identity(self, name: str) -> str:
        task, files = self.tasks[name], self._file_checksums(self.tasks[name])
        suite = self._suites[name.partition("/")[0]]
        return digest([_FORMAT, suite, task.name, task.settings, files, self._model_identity, self._keep_going])

    def _file_checksums(self, task: Task) -> list[tuple[str, str | None]]:
        """Return the name and XXH3-128 of each file of a task; None if there is no such file."""
        for file in task.files:
            if file not in self._checksums and file.is_file():
                self._checksums[file] = _checksum(file)
        return [(file.name, self._checksums.get(file)) for file in task.files]

    def _path(self, name: str, suffix: str) -> Path:
        return self.output / f"{name}.{suffix}"


def _checksum(path: Path) -> str:
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            content.update(block)
    return content.hexdigest()


def _to_csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
