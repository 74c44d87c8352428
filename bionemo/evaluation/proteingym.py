# SPDX-License-Identifier: Apache-2.0
"""ProteinGym: measured and clinical effects of substitutions and indels, compared with zero-shot scores of a model.

Notin et al. 2023, "ProteinGym: Large-Scale Benchmarks for Protein Fitness Prediction and Design".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.evaluation.metrics import assay_metrics
from bionemo.evaluation.proteingym_files import (
    PUBLISHED,
    SETS,
    Assay,
    average_assays,
    error_of_difference,
    find_file,
    read_assay,
    read_published,
    read_reference,
)
from bionemo.evaluation.tasks import Problems, Result, Suite, Task, TaskResult
from bionemo.inference.batching import max_tokens
from bionemo.inference.model import TrainedModel
from bionemo.inference.variants import METHODS, count_residues, score_sequences, score_variants
from bionemo.inference.windows import WINDOW_TYPES, WindowType

_CURVE = 10  # points of the calibration curve


@dataclass(frozen=True)
class AssayTask(Task):
    """Zero-shot scores of the variants of an assay."""

    assay: Assay
    path: Path
    method: str
    window: WindowType

    def run(self, model: TrainedModel, problems: Problems) -> TaskResult:
        """Score the variants, see `Task`."""
        sequence, kind = self.assay.sequence, self.assay.kind
        variants = read_assay(self.path, sequence, problems, kind)
        if not variants.names:
            raise UserError(f"{self.path} has no usable variant of {self.assay.name}: remove the assay")
        names, clinical = (variants.names, variants.locations), {}
        if kind.endswith("indels"):
            residues = len(sequence) + sum(map(len, variants.names))
            scores = score_sequences(model, sequence, *names, self.method, self.window)
        else:
            residues = count_residues(sequence, variants.mutations, self.method)
            scores = score_variants(model, sequence, names[0], self.method, names=names[1], window=self.window)
        values = assay_metrics(scores, variants.measured, variants.fit)
        if kind.startswith("clinical"):
            values = {"auc": values["auc"]}
            clinical = {"scores": scores.tolist(), "benign": variants.measured.tolist()}
        details = {
            "variants": len(scores), "missing": variants.missing, "length": len(sequence), "residues": residues,
            "windows": self.window if len(sequence) > max_tokens(model.network) else None,
            "uniprot": self.assay.uniprot, "selection": self.assay.selection, "depth": self.assay.depth,
            "taxon": self.assay.taxon, "kind": kind, "curve": calibration_curve(scores, variants.measured),
            **clinical,
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
    """All assays of the reference files in `data`: measured or clinical, substitutions or indels.

    Assay files are looked for in `data`, and in the folders of ProteinGym's archives below it.

    Attributes:
        method: how variants are scored, see `score_variants`.
        window: how windows are chosen if the protein is longer than the model, see `make_windows`.
    """

    name: ClassVar[str] = "proteingym"
    about: ClassVar[str] = (
        "Metrics of the scores of variants, averaged over the assays of each UniProt id, ids, and selection types; of "
        "published models Spearman's rho over the same assays. `error` is the standard error of the average, by "
        "bootstrap over UniProt ids within each selection type. `error_of_difference` is the smaller one that "
        "ProteinGym publishes: of the difference to the best model, here the best published one."
    )
    method: str = "masked-marginal"
    window: WindowType = "optimal"

    def tasks(self) -> list[AssayTask]:
        """Return a task for each assay, see `Suite`."""
        for name, value, choices in (("method", self.method, METHODS), ("window", self.window, WINDOW_TYPES)):
            if value not in choices:
                raise UserError(f"{name}={value!r} is unknown: choose from {', '.join(choices)}")
        found, options = [], {"method": self.method, "window": self.window}
        for kind in SETS:
            reference = find_file(self.data, (f"{kind}.csv", f"reference_files/{kind}.csv"))
            for assay in read_reference(reference) if reference else []:
                archive = self.data / kind.replace("_", "_ProteinGym_")  # as distributed
                path = find_file(self.data, (assay.file, f"{archive.name}/{assay.file}"))
                found.append((assay, path, archive if archive.is_dir() else self.data))
        present = {assay.kind for assay, path, _ in found if path}
        if not present:
            raise UserError(
                f"{self.data} has no assay files of {' or '.join(f'{kind}.csv' for kind in SETS)}: put them there"
            )
        return [
            AssayTask(
                name=assay.name if assay.kind == SETS[0] else f"{assay.kind}.{assay.name}",
                files=[path or folder / assay.file],
                settings={"sequence": assay.sequence, "kind": assay.kind, **options},
                cost=len(assay.sequence) ** 2,  # pairs of residues in all predictions
                assay=assay,
                path=path or folder / assay.file,
                method=self.method,
                window=self.window,
            )
            for assay, path, folder in found
            if assay.kind in present
        ]

    def summarize(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the averages, and those of published models over the same substitutions; see `Suite`.

        `auc` of clinical variants is the mean over proteins with both classes, `pooled` that of all variants.
        """
        summary: dict[str, Any] = {"averages": {}, "published": {}}
        for kind in dict.fromkeys(task["kind"] for task in results):
            tasks = [task for task in results if task["kind"] == kind]
            assays = [
                Assay(task["task"], "", task["uniprot"], task["taxon"], "", task["selection"], task["depth"])
                for task in tasks
            ]
            for metric in tasks[0]["metrics"]:
                values = {each["task"]: math.nan if (x := each["metrics"][metric]) is None else x for each in tasks}
                averages = average_assays(values, assays)._asdict()
                summary["averages"][metric if kind == SETS[0] else f"{kind} {metric}"] = averages
                path = find_file(self.data, PUBLISHED)
                if kind == SETS[0] and metric == "spearman" and path:
                    summary["published"], best = _average_published(path, {*values})
                    if best:
                        summary["best"], of_best = best
                        averages["error_of_difference"] = error_of_difference(values, of_best, assays)
                if kind.startswith("clinical"):
                    averages["pooled"] = _pooled_auc(tasks)
        return summary

    @staticmethod
    def describe(summary: Mapping[str, Any]) -> list[str]:
        """Return a line for each metric, see `Suite`."""
        lines = []
        for metric, found in summary["averages"].items():
            if found["overall"] is not None:
                groups = "  ".join(f"{kind} {value:.3f}" for kind, value in found["selection"].items())
                lines.append(f"{metric:10}  {found['overall']:.4f} +- {found['error']:.4f}  {groups}")
        return lines


def _pooled_auc(tasks: Sequence[Result]) -> float:
    """Return the area under the ROC curve of the variants of all proteins; nan if all are benign or pathogenic."""
    scores, benign = (np.array([x for task in tasks for x in task[name]]) for name in ("scores", "benign"))
    return assay_metrics(scores, benign, benign == 1)["auc"]


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
    best_first = dict(sorted(found.items(), key=lambda item: -item[1]["overall"]))
    return best_first, (best, complete[best])
