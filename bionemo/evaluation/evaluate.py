# SPDX-License-Identifier: Apache-2.0
"""`bionemo.evaluate`: run a suite in one process, or in one of several."""

from pathlib import Path
from typing import Any

from bionemo.common.lock import run_lock
from bionemo.evaluation.report import Report, write_report
from bionemo.evaluation.runner import Results
from bionemo.evaluation.suites import open_suite
from bionemo.evaluation.tasks import Suite
from bionemo.inference.model import TrainedModel
from bionemo.inference.processes import compute_first_rank


def evaluate(
    model: TrainedModel, suite: str, data: str | Path, *, output: str | Path, keep_going: bool = False, **settings: Any
) -> Report:
    """Evaluate a model and write report.json and report.html.

    Tasks that already have a result in `output` are not computed again.

    Args:
        model: a model, as `bionemo.load` returns it.
        suite: `proteingym`, `flip`, `contacts`, `loss` or `moleculenet`.
        data: data of the suite.
        output: directory of the results.
        keep_going: leave out faulty rows and tasks, and count them.
        settings: settings of the suite, such as `method="wild-type-marginal"`.

    Returns:
        The content of report.json.

    Raises:
        UserError: if the data, a setting or the output cannot be used, or a task fails, unless `keep_going`.
    """
    opened = open_suite(suite, Path(data).expanduser(), settings)
    results = Results(opened, model, Path(output).expanduser(), keep_going)
    return run_first_process(results, model, opened)


def run_first_process(
    results: Results, model: TrainedModel, suite: Suite, processes: int = 1, ranks: int = 1
) -> Report:
    """Run the tasks of rank 0, wait for those of other ranks, and write the report.

    Args:
        results: results of all tasks.
        model: the model.
        suite: the suite.
        processes: number of processes on this machine, of which this one starts the others.
        ranks: number of processes on all machines.

    Raises:
        UserError: as in `evaluate`.
    """
    output = results.directory
    with run_lock(output.parent, f".{output.name}.lock"):
        results.prepare()
        compute_first_rank(results, suite.name, ranks, processes)
        return write_report(output, model, suite, results.found())
