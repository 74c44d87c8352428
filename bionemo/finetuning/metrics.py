# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics of predictions; R rows, C classes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional import mean_squared_error, pearson_corrcoef, r2_score, spearman_corrcoef
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_confusion_matrix,
    multiclass_f1_score,
)

CLASSIFICATION_METRICS = "accuracy", "balanced_accuracy", "f1", "roc_auc"
REGRESSION_METRICS = "mse", "rmse", "spearman", "pearson", "r2"


def summed_loss(predictions_RC: Tensor, targets_R: Tensor) -> Tensor:
    """Return the cross-entropy in nats (int64 classes) or squared error (numbers), summed over rows."""
    if targets_R.dtype == torch.int64:
        return F.cross_entropy(predictions_RC.float(), targets_R, reduction="sum")
    return F.mse_loss(predictions_RC.squeeze(1).float(), targets_R, reduction="sum")


def compute_metrics(predictions_RC: Tensor, targets_R: Tensor, ranking: bool = True) -> dict[str, float]:
    """Return the mean loss, and the metrics of classes or numbers; see `classification_metrics`."""
    loss = float(summed_loss(predictions_RC, targets_R)) / max(len(targets_R), 1)
    if targets_R.dtype == torch.int64:
        return {"loss": loss, **classification_metrics(predictions_RC, targets_R, ranking)}
    return {"loss": loss, **regression_metrics(predictions_RC.squeeze(1), targets_R)}


def classification_metrics(logits_RC: Tensor, targets_R: Tensor, ranking: bool = True) -> dict[str, float]:
    """Return accuracy, its mean over classes, mean F1, and area under the ROC curve, all in percent, as v1's accuracy.

    Balanced accuracy and area are means over the classes of the targets, each against all others, and nan if there is
    only one class. The area takes more time than all others, and is left out without `ranking`. {} without rows.
    """
    if not len(targets_R):
        return {}
    classes = logits_RC.shape[1]
    found: dict[str, Tensor | float] = {
        "accuracy": 100 * multiclass_accuracy(logits_RC, targets_R, classes, average="micro"),
        "balanced_accuracy": math.nan,
        "f1": 100 * multiclass_f1_score(logits_RC, targets_R, classes, average="macro"),
    }
    present = targets_R.unique()
    if ranking:
        found["roc_auc"] = math.nan
    if len(present) > 1:
        recalls_C = multiclass_accuracy(logits_RC, targets_R, classes, average="none")
        found["balanced_accuracy"] = 100 * recalls_C[present].mean()
    if ranking and len(present) > 1:
        # log-odds have the order of the probabilities, which would be rounded to 1
        scores_RC = logits_RC.double() - logits_RC.double().flip(1)
        if classes > 2:
            scores_RC = logits_RC.double().log_softmax(1)
            scores_RC -= (-scores_RC.exp()).clamp_min(-1).log1p()
        areas = [roc_auc(scores_RC[:, each], targets_R == each) for each in present.tolist()]
        found["roc_auc"] = 100 * sum(areas) / len(areas)
    return {name: float(value) for name, value in found.items()}


def roc_auc(scores_R: Tensor, is_class_R: Tensor) -> float:
    """Return the area under the ROC curve: the share of pairs of a member and another row in the right order.

    A pair with equal scores counts half. Both kinds of rows must be present.
    """
    members, others = (scores_R[rows].sort().values for rows in (is_class_R, ~is_class_R))
    lower = torch.searchsorted(others, members) + torch.searchsorted(others, members, right=True)
    return float(lower.double().mean()) / (2 * len(others))


def regression_metrics(predictions_R: Tensor, targets_R: Tensor) -> dict[str, float]:
    """Return mean squared error and its root; for 2 or more rows also correlations and explained variance.

    The correlations with constant numbers are not defined: nan.
    """
    error = mean_squared_error(predictions_R, targets_R)
    found = {"mse": error, "rmse": error.sqrt()}
    if len(targets_R) > 1:
        is_constant = any(bool((x == x[0]).all()) for x in (predictions_R, targets_R))  # torchmetrics returns 0
        found["spearman"] = error * math.nan if is_constant else spearman_corrcoef(predictions_R, targets_R)
        std = targets_R.double().std().clamp_min(1e-30)  # torchmetrics treats small variances as zero
        scaled, true = ((x.double() - targets_R.double().mean()) / std for x in (predictions_R, targets_R))
        found["pearson"], found["r2"] = pearson_corrcoef(scaled, true), r2_score(scaled, true)
    return {name: float(value) for name, value in found.items()}


def confusion_matrix(logits_RC: Tensor, targets_R: Tensor) -> list[list[int]]:
    """Return the number of rows for each true class (first index) and predicted class (second index)."""
    counts: Tensor = multiclass_confusion_matrix(logits_RC, targets_R, logits_RC.shape[1])
    return [[int(value) for value in row] for row in torch.atleast_2d(counts)]
