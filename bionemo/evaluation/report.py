# SPDX-License-Identifier: Apache-2.0
"""Reports: of one model, as JSON and HTML, and of several models, as HTML. All suites have the same page."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.common.files import without_nan, write_atomic
from bionemo.common.redaction import redact_text
from bionemo.common.regular import load_json
from bionemo.common.version import __version__
from bionemo.evaluation.html import format_mean, html_page, html_table
from bionemo.evaluation.suites import SUITES
from bionemo.evaluation.tasks import Result, Suite
from bionemo.inference.fingerprint import digest, provenance
from bionemo.inference.model import TrainedModel

JSON_NAME, PAGE_NAME = "report.json", "report.html"
_MAX_REPORT = 1 << 28  # bytes
_MAX_NAMED = 5  # tasks in a line on the console; the report has all
_NOT_SHOWN = ("task", "identity", "problems", "seconds")  # of a task, in the page
Report = dict[str, Any]
"""The content of report.json: `model`, `model_fingerprint`, `precision`, `versions` and `suites`, the evaluated suite
by its name. It has its `suite`, `data`, `settings` and `summary`, the `results` of its tasks with the checksums of
their files, a `checksum` of all files, the names of the tasks that `failed`, why tasks were `left_out`, and the number
of `faulty_rows`."""


def write_report(output: Path, model: TrainedModel, suite: Suite, found: Sequence[Result]) -> Report:
    """Write report.json and report.html.

    Args:
        output: directory of the evaluation.
        model: the model.
        suite: the suite.
        found: results of all tasks, see `Results`.

    Raises:
        UserError: if the suite cannot be summarized.
        OSError: if a file cannot be written.
    """
    settings = asdict(suite)
    section = {
        "suite": suite.name,
        "data": redact_text(str(settings.pop("data"))),
        "settings": settings,
        "summary": suite.summarize([result for result in found if "metrics" in result]),
        "checksum": digest({result["task"]: result["files"] for result in found}),
        "failed": [result["task"] for result in found if "error" in result],
        "left_out": [result["left_out"] for result in found if "left_out" in result],
        "faulty_rows": sum(result["problems"] for result in found),
        "results": found,
    }
    report: Report = without_nan({
        "model": redact_text(str(model.path)),
        "model_fingerprint": provenance(model, {})["model_fingerprint"],
        "precision": model.precision.name,
        "versions": {"bionemo": __version__, "torch": version("torch"), "python": platform.python_version()},
        "suites": {suite.name: section},
    })  # fmt: skip
    write_atomic(output / JSON_NAME, json.dumps(report, indent=1) + "\n")
    write_atomic(output / PAGE_NAME, render_reports({report["model"]: report}))
    return report


def read_report(directory: Path) -> Report:
    """Read report.json.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    path = directory / JSON_NAME
    try:
        report = load_json(path, _MAX_REPORT)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give directories of `bionemo evaluate`") from error
    except ValueError as error:
        raise UserError(f"{path} is not a report of `bionemo evaluate` ({error})") from error
    if not isinstance(report, dict) or not isinstance(report.get("suites"), dict):
        raise UserError(f"{path} is not a report of `bionemo evaluate`: run the evaluation again")
    return report


def render_reports(reports: Mapping[str, Report]) -> str:
    """Return an HTML page that shows a model, or compares several; the keys are the names of the models.

    Raises:
        UserError: if a report is damaged.
    """
    try:
        return html_page(next(iter(reports)) if len(reports) == 1 else "Comparison of models", _render(reports))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"a report of {', '.join(reports)} is damaged, or of another version: run the evaluation again"
        ) from error


