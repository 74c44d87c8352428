# SPDX-License-Identifier: Apache-2.0
"""Metrics of assays, in cases computed by hand."""

import math

import numpy as np
import pytest

from bionemo.evaluation.metrics import METRICS, assay_metrics, ndcg, top_recall

TWENTY = np.arange(20.0)


def test_scores_in_the_order_of_the_measurements() -> None:
    found = assay_metrics(TWENTY, 3 * TWENTY - 7, TWENTY >= 10)
    assert found == pytest.approx(dict.fromkeys(METRICS, 1.0))


def test_scores_in_the_opposite_order() -> None:
    found = assay_metrics(-TWENTY, TWENTY, TWENTY >= 10)
    assert found["spearman"] == pytest.approx(-1)
    assert found["auc"] == 0
    assert found["mcc"] == pytest.approx(-1)
    assert found["top_recall"] == 0
    # the two best-ranked variants have the gains 0 and 1/19, those of an ideal order 1 and 18/19
    assert found["ndcg"] == pytest.approx((1 / 19 / math.log2(3)) / (1 + 18 / 19 / math.log2(3)))


def test_two_swapped_variants() -> None:
    """Of four variants, the second and third are exchanged: rho = 1 - 6 * 2 / (4 * 15)."""
    found = assay_metrics(np.array([1.0, 3.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 1, 1]) > 0)
    assert found["spearman"] == pytest.approx(0.8)
    assert found["auc"] == 0.75  # 3 of the 4 pairs of a fit and an unfit variant
    assert found["mcc"] == pytest.approx(0)  # scores from the median 2.5: one true and one false in each class
    assert math.isnan(found["ndcg"])  # a tenth of four variants is none


def test_undefined_metrics_are_nan() -> None:
    equal = assay_metrics(np.ones(20), TWENTY, TWENTY >= 10)
    assert math.isnan(equal["spearman"])
    assert equal["auc"] == 0.5
    one_class = assay_metrics(TWENTY, TWENTY, TWENTY >= 0)
    assert math.isnan(one_class["auc"]) and math.isnan(one_class["mcc"])
    assert math.isnan(ndcg(TWENTY, np.ones(20)))
    assert math.isnan(top_recall(np.array([]), np.array([])))


def test_top_recall() -> None:
    """The best tenth of 20 variants are two; one of them is among the two with the highest scores."""
    scores = TWENTY.copy()
    scores[[18, 3]] = scores[[3, 18]]
    assert top_recall(scores, TWENTY) == 0.5
