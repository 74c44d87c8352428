# SPDX-License-Identifier: Apache-2.0
"""Reports: of one model, as JSON and HTML, and of several models, as HTML."""

import json
import platform
from collections.abc import Mapping
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
from bionemo.evaluation.html import html_page
from bionemo.evaluation.suites import SUITES
from bionemo.evaluation.tasks import Result, Suite
from bionemo.inference.fingerprint import digest
from bionemo.inference.model import TrainedModel

JSON_NAME, PAGE_NAME = "report.json", "report.html"
_MAX_REPORT = 1 << 28  # bytes
_MAX_NAMED = 5  # tasks in a line on the console; the report has all
Report = dict[str, Any]
"""The content of report.json: `model`, `precision`, `versions` and `suites`. Each suite has its `suite`, `data`,
`settings` and `summary`, the `results` of its tasks with the checksums of their files, a `checksum` of all files, the
names of the tasks that `failed`, why tasks were `left_out`, and the number of `faulty_rows`."""


def write_report(
    output: Path, model: TrainedModel, suites: Mapping[str, Suite], results: Mapping[str, Result]
) -> Report:
    """Write report.json and report.html.

    Args:
        output: directory of the evaluation.
        model: the model.
        suites: suites by their names in the report.
        results: results of all tasks, see `Results`.

    Raises:
        UserError: if a suite cannot be summarized.
        OSError: if a file cannot be written.
    """
    sections = {}
    for name, suite in suites.items():
        found = [result for task, result in results.items() if task.partition("/")[0] == name]
        settings = asdict(suite)
        sections[name] = {
            "suite": suite.name,
            "data": redact_text(str(settings.pop("data"))),
            "settings": {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()},
            "summary": suite.summarize([result for result in found if "metrics" in result]),
            "checksum": digest({result["task"]: result["files"] for result in found}),
            "failed": [result["task"] for result in found if "error" in result],
            "left_out": [result["left_out"] for result in found if "left_out" in result],
            "faulty_rows": sum(result["problems"] for result in found),
            "results": found,
        }
    report: Report = without_nan({
        "model": redact_text(str(model.path)),
        "precision": model.precision.name,
        "versions": {"bionemo": __version__, "torch": version("torch"), "python": platform.python_version()},
        "suites": sections,
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
        text = f"{name}: {report['model']}, " if len(reports) > 1 else ""
        parts.append(f"<p>{escape(text)}precision {escape(report['precision'])}, {escape(versions)}.</p>")
    for name in dict.fromkeys(name for report in reports.values() for name in report["suites"]):
        sections = {}
        parts.append(f"<h2>{escape(name)}</h2>")
        for model, report in reports.items():
            if section := report["suites"].get(name):
                complete = [result for result in section["results"] if "metrics" in result]
                sections[model] = {**section, "results": complete}
                prefix = f"{model}: " if len(reports) > 1 else ""
                settings = "".join(f", {key}={value}" for key, value in section["settings"].items())
                text = f"{prefix}data {section['data']} (checksum {section['checksum']}){settings}."
                parts += [f"<p>{escape(text)}</p>", *_left_out(model, section)]
        if len(kinds := {section["suite"] for section in sections.values()}) > 1:
            raise ValueError(name)
        if any(section["results"] for section in sections.values()):
            parts += SUITES[kinds.pop()].render(sections)
    return parts


def _left_out(model: str, section: Mapping[str, Any]) -> list[str]:
    """Return a list of what could not be evaluated."""
    messages = [
        f"{result['task']}: {text}"
        for result in section["results"]
        for text in (result.get("error"), result.get("left_out"), *result["messages"])
        if text
    ]
    if not messages:
        return []
    items = "".join(f"<li>{escape(text)}</li>" for text in messages)
    counts = (
        f"{len(section['failed']):,} tasks failed, {len(section.get('left_out', ())):,} tasks and "
        f"{section['faulty_rows']:,} faulty rows were left out"
    )
    return [f"<p>{escape(model)}: {counts}.</p><ul>{items}</ul>"]


def describe_report(report: Report, output: Path) -> list[str]:
    """Return lines for the console: the summaries, and what was left out."""
    lines: list[str] = []
    for name, section in report["suites"].items():
        lines += SUITES[section["suite"]].describe(section["summary"])
        failed, skipped, faulty = len(section["failed"]), section["left_out"], section["faulty_rows"]
        errors = [f"{result['task']}: {result['error']}" for result in section["results"] if "error" in result]
        left_out = f", {failed:,} failed ({'; '.join(errors[:_MAX_NAMED])})" if failed else ""
        left_out += f", {len(skipped):,} left out ({'; '.join(skipped[:_MAX_NAMED])})" if skipped else ""
        left_out += f", {faulty:,} faulty rows left out" if faulty else ""
        lines.append(f"{name}: {len(section['results']) - failed - len(skipped):,} tasks{left_out}")
    return [*lines, f"report: {output / PAGE_NAME}"]
