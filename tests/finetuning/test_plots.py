# SPDX-License-Identifier: Apache-2.0
"""Plots of a fine-tuning run: their texts are compared with scikit-learn and SciPy."""

import math
import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import r2_score, root_mean_squared_error

from bionemo.finetuning.metrics import confusion_matrix
from bionemo.finetuning.plots import plot_run

HISTORY = [{"epoch": 1.0, "train_loss": 2.0, "val_loss": 2.5}, {"epoch": 2.0, "train_loss": 1.0, "val_loss": 1.5}]


def texts_of(plots: dict[str, bytes]) -> list[str]:
    assert plots[".png"].startswith(b"\x89PNG")
    tree = ElementTree.fromstring(plots[".svg"])
    return ["".join(each.itertext()).strip() for each in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_a_parity_plot() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(200, generator=generator)
    predictions = targets + 0.5 * torch.randn(200, generator=generator)
    texts = texts_of(
        plot_run(HISTORY, (predictions[:, None], targets), (), None, None, "logS_$x", "squared units of the target")
    )
    assert {"logS_$x, measured", "logS_$x, predicted", "epoch", "training", "validation"} <= set(texts)
    assert "loss, squared units of the target" in texts
    text = " ".join(texts)
    assert "test split, n = 200" in text
    x, y = predictions.numpy(), targets.numpy()
    for name, value in (
        ("R\u00b2", r2_score(y, x)), ("RMSE", root_mean_squared_error(y, x)),
        ("Spearman's \u03c1", spearmanr(x, y).statistic),
    ):  # fmt: skip
        found = re.search(rf"{name} ([\d.]+) \[([\d.]+), ([\d.]+)\]", text)
        assert found, text
        middle, low, high = map(float, found.groups())
        assert middle == pytest.approx(value, abs=6e-4)
        assert low < middle < high and high - low < 0.2


@pytest.mark.parametrize("count", [3, 12, 13, 25])
def test_a_confusion_matrix(count: int) -> None:
    """Shares of the true class are in the cells of up to twelve classes, of three with counts; 25 have no names."""
    generator = np.random.default_rng(0)
    targets = torch.tensor(generator.integers(count - 1, size=300))  # the last class has no row
    predicted = torch.where(torch.tensor(generator.random(300) < 0.7), targets, torch.tensor(count - 1))
    logits = torch.nn.functional.one_hot(predicted, count).float()
    classes = [f"class{number}" for number in range(count)]
    confusion = confusion_matrix(logits, targets)
    texts = texts_of(plot_run(HISTORY, (logits, targets), classes, confusion, None, "place", "nats"))
    assert {"place, true", "place, predicted", "test split, n = 300 sequences", "share of the true class, %"} <= set(
        texts
    )
    shown = Counter(texts)
    assert shown["class0"] == (2 if count <= 20 else 0)
    joined = " ".join(texts)
    rows = Counter(targets.tolist())
    for (true, found), number in Counter(zip(targets.tolist(), predicted.tolist(), strict=True)).items():
        share = f"{100 * number / rows[true]:.0f} %"
        assert (share in texts) == (count <= 12), (true, found)
        assert bool(re.search(rf"{number}\s*{share}", joined)) == (count == 3), (true, found)


def test_a_class_that_is_a_blank() -> None:
    """DSSP's label of a residue without a secondary structure."""
    texts = texts_of(plot_run(HISTORY, None, [" ", "H"], [[3, 1], [0, 4]], None, "dssp", "nats"))
    assert texts.count("' '") == texts.count("H") == 2


@pytest.mark.parametrize(("epochs", "has_markers"), [(1, True), (3, True), (100, False)])
def test_losses_of_few_epochs_have_markers(epochs: int, has_markers: bool) -> None:
    history = [{"epoch": n + 1.0, "train_loss": 2.0 + n, "val_loss": 3.0 + n} for n in range(epochs)]
    svg = plot_run(history, None, [], None, None, "y", "nats")[".svg"].decode()
    for shade in ("#0072b2", "#d55e00"):
        markers = len(re.findall(rf"<use [^>]*fill: {shade}", svg))
        assert markers == (epochs + 1 if has_markers else 0)  # and that of the legend


def test_a_factor_of_large_losses_is_beside_the_legend() -> None:
    """The factor begins at the left end of the axes; the first entry of the legend is far to the right."""
    history = [{"epoch": n, "train_loss": 1e8 * n, "val_loss": 2e8 * n} for n in (1.0, 2.0)]
    tree = ElementTree.fromstring(plot_run(history, None, [], None, None, "y", "nats")[".svg"])
    starts = {}
    for each in tree.iter("{http://www.w3.org/2000/svg}text"):
        found = re.search(r"translate\(([\d.]+)", each.get("transform", "")) or re.search("()", "")
        starts["".join(each.itertext()).strip()] = each.get("x") or found.group(1)
    assert float(starts["training"]) - float(starts["1e8"]) > 40  # points


@pytest.mark.parametrize("targets", [[1.0], [2.0, 2.0, 2.0]])
def test_a_test_split_that_cannot_be_drawn(targets: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The losses are drawn, and one line says why there is no parity plot."""
    numbers = torch.tensor(targets)
    texts = texts_of(plot_run(HISTORY, (numbers[:, None] + 1, numbers), (), None, None, "y", "nats"))
    assert "training" in texts and "y, measured" not in texts
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("note: there is no plot of the test split: R\u00b2 is not defined")


def test_bars_of_several_targets() -> None:
    targets = {f"NR-{number}": {"auprc": 10.0 * number} for number in range(1, 4)} | {"NR-4": {}}
    predictions = torch.zeros(5, 4)
    texts = texts_of(plot_run(HISTORY, (predictions, predictions.long()), [*targets], None, targets, "y", "nats"))
    assert {*targets, "average precision, %, test split"} <= set(texts)


def test_without_a_test_split() -> None:
    texts = texts_of(plot_run(HISTORY, None, ["a", "b"], None, None, "y", "nats"))
    assert "loss, nats" in texts and "y, true" not in texts
    assert not math.isnan(len(texts_of(plot_run([], None, [], None, None, "y", "nats"))))
