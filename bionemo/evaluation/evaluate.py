# SPDX-License-Identifier: Apache-2.0
"""`bionemo.evaluate`: run suites in one process, or in one of several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bionemo.common.errors import HostError, RankError, reraise_as
from bionemo.common.lock import run_lock
from bionemo.evaluation.report import Report, write_report
from bionemo.evaluation.runner import Results
from bionemo.evaluation.suites import open_suites
from bionemo.evaluation.tasks import Suite
from bionemo.inference.model import TrainedModel
from bionemo.inference.progress import no_progress, progress_bar
from bionemo.launch.spawn import spawn_local_workers

_TIMEOUT = 600.0  # seconds until the output directory of the first process must exist


def evaluate(
    model: TrainedModel, suite: str, data: str | Path | None = None, *, output: str | Path, keep_going: bool = False,
    **settings: Any,
) -> Report:  # fmt: skip
    """Evaluate a model and write report.json and report.html.

    Tasks that already have a result in `output` are not computed again.

    Args:
        model: a model, as `bionemo.load` returns it.
        suite: `proteingym`, `flip`, `contacts`, `loss` or `moleculenet`; `all`, for each suite with a folder of its
            name in `data`; or a YAML file with a list of suites.
        data: data of the suite, or their folder; None for a YAML file.
        output: directory of the results.
        keep_going: leave out faulty rows and tasks, and count them.
        settings: settings of the suite, such as `method="wild-type-marginal"`.

    Returns:
        The content of report.json.

    Raises:
        UserError: if the data, a setting or the output cannot be used, or a task fails, unless `keep_going`.
    """
    suites = open_suites(str(suite), None if data is None else Path(data).expanduser(), settings)
    results = Results(suites, model, Path(output).expanduser(), keep_going)
    return run_first_process(results, model, suites)


def run_first_process(
    results: Results, model: TrainedModel, suites: Mapping[str, Suite], processes: int = 1, ranks: int = 1
) -> Report:
    """Run the tasks of rank 0, wait for those of other ranks, and write the report.

    Args:
        results: results of all tasks.
        model: the model.
        suites: suites by their names in the report.
        processes: number of processes on this machine, of which this one starts the others.
        ranks: number of processes on all machines.

    Raises:
        UserError: as in `evaluate`.
    """
    share = results.assign(0, ranks)
    with run_lock(results.output.parent, f".{results.output.name}.lock"):
        results.prepare_output()
        with spawn_local_workers(processes) as check_workers:
            total = sum(results.tasks[name].cost for name in share)
            with progress_bar(" ".join(suites), total, "residues") as advance:

                def advance_and_check(count: int) -> None:
                    check_workers()
                    advance(count)

                results.run(share, advance_and_check)
            found = results.wait(check_workers)
        return write_report(results.output, model, suites, found)


def run_other_process(results: Results, rank: int, ranks: int, error_class: type[HostError]) -> None:
    """Run the tasks of a rank that is not the first.

    Raises:
        HostError: of this class, if the output directory is not created in time.
        RankError: if a task fails.
    """
    with reraise_as(error_class):
        results.wait_for_output(_TIMEOUT)
    with reraise_as(RankError):
        results.run(results.assign(rank, ranks), no_progress)
