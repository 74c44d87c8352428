# SPDX-License-Identifier: Apache-2.0
"""ProteinGym: measured effects of substitutions, compared with zero-shot scores of a model.

Notin et al. 2023, "ProteinGym: Large-Scale Benchmarks for Protein Fitness Prediction and Design".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.figures import new_figure, plain, to_svg
from bionemo.evaluation.html import format_number, html_table
from bionemo.evaluation.metrics import METRICS, assay_metrics
from bionemo.evaluation.proteingym_files import (
    ASSAYS,
    PUBLISHED,
    REFERENCE,
    Assay,
    average_assays,
    error_of_difference,
    find_file,
    read_assay,
    read_published,
    read_reference,
)
from bionemo.evaluation.tasks import Problems, Result, Suite, Task, TaskResult
from bionemo.inference.analysis.variants import METHODS, count_residues, score_variants
from bionemo.inference.analysis.windows import WINDOW_TYPES, WindowType
from bionemo.inference.batching import max_tokens
from bionemo.inference.model import TrainedModel
from bionemo.inference.progress import Advance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVE = 10  # points of the calibration curve
_MOST = 30  # published models in the table


@dataclass(frozen=True)
class AssayTask(Task):
    """Zero-shot scores of the variants of an assay."""

    assay: Assay
    path: Path
    method: str
    window: WindowType

    @property
    def name(self) -> str:
        """Name of the assay."""
        return self.assay.name

    @property
    def files(self) -> list[Path]:
        """The file of the assay."""
        return [self.path]

    @property
    def settings(self) -> dict[str, Any]:
        """Wild type, method and window."""
        return {"sequence": self.assay.sequence, "method": self.method, "window": self.window}

    @property
    def cost(self) -> int:
        """Number of pairs of residues in all predictions, if every residue is predicted."""
        return len(self.assay.sequence) ** 2

    def run(self, model: TrainedModel, problems: Problems, advance: Advance) -> TaskResult:
        """Score the variants, see `Task`."""
        sequence = self.assay.sequence
        variants = read_assay(self.path, sequence, problems)
        if not variants.names:
            raise UserError(f"{self.path} has no usable variant of {self.assay.name}: remove the assay")
        residues, done = count_residues(sequence, variants.mutations, self.method), 0

        def advance_cost(count: int) -> None:
            nonlocal done
            advance(self.cost * (done + count) // residues - self.cost * done // residues)
            done += count

        scores = score_variants(
            model, sequence, variants.names, self.method, 0, variants.locations, advance_cost, self.window
        )
        values = assay_metrics(scores, variants.measured, variants.fit)
        details = {
            "variants": len(scores), "missing": variants.missing, "length": len(sequence), "residues": residues,
            "windows": self.window if len(sequence) > max_tokens(model.network) else None,
            "uniprot": self.assay.uniprot, "selection": self.assay.selection, "depth": self.assay.depth,
            "taxon": self.assay.taxon, "curve": calibration_curve(scores, variants.measured),
        }  # fmt: skip
        table = [("mutant", "DMS_score", "score"), *zip(variants.names, variants.measured, scores, strict=True)]
        return TaskResult(values, details, table)


def calibration_curve(scores: NDArray[Any], measured: NDArray[Any]) -> list[float]:
    """Return the mean percentile of the measured scores in each tenth of the model's scores, from low to high."""
    from scipy.stats import rankdata

    if len(scores) < _CURVE:
        return []
    percentiles = 100 * (rankdata(measured) - 0.5) / len(measured)
    order = np.argsort(scores, kind="stable")
    return [float(part.mean()) for part in np.array_split(percentiles[order], _CURVE)]


