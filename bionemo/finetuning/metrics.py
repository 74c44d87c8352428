# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics of predictions; R rows, C classes."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import logsumexp
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics
from torch import Tensor

CLASSIFICATION_METRICS = "accuracy", "balanced_accuracy", "f1", "roc_auc"
REGRESSION_METRICS = "mse", "rmse", "spearman", "pearson", "r2"


def summed_loss(predictions_RC: Tensor, targets_R: Tensor) -> Tensor:
    """Return the cross-entropy in nats (int64 classes) or squared error (numbers), summed over rows."""
    if targets_R.dtype == torch.int64:
        return F.cross_entropy(predictions_RC.float(), targets_R, reduction="sum")
    return F.mse_loss(predictions_RC.squeeze(1).float(), targets_R, reduction="sum")


def compute_metrics(predictions_RC: Tensor, targets_R: Tensor, ranking: bool = True) -> dict[str, float]:
    """Return the mean loss and, if it is finite, the metrics of classes or numbers; see `classification_metrics`."""
    loss = float(summed_loss(predictions_RC, targets_R)) / max(len(targets_R), 1)
    if not math.isfinite(loss):
        return {"loss": loss}
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
    targets, logits = targets_R.cpu().numpy(), logits_RC.double().cpu().numpy()
    predicted, present = logits.argmax(1), np.unique(targets)
    found = {
        "accuracy": metrics.accuracy_score(targets, predicted),
        "balanced_accuracy": math.nan,
        "f1": metrics.f1_score(targets, predicted, average="macro"),
    }
    if ranking:
        found["roc_auc"] = math.nan
    if len(present) > 1:
        found["balanced_accuracy"] = metrics.recall_score(targets, predicted, labels=present, average="macro")
        if ranking:  # log-odds have the order of the probabilities, which would be rounded to 1
            areas = [
                metrics.roc_auc_score(targets == each, logits[:, each] - logsumexp(np.delete(logits, each, 1), 1))
                for each in present
            ]
            found["roc_auc"] = np.mean(areas)
    return {name: 100 * float(value) for name, value in found.items()}


def regression_metrics(predictions_R: Tensor, targets_R: Tensor) -> dict[str, float]:
    """Return mean squared error and its root; for 2 or more rows also correlations and explained variance.

    The correlations with constant numbers are not defined: nan.
    """
    predictions, targets = (numbers.double().cpu().numpy() for numbers in (predictions_R, targets_R))
    error = metrics.mean_squared_error(targets, predictions)
    found = {"mse": error, "rmse": math.sqrt(error)}
    if len(targets) > 1:
        is_constant = np.ptp(predictions) == 0 or np.ptp(targets) == 0
        found["spearman"] = math.nan if is_constant else spearmanr(predictions, targets).statistic
        found["pearson"] = math.nan if is_constant else pearsonr(predictions, targets).statistic
        found["r2"] = metrics.r2_score(targets, predictions)
    return {name: float(value) for name, value in found.items()}


def confusion_matrix(logits_RC: Tensor, targets_R: Tensor) -> list[list[int]]:
    """Return the number of rows for each true class (first index) and predicted class (second index)."""
    predicted_R, labels = logits_RC.argmax(1).cpu(), range(logits_RC.shape[1])
    counts: list[list[int]] = metrics.confusion_matrix(targets_R.cpu(), predicted_R, labels=labels).tolist()
    return counts