def _render(reports: Mapping[str, Report]) -> list[str]:
    parts = []
    for name, report in reports.items():
        versions = ", ".join(f"{key} {value}" for key, value in report["versions"].items())
        text = f"{name}: {report['model']}, precision {report['precision']}, {versions}."
        parts.append(f"<p>{escape(text)}</p>")
    for suite in dict.fromkeys(suite for report in reports.values() for suite in report["suites"]):
        sections = {name: report["suites"][suite] for name, report in reports.items() if suite in report["suites"]}
        parts += [f"<h2>{escape(suite)}</h2>", f"<p>{escape(SUITES[suite].about)}</p>"]
        tables: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
        for name, section in sections.items():
            settings = "".join(f", {key}={value}" for key, value in section["settings"].items())
            text = f"{name}: data {section['data']} (checksum {section['checksum']}){settings}."
            parts += [f"<p>{escape(text)}</p>", *_left_out(name, section)]
            for (*title, row), cells in _summary_rows(section["summary"], ()):
                tables.setdefault(" ".join(title), []).append((row, name, cells))
        for name, section in sections.items():
            for task in section["results"]:
                known = {**task.get("metrics", {}), **task}
                cells = {
                    key: x for key, x in known.items() if key not in _NOT_SHOWN and not isinstance(x, list | dict)
                }
                tables.setdefault("tasks", []).append((task["task"], name, cells))
        parts += [_table(title, rows) for title, rows in tables.items()]
    return parts


def _summary_rows(
    summary: Mapping[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the keys that lead to a row and its cells. A row is a dictionary with numbers, or a single text."""
    if any(not isinstance(value, dict | str | list) or _is_mean(value) for value in summary.values()):
        yield place, _flatten(summary)
        return
    for key, value in summary.items():
        if isinstance(value, dict):
            yield from _summary_rows(value, (*place, key))
        elif value:
            yield (*place, key), {"": value}


def _is_mean(value: Any) -> bool:
    """Return whether a value is a list of a mean and its standard deviation."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], str)


def _flatten(cells: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in cells.items():
        found |= _flatten(value, f"{prefix}{key} ") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _table(title: str, rows: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return a table with a row for each name and model, in the order of the names."""
    order = list(dict.fromkeys(name for name, _, _ in rows))
    columns = dict.fromkeys(column for *_, cells in rows for column in cells)
    lines = [
        [name, model, *(_format(cells.get(column)) for column in columns)]
        for name, model, cells in sorted(rows, key=lambda row: order.index(row[0]))
    ]
    return f"<h3>{escape(title)}</h3>" + html_table(["", "model", *columns], lines)


def _format(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.4g}"
        case int():
            return f"{value:,}"
        case list():
            return format_mean(value) if _is_mean(value) else ", ".join(value)
    return str(value)


def _left_out(model: str, section: Mapping[str, Any]) -> list[str]:
    """Return a list of what could not be evaluated, and notes about the data."""
    messages = dict.fromkeys(
        f"{result['task']}: {text}"
        for result in section["results"]
        for text in (result.get("error"), result.get("left_out"), *result["messages"])
        if text
    )
    if not messages:
        return []
    items = "".join(f"<li>{escape(text)}</li>" for text in messages)
    counts = (
        f"{len(section['failed']):,} tasks failed, {len(section['left_out']):,} tasks and "
        f"{section['faulty_rows']:,} faulty rows were left out"
    )
    return [f"<p>{escape(model)}: {counts}.</p><ul>{items}</ul>"]


def describe_report(report: Report, output: Path) -> list[str]:
    """Return lines for the console: the summaries, and what was left out."""
    lines: list[str] = []
    for name, section in report["suites"].items():
        lines += SUITES[name].describe(section["summary"])
        errors = [f"{result['task']}: {result['error']}" for result in section["results"] if "error" in result]
        skipped, faulty = section["left_out"], section["faulty_rows"]
        left_out = f", {len(errors):,} failed ({'; '.join(errors[:_MAX_NAMED])})" if errors else ""
        left_out += f", {len(skipped):,} left out ({'; '.join(skipped[:_MAX_NAMED])})" if skipped else ""
        left_out += f", {faulty:,} faulty rows left out" if faulty else ""
        lines.append(f"{name}: {len(section['results']) - len(errors) - len(skipped):,} tasks{left_out}")
    return [*lines, f"report: {output / PAGE_NAME}"]
