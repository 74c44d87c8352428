# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep (`--multirun`): one after the other in this process, whether or not earlier ones fail."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from bionemo.common.console import notify, report_error
from bionemo.common.launcher_environment import is_global_rank_zero, launched_process
from bionemo.common.redaction import redact_arguments
from bionemo.config.compose import compose_typed
from bionemo.config.directories import check_different_directories, directory_overrides, log_directory
from bionemo.config.paths import ConfigSource


class Job(NamedTuple):
    """A run of a sweep: its overrides, its checked configuration and notes for the user."""

    overrides: list[str]
    config: Any
    notes: list[str]


def check_jobs(source: ConfigSource, sweep: Sequence[list[str]], schema: type) -> list[Job]:
    """Compose and check all runs of a sweep; runs with the same directory get different ones.

    Raises:
        UserError: if a configuration is invalid, or two runs write to the same directory.
    """
    jobs = [Job(overrides, *compose_typed(source, overrides, schema)) for overrides in sweep]
    if not all(hasattr(job.config, "exp_manager") for job in jobs):
        return jobs
    added = directory_overrides(sweep, [job.config.exp_manager for job in jobs])
    if any(added):
        sweep = [job + more for job, more in zip(sweep, added, strict=True)]
        jobs = [Job(overrides, *compose_typed(source, overrides, schema)) for overrides in sweep]
    check_different_directories([job.config.exp_manager for job in jobs])
    return jobs


def run_jobs(task: Callable[[Any], Any], jobs: Sequence[Job], location: Sequence[str], interrupted: list[int]) -> None:
    """Run all jobs and print a table of their results; exit with status 1 if one has failed.

    Args:
        task: receives a configuration; returns the metrics of the run, or None.
        jobs: the runs.
        location: arguments that select the configuration file.
        interrupted: not empty if SIGINT has arrived, which ends the sweep.
    """
    results: list[Mapping[str, float] | None] = []
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    for number, job in enumerate(jobs, 1):
        own = [text.lstrip("+") for text in redact_arguments(job.overrides) if text not in shared]
        own = [text for text in own if not text.startswith("exp_manager.")] or own
        notify(f"run {number} of {len(jobs)}: {' '.join(own)}", *job.notes)
        try:
            with command_line([*location, *job.overrides]):
                results.append(task(job.config) or {})
        except SystemExit as end:
            if end.code != 1:  # a signal ends the sweep
                raise
            results.append(None)  # the error has been printed
        except Exception as error:
            if interrupted or os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            report_error(error)
            results.append(None)
        if results[-1] is None and number < len(jobs) and _has_launcher():
            notify(f"runs {number + 1} to {len(jobs)} are not started, because the launcher ends all processes after "
                   "an error: start each with a command of its own")  # fmt: skip
            break
        gc.collect()  # the memory and the process groups of this run
    if is_global_rank_zero():
        print(_table(jobs[: len(results)], results), end="", file=sys.stderr)
    if None in results:
        sys.exit(1)


def _has_launcher() -> bool:
    """Return whether a launcher started several processes, some of which may have ended with the failed run."""
    process = launched_process()
    return process is not None and process.world_size != 1


def _table(jobs: Sequence[Job], results: Sequence[Mapping[str, float] | None]) -> str:
    """Return a table with the values that differ, the metrics and the directory of each run."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    own = [dict(text.lstrip("+").partition("=")[::2] for text in redact_arguments(job.overrides)) for job in jobs]
    common = {text.lstrip("+").partition("=")[0] for text in shared}
    keys = [key for key in own[0] if key not in common and not key.startswith("exp_manager.")]
    names = list(dict.fromkeys(name for result in results if result for name in result))
    rows = [["run", *keys, "result", *names, "directory"]]
    for number, (job, values, result) in enumerate(zip(jobs, own, results, strict=True), 1):
        found = [f"{result[name]:.4f}" if result and name in result else "" for name in names]
        path = log_directory(job.config.exp_manager) if hasattr(job.config, "exp_manager") else None
        directory = str(path) if path and path.exists() else ""
        outcome = "failed" if result is None else "done"
        rows.append([str(number), *(values.get(key, "") for key in keys), outcome, *found, directory])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Set the arguments in sys.argv: Lightning starts the same command line for other devices."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before