@dataclass(frozen=True)
class ProteinGym(Suite):
    """All assays of the reference file in `data`.

    Assay files are looked for in `data`, and in the folder of ProteinGym's archive below it.

    Attributes:
        method: how variants are scored, see `score_variants`.
        window: how windows are chosen if the protein is longer than the model, see `make_windows`.
    """

    name: ClassVar[str] = "proteingym"
    help: ClassVar[str] = "effects of substitutions"
    method: str = "masked-marginal"
    window: WindowType = "optimal"

    def tasks(self) -> list[AssayTask]:
        """Return a task for each assay, see `Suite`."""
        for name, value, choices in (("method", self.method, METHODS), ("window", self.window, WINDOW_TYPES)):
            if value not in choices:
                raise UserError(f"{name}={value!r} is unknown: choose from {', '.join(choices)}")
        reference = find_file(self.data, REFERENCE) or self.data / REFERENCE[0]
        assays = read_reference(reference)
        folders = [
            folder
            for folder in (self.data, self.data / ASSAYS)
            if any((folder / each.file).exists() for each in assays)
        ]
        if not folders:
            raise UserError(f"{self.data} has none of the {len(assays)} assay files of {reference}: put them there")
        return [AssayTask(assay, folders[0] / assay.file, self.method, self.window) for assay in assays]

    def summarize(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the averages, and those of published models over the same assays; see `Suite`."""
        assays = [
            Assay(task["task"], "", task["uniprot"], task["taxon"], "", task["selection"], task["depth"])
            for task in results
        ]
        values = {
            metric: {task["task"]: math.nan if (x := task["metrics"][metric]) is None else x for task in results}
            for metric in METRICS
        }
        averages = {metric: average_assays(each, assays)._asdict() for metric, each in values.items()}
        path = find_file(self.data, PUBLISHED)
        published, best = _average_published(path, set(values["spearman"])) if path else ({}, None)
        if best:
            name, of_best = best
            averages["spearman"]["error_of_difference"] = error_of_difference(values["spearman"], of_best, assays)
            return {"averages": averages, "published": published, "best": name}
        return {"averages": averages, "published": published}

    @staticmethod
    def describe(summary: Mapping[str, Any]) -> list[str]:
        """Return a line for each metric, see `Suite`."""
        lines = []
        for metric, found in summary["averages"].items():
            if found["overall"] is not None:
                groups = "  ".join(f"{kind} {value:.3f}" for kind, value in found["selection"].items())
                lines.append(f"{metric:10}  {found['overall']:.4f} +- {found['error']:.4f}  {groups}")
        return lines

    @staticmethod
    def render(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the tables and plots, see `Suite`."""
        results = {name: each["results"] for name, each in sections.items()}
        return [
            "<p>Spearman's rho between scores and measurements, averaged over assays, UniProt ids and selection "
            "types. Published models: averages over the same assays. The number after ± is the standard error of the "
            "average, by bootstrap over UniProt ids within each selection type. ProteinGym publishes a smaller one: "
            "that of the difference to the best model, here the best published one.</p>",
            _spearman_table(sections),
            "<p>All metrics, averaged in the same way.</p>",
            _metrics_table(sections),
            to_svg(_plot_assays(results)),
            to_svg(_plot_calibration(results)),
            "<h3>Assays</h3>",
            _assay_table(results),
        ]


def _average_published(path: Path, names: set[str]) -> tuple[dict[str, dict[str, Any]], tuple[str, Any] | None]:
    """Average the published results of the models that have one for each of these assays.

    Also return the name of the best of these models and its results.
    """
    assays, models = read_published(path)
    known = {model: {name: x for name, x in values.items() if name in names} for model, values in models.items()}
    complete = {model: values for model, values in known.items() if values.keys() == names}
    if not complete:
        return {}, None
    found = {model: average_assays(values, assays)._asdict() for model, values in complete.items()}
    best = max(found, key=lambda model: found[model]["overall"])
    for model, values in complete.items():
        found[model]["error_of_difference"] = error_of_difference(values, complete[best], assays)
    return found, (best, complete[best])


_Sections = Mapping[str, Mapping[str, Any]]
_Results = Mapping[str, Sequence[Result]]


def _spearman_table(sections: _Sections) -> str:
    """Return a table with a row for each model and the best published ones, and a column for each average."""
    own = {name: each["summary"]["averages"]["spearman"] for name, each in sections.items()}
    evaluated = [sorted(task["task"] for task in each["results"]) for each in sections.values()]
    same = all(each == evaluated[0] for each in evaluated)  # otherwise, published averages are not comparable
    published = next(iter(sections.values()))["summary"]["published"] if same else {}
    best = sorted(published.items(), key=lambda row: -(row[1]["overall"] or 0))[:_MOST]
    rows = sorted([*own.items(), *best], key=lambda row: -(row[1]["overall"] or 0))
    best_of_all = next(iter(sections.values()))["summary"].get("best") if same else None
    title = [f"ProteinGym's SE, of the difference to {best_of_all}"] if best_of_all else []
    groups = [
        (group, name)
        for group in ("selection", "depth", "taxon")
        for name in sorted({name for each in own.values() for name in each[group]})
    ]
    titles = [*title, *(name if group != "depth" else f"{name} depth" for group, name in groups)]
    return html_table(
        ["model", "all ± SE of the average", *titles],
        ([name, format_number(each["overall"], each["error"]),
          *[format_number(each.get("error_of_difference")) for _ in title],
          *(format_number(each[group].get(key)) for group, key in groups)] for name, each in rows),
        own,
    )  # fmt: skip


def _metrics_table(sections: _Sections) -> str:
    averages = {name: each["summary"]["averages"] for name, each in sections.items()}
    return html_table(
        ["model", *METRICS],
        (
            [name, *(format_number(each[metric]["overall"], each[metric]["error"]) for metric in METRICS)]
            for name, each in averages.items()
        ),
    )


def _assay_table(results: _Results) -> str:
    """Return a table of the assays: all metrics of a single model, or Spearman's rho of several."""
    if len(results) == 1:
        columns = [(metric, metric, tasks) for tasks in results.values() for metric in METRICS]
    else:
        columns = [(model, "spearman", tasks) for model, tasks in results.items()]
    values = [{task["task"]: format_number(task["metrics"][metric]) for task in tasks} for _, metric, tasks in columns]
    described = {task["task"]: task for tasks in results.values() for task in tasks}
    return html_table(
        ["assay", "type", "residues", "variants", *(header for header, _, _ in columns)],
        ([name, task["selection"], f"{task['length']:,}", f"{task['variants']:,}",
          *(column.get(name, "") for column in values)] for name, task in described.items()),
    )  # fmt: skip


def _spearman(task: Result) -> float | None:
    value: float | None = task["metrics"]["spearman"]
    return value


def _plot_assays(results: _Results) -> "Figure":
    """Plot Spearman's rho of each assay, by selection type, and the means."""
    figure = new_figure()
    axes = figure.subplots()
    kinds = sorted({task["selection"] for tasks in results.values() for task in tasks})
    width = 0.8 / len(results)
    for number, (model, tasks) in enumerate(results.items()):
        places: list[float] = []
        values: list[float] = []
        for place, kind in enumerate(kinds):
            known = sorted(
                value for task in tasks if task["selection"] == kind and (value := _spearman(task)) is not None
            )
            if known:
                left, mean = place - 0.4 + number * width, sum(known) / len(known)
                places += [left + width * (index + 0.5) / len(known) for index in range(len(known))]
                values += known
                axes.plot([left, left + width], [mean, mean], color=f"C{number}")
        axes.plot(places, values, ".", color=f"C{number}", label=plain(model))
    axes.set_xticks(range(len(kinds)), [plain(kind) for kind in kinds])
    axes.set(ylabel="Spearman's rho", title="Assays (points) and their means (lines)")
    axes.axhline(0, color="gray", linewidth=0.5)
    if len(results) > 1:
        axes.legend()
    return figure


def _plot_calibration(results: _Results) -> "Figure":
    """Plot measured percentiles by tenths of the scores, and Spearman's rho by length."""
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    percentiles = range(100 // _CURVE // 2, 100, 100 // _CURVE)
    for number, (model, tasks) in enumerate(results.items()):
        color = f"C{number}"
        curves = [task["curve"] for task in tasks if task["curve"]]
        for curve in curves if len(results) == 1 else []:
            left.plot(percentiles, curve, color=color, alpha=0.2, linewidth=0.8)
        if curves:
            mean = [sum(each) / len(each) for each in zip(*curves, strict=True)]
            left.plot(percentiles, mean, color=color, linewidth=2, label=plain(model))
        known = [(task["length"], value) for task in tasks if (value := _spearman(task)) is not None]
        right.plot([x for x, _ in known], [y for _, y in known], ".", color=color, label=plain(model))
    left.set(xlabel="percentile of the score", ylabel="mean measured percentile", title="Calibration")
    right.set(xlabel="residues", ylabel="Spearman's rho", title="Length", xscale="log")
    if len(results) > 1:
        left.legend()
    return figure
