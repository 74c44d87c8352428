# SPDX-License-Identifier: Apache-2.0
"""ProteinGym: measured effects of substitutions, compared with zero-shot scores of a model.

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
from bionemo.inference.batching import max_tokens
from bionemo.inference.model import TrainedModel
from bionemo.inference.variants import METHODS, count_residues, score_variants
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
        sequence = self.assay.sequence
        variants = read_assay(self.path, sequence, problems)
        if not variants.names:
            raise UserError(f"{self.path} has no usable variant of {self.assay.name}: remove the assay")
        residues = count_residues(sequence, variants.mutations, self.method)
        scores = score_variants(
            model, sequence, variants.names, self.method, names=variants.locations, window=self.window
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
        reference = find_file(self.data, REFERENCE) or self.data / REFERENCE[0]
        assays = read_reference(reference)
        folders = [
            folder
            for folder in (self.data, self.data / ASSAYS)
            if any((folder / each.file).exists() for each in assays)
        ]
        if not folders:
            raise UserError(f"{self.data} has none of the {len(assays)} assay files of {reference}: put them there")
        options = {"method": self.method, "window": self.window}
        return [
            AssayTask(
                name=assay.name,
                files=[path := folders[0] / assay.file],
                settings={"sequence": assay.sequence, **options},
                cost=len(assay.sequence) ** 2,  # pairs of residues in all predictions
                assay=assay,
                path=path,
                method=self.method,
                window=self.window,
            )
            for assay in assays
        ]

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
