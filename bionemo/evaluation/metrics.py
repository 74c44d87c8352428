# SPDX-License-Identifier: Apache-2.0
"""Metrics of ProteinGym for predicted effects of mutations.

Notin et al. 2023, "ProteinGym: Large-Scale Benchmarks for Protein Fitness Prediction and Design", section 4, with the
definitions of its published figures. Shape: N variants.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating[Any]]
_TOP = 10  # per cent of the variants
METRICS = ("spearman", "auc", "mcc", "ndcg", "top_recall")


def assay_metrics(scores: Numbers, measured: Numbers, fit: NDArray[np.bool_]) -> dict[str, float]:
    """Return METRICS of an assay.

    Args:
        scores: [N] scores of the model.
        measured: [N] measured scores; higher is fitter.
        fit: [N] whether the variant counts as fit (`DMS_score_bin`).

    Returns:
        Spearman's rho; area under the ROC curve; Matthews' correlation with the scores binarized at their median;
        normalized discounted cumulative gain and recall of the best tenth. A metric that is not defined, for example
        because all scores are equal, is nan.
    """
    from scipy.stats import spearmanr
    from sklearn.metrics import matthews_corrcoef, roc_auc_score

    ranked = len(np.unique(scores)) > 1 and len(np.unique(measured)) > 1
    both = len(np.unique(fit)) == 2
    return {
        "spearman": float(spearmanr(scores, measured).statistic) if ranked else math.nan,
        "auc": float(roc_auc_score(fit, scores)) if both else math.nan,
        "mcc": float(matthews_corrcoef(fit, scores >= np.median(scores))) if both else math.nan,
        "ndcg": ndcg(scores, measured),
        "top_recall": top_recall(scores, measured),
    }


def ndcg(scores: Numbers, measured: Numbers) -> float:
    """Return the normalized discounted cumulative gain of the best tenth; gains are measured scores scaled to [0, 1].

    Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of IR techniques". nan with fewer than ten variants
    or equal measured scores.
    """
    count, width = len(scores) * _TOP // 100, np.ptp(measured) if len(measured) else 0.0
    if not count or not width:
        return math.nan
    gains = (measured - measured.min()) / width
    discounts = 1 / np.log2(np.arange(2, count + 2))
    found = gains[np.argsort(-scores, kind="stable")[:count]] @ discounts
    return float(found / (np.sort(gains)[::-1][:count] @ discounts))


def top_recall(scores: Numbers, measured: Numbers) -> float:
    """Return the share of the best tenth of the measured scores that is in the best tenth of the model's scores."""
    if not len(scores):
        return math.nan
    best, predicted = (each >= np.percentile(each, 100 - _TOP) for each in (measured, scores))
    return float((best & predicted).sum() / best.sum())
