# SPDX-License-Identifier: Apache-2.0
"""Heads on frozen embeddings learn the task, keep the best epoch, and do not change the global random state."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import bionemo
from bionemo.common.errors import UserError
from bionemo.finetuning import heads, linear_probe, metrics
from bionemo.finetuning.features import Features, compute_features
from bionemo.finetuning.heads import SequenceHead, TokenHead
from bionemo.finetuning.labels import Split
from bionemo.inference.batching import BatchLimits
from tests.support.finetuning import CPU, RECIPE, overrides, run, tokens, written


def numbers(count: int, seed: int) -> Features:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 8)).astype(np.float32)
    return Features(vectors, (vectors[:, 0] - 2 * vectors[:, 1]).astype(np.float32), np.ones(count, np.int64))


def test_token_classification() -> None:
    trained = linear_probe.train_head(lambda: TokenHead(8, 3), tokens(300, 0), tokens(50, 1), RECIPE, CPU)
    figures = linear_probe.evaluate(trained.head, tokens(50, 2))
    assert figures["accuracy"] > 85
    assert trained.history[0]["train_loss"] > 2 * trained.history[-1]["train_loss"]


def test_regression() -> None:
    trained = linear_probe.train_head(
        lambda: SequenceHead(8, 1, (32,), 0.0), numbers(400, 0), numbers(50, 1), RECIPE, CPU
    )
    assert linear_probe.evaluate(trained.head, numbers(50, 2))["spearman"] > 0.95


def test_regression_with_nearly_equal_embeddings() -> None:
    """The mean embeddings of single variants of one protein are nearly equal."""
    where = np.random.default_rng(3).standard_normal(8).astype(np.float32) * 10
    near = [replace(each, vectors=where + each.vectors / 500) for each in (numbers(400, 0), numbers(50, 1))]
    trained = linear_probe.train_head(lambda: SequenceHead(8, 1, (32,), 0.0), near[0], near[1], RECIPE, CPU)
    assert linear_probe.evaluate(trained.head, near[1])["spearman"] > 0.95


def test_regression_does_not_depend_on_the_unit() -> None:
    """Scale and offset of the targets have no effect on R^2 apart from rounding, despite weight decay and clipping."""
    data, val = numbers(400, 0), numbers(50, 1)
    found = []
    for factor, origin in ((1.0, 0.0), (0.001, 0.0), (20.0, 300.0)):
        given = [replace(each, targets=(each.targets * factor + origin).astype(np.float32)) for each in (data, val)]
        recipe = replace(RECIPE, optim=replace(RECIPE.optim, name="adam", weight_decay=0.01), clip=0.5)
        trained = linear_probe.train_head(lambda: SequenceHead(8, 1, (32,), 0.0), given[0], given[1], recipe, CPU)
        found.append(linear_probe.evaluate(trained.head, given[1])["r2"])
    assert min(found) > 0.8
    assert max(found) - min(found) < 1e-4


@pytest.mark.parametrize("rows_at_once", [7, 1000])
def test_mean_and_scale_of_embeddings(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_STATISTICS_ROWS", rows_at_once)
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32) * [1, 5, 0.01, 0] + [0, 1, 1000, 3]
    head = SequenceHead(4, 1)
    numbers = np.array([70, 40, 40, 50], np.float32)
    head.fit_statistics(vectors.astype(np.float32), numbers)
    mean, scale = head.mean.numpy(), head.scale.numpy()
    exact = vectors.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(scale[:3], 1 / exact.std(0)[:3], rtol=1e-5)
    assert scale[3] == pytest.approx(1000 / exact.std(0).max())  # constant features are not amplified
    assert (float(head.target_mean), float(head.target_scale)) == (50, pytest.approx(150**0.5))
    head.fit_statistics(np.ones((3, 4), np.float32), np.full(3, 7, np.float32))
    assert (head.scale == 1).all()
    assert (float(head.target_mean), float(head.target_scale)) == (7, 1)


def test_the_best_epoch_is_kept() -> None:
    """The targets are random, so the head overfits and the best epoch is not the last."""
    rng = np.random.default_rng(0)
    data, val = (replace(numbers(40, seed), targets=rng.standard_normal(40).astype(np.float32)) for seed in (0, 1))
    trained = linear_probe.train_head(
        lambda: SequenceHead(8, 1, (64,), 0.0), data, val, replace(RECIPE, epochs=30), CPU
    )
    losses = [figures["val_loss"] for figures in trained.history]
    assert trained.best == 1 + int(np.argmin(losses)) < 30
    assert linear_probe.evaluate(trained.head, val)["loss"] == pytest.approx(min(losses), rel=1e-6)


def test_equal_seeds_give_equal_heads_and_the_global_random_state_is_kept() -> None:
    data, val = tokens(40, 0), tokens(10, 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (
        linear_probe.train_head(lambda: TokenHead(8, 3), data, val, replace(RECIPE, seed=seed, epochs=2), CPU).head
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert not torch.equal(one.first.weight, other.first.weight)  # type: ignore[union-attr,arg-type]


def test_a_nan_loss_ends_the_run() -> None:
    data = numbers(40, 0)
    bad = replace(data, vectors=np.full_like(data.vectors, np.nan))
    with pytest.raises(UserError, match="epoch 1: the loss is not finite: lower the learning rate"):
        linear_probe.train_head(lambda: SequenceHead(8, 1), bad, None, RECIPE, CPU)


def test_metrics_of_classes_equal_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    found, predicted = metrics.classification_metrics(logits, targets), logits.argmax(1)
    counts = [[int(((targets == i) & (predicted == j)).sum()) for j in range(4)] for i in range(4)]
    assert metrics.confusion_matrix(logits, targets) == counts
    hits, true, guessed = np.diag(counts), np.sum(counts, 1), np.sum(counts, 0)
    expected = {"accuracy": hits.sum() / 200, "balanced_accuracy": np.mean(hits / true),
                "f1": np.mean(2 * hits / (true + guessed))}  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(100 * value, rel=1e-6)


def test_metrics_of_numbers_equal_their_definitions() -> None:
    x, y = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    in_small_units = metrics.regression_metrics(x / 1000 + 1, (x + y) / 1000 + 1)
    figures = metrics.regression_metrics(x, x + y)
    for name in ("spearman", "pearson", "r2"):
        assert in_small_units[name] == pytest.approx(figures[name], rel=2e-3)
    ranks = [each.argsort().argsort().numpy() for each in (x, x + y)]
    assert figures["spearman"] == pytest.approx(np.corrcoef(ranks)[0, 1], rel=1e-6)
    assert figures["pearson"] == pytest.approx(np.corrcoef([x.numpy(), (x + y).numpy()])[0, 1], rel=1e-6)
    assert figures["mse"] == pytest.approx(float((y**2).mean()), rel=1e-4)
    assert figures["r2"] == pytest.approx(1 - float((y**2).mean() / (x + y).var(correction=0)), rel=1e-5)


def test_correlations_with_constant_numbers_are_not_defined() -> None:
    x, constant = torch.arange(5.0), torch.full((5,), 3.0)
    for pair in ((constant, x), (x, constant)):
        assert math.isnan(metrics.regression_metrics(*pair)["spearman"])


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("classes", [2, 5])
def test_area_under_the_roc_curve(classes: int, scale: float) -> None:
    """Probabilities that fp32 rounds to 1 keep their order; a class without rows does not count.

    The area is the share of pairs of a member and another row in the right order; equal scores count half.
    """
    generator = torch.Generator().manual_seed(0)
    logits, targets = (
        torch.randn(300, 5, generator=generator).double(),
        torch.randint(classes, (300,), generator=generator),
    )
    logits[torch.arange(300), targets] += 0.7
    logits = (4 * logits[:, :classes]).round() / 4  # some scores are equal
    chances, expected = logits.softmax(1).round(decimals=12), []
    for each in range(classes):
        members, others = chances[targets == each, each], chances[targets != each, each]
        order = (members[:, None] > others).double() + (members[:, None] == others).double() / 2
        expected.append(float(order.mean()))
    padded = torch.cat([logits, torch.full((300, 1), -1e4, dtype=torch.float64)], 1)
    for given in (logits, padded) if scale == 1 else (logits,):
        found = metrics.classification_metrics(given * scale, targets)
        if scale == 1:
            assert found["roc_auc"] == pytest.approx(100 * np.mean(expected), abs=2e-3)
        elif classes == 2:
            assert found["roc_auc"] == pytest.approx(100 * expected[0], abs=1e-4)  # probabilities are 0 and 1
        recalls = [float((given.argmax(1) == each)[targets == each].double().mean()) for each in range(classes)]
        assert found["balanced_accuracy"] == pytest.approx(100 * np.mean(recalls), rel=1e-5)


def test_one_class_has_no_balanced_accuracy() -> None:
    found = metrics.classification_metrics(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.zeros(2, dtype=torch.int64))
    assert found["accuracy"] == 50
    assert np.isnan([found["balanced_accuracy"], found["roc_auc"]]).all()


# with a model


def test_features_equal_the_embeddings_of_the_model(model: Path, tmp_path: Path) -> None:
    ours = bionemo.load(model)
    texts = ["MKTAYIAKQR", "ACD" * 50, "G"]  # the second sequence has 150 residues, of which 94 fit
    split = Split(texts, [np.arange(len(text)) for text in texts], texts)
    found, cut = compute_features(ours, split, "token-level-classification", BatchLimits(40), tmp_path / "x.npy")
    assert cut == 1
    assert found.lengths.tolist() == [10, 94, 1]
    assert np.array_equal(found.vectors, np.concatenate(ours.hidden_states([text[:94] for text in texts])))
    assert found.targets.tolist() == [*range(10), *range(94), 0]
    assert found.rows_of(np.array([2, 0])).tolist() == [104, *range(10)]
    numbers = Split(texts, [np.array(n, np.float32) for n in range(3)], texts)
    whole, _ = compute_features(ours, numbers, "regression", BatchLimits())
    assert np.array_equal(whole.vectors, ours.embed([text[:94] for text in texts]))


def test_invalid_sequences_are_named_by_file_and_line(model: Path) -> None:
    ours = bionemo.load(model)
    locations = ["x.csv:2", "x.csv:3"]
    digits = Split(["MKT", "123"], [np.array(0.0, np.float32)] * 2, locations)
    with pytest.raises(UserError, match=r"^x\.csv:3: the sequence contains no letter of the vocabulary"):
        compute_features(ours, digits, "regression", BatchLimits())
    spaced = Split(["MKT", "M K"], [np.zeros(3, np.int64)] * 2, locations)
    with pytest.raises(UserError, match=r"^x\.csv:3: the sequence has 3 labels and 2 tokens"):
        compute_features(ours, spaced, "token-level-classification", BatchLimits())


def test_a_run_writes_a_head_and_a_report(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*overrides(model, written(tmp_path / "data"), tmp_path / "run"))
    output = capsys.readouterr().out
    assert "60 train (" in output
    assert "best epoch" in output
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"head.safetensors", "test_predictions.csv", "report.json", "report.png", "report.svg"}
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["test_accuracy"] > 90
    assert report["classes"] == ["C", "E", "H"]
    assert sum(map(sum, report["confusion"])) == sum(
        row.split(",")[3].count("1") for row in (tmp_path / "data" / "test" / "x000.csv").read_text().split()[1:]
    )
    assert len(report["epochs"]) == 4
    with safe_open(tmp_path / "run" / "head.safetensors", "pt") as file:
        assert json.loads(file.metadata()["task"])["classes"] == ["C", "E", "H"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.restore_encoder_path=null"], "give MODEL, or model.restore_encoder_path="),
        (["model.restore_encoder_path=none"], "none: there is no such checkpoint"),
        (
            ["model.data.target_column=[3state,8state]"],
            "model.data.task_type=token-level-classification: several targets are numbers (regression) or 0 and 1",
        ),
        (
            ["model.data.target_column=8state"],
            "has no column '8state' (did you mean 3state?), but 'id', 'sequence', '3state', 'resolved': set "
            "model.data.target_column",
        ),
        (["model.data.target_sizes=[2]"], "has 3 labels (C, E, H), but target_sizes is 2"),
        (["model.data.dataset.val=x001"], "x001.csv"),
        (["trainer.max_epochs=null"], "trainer.max_epochs=None"),
    ],
)
def test_mistakes(more: list[str], message: str, model: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        run(*overrides(model, data, tmp_path / "run"), *more)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from bionemo.cli.finetune import main

    monkeypatch.setattr(sys, "argv", ["finetune", "--help"])
    main()
    assert "model.restore_encoder_path=" in capsys.readouterr().out
