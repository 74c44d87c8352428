# SPDX-License-Identifier: Apache-2.0
"""How good answers are, by torchmetrics; R rows, C classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional import (
    mean_squared_error,
    pearson_corrcoef,
    r2_score,
    spearman_corrcoef,
)
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_confusion_matrix,
    multiclass_f1_score,
)


def summed_loss(answers_RC: Tensor, targets_R: Tensor) -> Tensor:
    """Cross-entropy in nats of classes (int64), squared error of numbers; the sum over rows."""
    if targets_R.dtype == torch.int64:
        return F.cross_entropy(answers_RC.float(), targets_R, reduction="sum")
    return F.mse_loss(answers_RC.squeeze(1).float(), targets_R, reduction="sum")


OF_CLASSES = "accuracy", "balanced_accuracy", "f1"
OF_NUMBERS = "mse", "rmse", "spearman", "pearson", "r2"


def figures_of(answers_RC: Tensor, targets_R: Tensor) -> dict[str, float]:
    """Mean loss, and all that follows here."""
    classes = targets_R.dtype == torch.int64
    measure: Any = of_classes if classes else of_numbers
    loss = float(summed_loss(answers_RC, targets_R)) / max(len(targets_R), 1)
    return {"loss": loss, **measure(answers_RC if classes else answers_RC.squeeze(1), targets_R)}


def of_classes(logits_RC: Tensor, targets_R: Tensor) -> dict[str, float]:
    """Share of right answers in percent, as v1 has it; its mean over classes, and the mean F1. Nothing of no rows."""
    if not len(targets_R):
        return {}
    classes = logits_RC.shape[1]
    found = {
        "accuracy": 100 * multiclass_accuracy(logits_RC, targets_R, classes, average="micro"),
        "balanced_accuracy": 100 * multiclass_accuracy(logits_RC, targets_R, classes, average="macro"),
        "f1": multiclass_f1_score(logits_RC, targets_R, classes, average="macro"),
    }
    return {name: float(value) for name, value in found.items()}


def of_numbers(answers_R: Tensor, targets_R: Tensor) -> dict[str, float]:
    """Mean squared error and its root, correlations of values and of ranks, explained variance (if 2 rows or more)."""
    error = mean_squared_error(answers_R, targets_R)
    found = {"mse": error, "rmse": error.sqrt()}
    if len(targets_R) > 1:
        found["spearman"] = spearman_corrcoef(answers_R, targets_R)
        spread = targets_R.double().std().clamp_min(1e-30)  # torchmetrics takes what is small in its unit for nothing
        said, true = ((each.double() - targets_R.double().mean()) / spread for each in (answers_R, targets_R))
        found["pearson"], found["r2"] = pearson_corrcoef(said, true), r2_score(said, true)
    return {name: float(value) for name, value in found.items()}


def confusion(logits_RC: Tensor, targets_R: Tensor) -> list[list[int]]:
    """How many rows of each class (first index) were taken for which (second)."""
    counts: Tensor = multiclass_confusion_matrix(logits_RC, targets_R, logits_RC.shape[1])
    return [[int(value) for value in row] for row in torch.atleast_2d(counts)]
