# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics of predictions; R rows, C outputs: classes, labels or targets.

The type of the targets tells the task: whole numbers [R] are classes, whole numbers [R, C] say which labels a row has,
and numbers [R] or [R, C] are those of a regression; see `is_labelled`.
"""

import math

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics
from torch import Tensor

from bionemo.config.schema.data import TaskType
from bionemo.finetuning.labels import is_labelled

METRICS: dict[TaskType, tuple[str, ...]] = {
    **dict.fromkeys(
        ("classification", "token-level-classification"), ("accuracy", "balanced_accuracy", "f1", "roc_auc")
    ),
    **dict.fromkeys(("regression", "token-level-regression"), ("mse", "rmse", "spearman", "pearson", "r2")),
    "multi-label": ("fmax", "auprc_micro", "auprc", "roc_auc"),
}


def is_class(targets: Tensor) -> bool:
    """Return whether each row has one of several classes."""
    return not targets.is_floating_point() and targets.ndim == 1


def summed_loss(predictions_RC: Tensor, targets: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return the loss summed over all labels: cross-entropy in nats, or squared error in units of `scale`."""
    if is_class(targets):
        return F.cross_entropy(predictions_RC.float(), targets, reduction="sum")
    targets_RC = targets.reshape(predictions_RC.shape)
    known_RC = is_labelled(targets_RC)
    if not targets.is_floating_point():
        expected_RC, weights_RC = targets_RC.clamp(min=0).float(), known_RC.float()
        return F.binary_cross_entropy_with_logits(predictions_RC.float(), expected_RC, weights_RC, reduction="sum")
    errors_RC = (predictions_RC.float() - targets_RC) / scale
    return errors_RC.where(known_RC, 0.0).square().sum()


def compute_metrics(
    predictions_RC: Tensor, targets: Tensor, ranking: bool = True, scale: Tensor | float = 1.0
) -> dict[str, float]:
    """Return the mean loss, see `summed_loss`, and, if it is finite, the metrics of classes, labels or numbers.

    Those of several labels or targets are means over all that have such a metric, see `target_metrics`. Metrics that
    need a ranking of all rows are left out of classes and labels without `ranking`.
    """
    loss = float(summed_loss(predictions_RC, targets, scale)) / max(int(is_labelled(targets).sum()), 1)
    if not math.isfinite(loss):
        return {"loss": loss}
    if is_class(targets):
        return {"loss": loss, **classification_metrics(predictions_RC, targets, ranking)}
    targets_RC, is_number = targets.reshape(predictions_RC.shape), targets.is_floating_point()
    each = target_metrics(predictions_RC, targets_RC) if ranking or is_number else []
    names = dict.fromkeys(name for values in each for name in values)
    means = {name: np.ma.masked_invalid([values.get(name, math.nan) for values in each]).mean() for name in names}
    found = {name: float(np.ma.filled(mean, math.nan)) for name, mean in means.items()}
    return {"loss": loss, **(label_set_metrics(predictions_RC, targets_RC) if each and not is_number else {}), **found}


def target_metrics(predictions_RC: Tensor, targets_RC: Tensor) -> list[dict[str, float]]:
    """Return the metrics of each target over the rows that have it: `regression_metrics`, or `_areas` of a label.

    A label without positive rows, or a target without rows, has no metrics.
    """
    found = []
    for known_R, predictions_R, targets_R in zip(
        is_labelled(targets_RC).T, predictions_RC.T, targets_RC.T, strict=True
    ):
        pair = predictions_R[known_R], targets_R[known_R]
        if targets_RC.is_floating_point():
            found.append(regression_metrics(*pair) if known_R.any() else {})
        else:
            found.append(_areas(*(each.double().cpu().numpy() for each in pair)))
    return found


def _areas(logits_R: NDArray[np.float64], labels_R: NDArray[np.float64]) -> dict[str, float]:
    """Return average precision (`auprc`) and area under the ROC curve (`roc_auc`) in percent, as far as defined."""
    order = np.argsort(-logits_R, kind="stable")
    ends = np.flatnonzero(np.diff(logits_R[order], append=-np.inf))  # last rows of equal logits
    hits = np.append(0, labels_R[order].cumsum()[ends])
    misses, found = np.append(0, ends + 1) - hits, {}
    if hits[-1]:
        found["auprc"] = 100 * float(np.diff(hits) @ (hits[1:] / (ends + 1)) / hits[-1])
    if hits[-1] and misses[-1]:
        found["roc_auc"] = 50 * float(np.diff(misses) @ (hits[1:] + hits[:-1]) / hits[-1] / misses[-1])
    return found


def label_set_metrics(logits_RC: Tensor, targets_RC: Tensor) -> dict[str, float]:
    """Return F-max and the average precision over all pairs of row and label, in percent; {} without labels.

    F-max (Radivojac et al. 2013, "A large-scale evaluation of computational protein function prediction", CAFA) is the
    maximum over thresholds 0.01, 0.02, ..., 1 of the probability of the harmonic mean of precision and recall.
    Precision is averaged over the rows with a predicted label, recall over the rows with a label.
    """
    known_RC, true_RC = is_labelled(targets_RC).cpu().numpy(), (targets_RC == 1).cpu().numpy()
    scores_RC, sizes_R, rows = logits_RC.double().cpu(), true_RC.sum(1), len(true_RC)
    if not sizes_R.any():
        return {}
    # number of thresholds that each probability reaches, and from it the numbers of predictions at all of them
    reached_RC = np.searchsorted(np.arange(1, 101) / 100, scores_RC.sigmoid().numpy(), "right")
    cells = (np.arange(rows)[:, None] * 101 + reached_RC).ravel()
    counts_RT, hits_RT = (
        np.bincount(cells, each.ravel(), rows * 101).reshape(rows, 101)[:, :0:-1].cumsum(1)
        for each in (known_RC, true_RC)
    )
    precisions_T = (hits_RT / counts_RT.clip(1)).sum(0) / (counts_RT > 0).sum(0).clip(1)
    recalls_T = (hits_RT / sizes_R.clip(1)[:, None]).sum(0) / (sizes_R > 0).sum()
    best = (2 * precisions_T * recalls_T / (precisions_T + recalls_T).clip(1e-12)).max()
    micro = _areas(scores_RC.numpy()[known_RC], true_RC[known_RC].astype(np.float64))
    return {"fmax": 100 * float(best), "auprc_micro": micro["auprc"]}


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
