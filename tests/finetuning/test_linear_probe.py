# SPDX-License-Identifier: Apache-2.0
"""Heads on vectors that stay: they learn what can be learned, are told apart from chance, and disturb nothing."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy import stats
from sklearn import metrics as reference

import bionemo
from bionemo.cli.finetune import carry_out
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig, OptimConfig, SchedConfig
from bionemo.finetuning import heads, linear_probe, metrics
from bionemo.finetuning.features import Features, compute
from bionemo.finetuning.heads import SequenceHead, TokenHead
from bionemo.finetuning.task import NOT_ASKED, Split
from bionemo.inference.batching import Limits

ADAM = OptimConfig(
    name="adam", lr=1e-2, weight_decay=0.0, betas=[0.9, 0.999], eps=1e-8,
    sched=SchedConfig(name="WarmupAnnealing", warmup_steps=2, min_lr=1e-4),
)  # fmt: skip
RECIPE = linear_probe.Recipe(epochs=8, batch_size=16, shuffle=True, seed=1, optim=ADAM)
CPU = torch.device("cpu")


def tokens(count: int, seed: int) -> Features:
    """A class that the token and its neighbour decide; a fifth of the tokens are not asked of."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, count)
    vectors = rng.standard_normal((int(lengths.sum()), 8)).astype(np.float32)
    ends = lengths.cumsum() - 1
    following = np.append(vectors[1:, 1], 0.0)
    following[ends] = 0.0
    targets = (vectors[:, 0] + following > 0).astype(np.int64) + (vectors[:, 0] > 1)
    targets[rng.random(len(targets)) < 0.2] = NOT_ASKED
    return Features(vectors, targets, lengths)


def numbers(count: int, seed: int) -> Features:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 8)).astype(np.float32)
    return Features(vectors, (vectors[:, 0] - 2 * vectors[:, 1]).astype(np.float32), np.ones(count, np.int64))


def test_classes_of_tokens_are_learned() -> None:
    trained = linear_probe.train(lambda: TokenHead(8, 3), tokens(300, 0), tokens(50, 1), RECIPE, CPU)
    figures = linear_probe.evaluate(trained.head, tokens(50, 2))
    assert figures["accuracy"] > 85
    assert trained.history[0]["train_loss"] > 2 * trained.history[-1]["train_loss"]


def test_numbers_are_learned() -> None:
    trained = linear_probe.train(lambda: SequenceHead(8, 1, (32,), 0.0), numbers(400, 0), numbers(50, 1), RECIPE, CPU)
    assert linear_probe.evaluate(trained.head, numbers(50, 2))["spearman"] > 0.95


def test_numbers_are_learned_from_vectors_that_hardly_differ() -> None:
    """As the means over a protein and over its single variants do."""
    where = np.random.default_rng(3).standard_normal(8).astype(np.float32) * 10
    near = [replace(each, vectors=where + each.vectors / 500) for each in (numbers(400, 0), numbers(50, 1))]
    trained = linear_probe.train(lambda: SequenceHead(8, 1, (32,), 0.0), near[0], near[1], RECIPE, CPU)
    assert linear_probe.evaluate(trained.head, near[1])["spearman"] > 0.95


def test_numbers_are_learned_in_any_unit() -> None:
    """Units change neither what is learned nor how it is judged."""
    data, val = numbers(400, 0), numbers(50, 1)
    figures = []
    for factor, origin in ((1.0, 0.0), (0.001, 0.0), (20.0, 300.0)):
        given = [replace(each, targets=(each.targets * factor + origin).astype(np.float32)) for each in (data, val)]
        trained = linear_probe.train(lambda: SequenceHead(8, 1, (32,), 0.0), given[0], given[1], RECIPE, CPU)
        figures.append(linear_probe.evaluate(trained.head, given[1])["r2"])
    assert min(figures) > 0.8
    assert max(figures) - min(figures) < 0.02


@pytest.mark.parametrize("rows_at_once", [7, 1000])
def test_mean_and_scale_of_vectors(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_ROWS_AT_ONCE", rows_at_once)
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32) * [1, 5, 0.01, 0] + [0, 1, 1000, 3]
    head = SequenceHead(4, 1)
    numbers = np.array([70, 40, 40, 50], np.float32)
    head.standardise(vectors.astype(np.float32), numbers)
    mean, scale = head.mean.numpy(), head.scale.numpy()
    exact = vectors.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(scale[:3], 1 / exact.std(0)[:3], rtol=1e-5)
    assert scale[3] == pytest.approx(1000 / exact.std(0).max())  # no difference is made large
    assert (float(head.answer_mean), float(head.answer_scale)) == (50, pytest.approx(150**0.5))
    head.standardise(np.ones((3, 4), np.float32), np.full(3, 7, np.float32))
    assert (head.scale == 1).all()
    assert (float(head.answer_mean), float(head.answer_scale)) == (7, 1)


def test_the_best_epoch_is_kept() -> None:
    """With a rate at which it learns the training split by heart, that is not the last."""
    rng = np.random.default_rng(0)
    data, val = (replace(numbers(40, seed), targets=rng.standard_normal(40).astype(np.float32)) for seed in (0, 1))
    trained = linear_probe.train(lambda: SequenceHead(8, 1, (64,), 0.0), data, val, replace(RECIPE, epochs=30), CPU)
    losses = [figures["val_loss"] for figures in trained.history]
    assert trained.best == 1 + int(np.argmin(losses)) < 30
    assert linear_probe.evaluate(trained.head, val)["loss"] == pytest.approx(min(losses), rel=1e-6)


def test_the_same_seed_gives_the_same_head_and_disturbs_nothing() -> None:
    data, val = tokens(40, 0), tokens(10, 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (
        linear_probe.train(lambda: TokenHead(8, 3), data, val, replace(RECIPE, seed=seed, epochs=2), CPU).head
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert not torch.equal(one.first.weight, other.first.weight)  # type: ignore[union-attr,arg-type]


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    data = numbers(40, 0)
    bad = replace(data, vectors=np.full_like(data.vectors, np.nan))
    with pytest.raises(UserError, match="epoch 1: the loss is nan: lower the learning rate"):
        linear_probe.train(lambda: SequenceHead(8, 1), bad, None, RECIPE, CPU)


def test_figures_are_those_of_other_libraries() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    found = metrics.of_classes(logits, targets)
    said = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(100 * reference.accuracy_score(targets, said), rel=1e-5)
    assert found["balanced_accuracy"] == pytest.approx(
        100 * reference.balanced_accuracy_score(targets, said), rel=1e-5
    )
    assert found["f1"] == pytest.approx(reference.f1_score(targets, said, average="macro"), rel=1e-5)
    assert metrics.confusion(logits, targets) == reference.confusion_matrix(targets, said).tolist()
    x, y = torch.randn(2, 100, generator=generator)
    in_small_units = metrics.of_numbers(x / 1000 + 1, (x + y) / 1000 + 1)
    figures = metrics.of_numbers(x, x + y)
    for name in ("spearman", "pearson", "r2"):
        assert in_small_units[name] == pytest.approx(figures[name], rel=2e-3)
    assert figures["spearman"] == pytest.approx(stats.spearmanr(x, x + y).statistic, rel=1e-4)
    assert figures["pearson"] == pytest.approx(stats.pearsonr(x, x + y).statistic, rel=1e-4)
    assert figures["mse"] == pytest.approx(float((y**2).mean()), rel=1e-4)
    assert figures["r2"] == pytest.approx(reference.r2_score(x + y, x), rel=1e-4)


# with a model


def test_features_are_what_the_model_says(model: Path, tmp_path: Path) -> None:
    ours = bionemo.load(model)
    texts = ["MKTAYIAKQR", "ACD" * 50, "G"]  # the second has 150 residues, of which 94 are read
    split = Split(texts, [np.arange(len(text)) for text in texts])
    found, cut = compute(ours, split, "token-level-classification", Limits(40), tmp_path / "x.npy")
    assert cut == 1
    assert found.lengths.tolist() == [10, 94, 1]
    assert np.array_equal(found.vectors, np.concatenate(ours.hiddens([text[:94] for text in texts])))
    assert found.targets.tolist() == [*range(10), *range(94), 0]
    assert found.rows_of(np.array([2, 0])).tolist() == [104, *range(10)]
    whole, _ = compute(ours, Split(texts, [np.array(n, np.float32) for n in range(3)]), "regression", Limits())
    assert np.array_equal(whole.vectors, ours.embed([text[:94] for text in texts]))


def written(directory: Path) -> Path:
    """Helices where there is an A, strands where there is a V; the rest is loop, and sometimes not resolved."""
    rng = np.random.default_rng(0)
    for split, count in {"train": 60, "val": 12, "test": 12}.items():
        (directory / split).mkdir(parents=True)
        rows = ["id,sequence,3state,resolved"]
        for number in range(count):
            text = "".join(rng.choice(list("AVGKL"), rng.integers(5, 40)))
            labels = text.translate(str.maketrans("AVGKL", "HECCC"))
            rows.append(f"{split}{number},{text},{labels},{'0' + '1' * (len(text) - 1)}")
        (directory / split / "x000.csv").write_text("\n".join(rows) + "\n")
    return directory


def words(model: Path, data: Path, directory: Path) -> list[str]:
    return [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", "trainer.accelerator=cpu",
            f"exp_manager.exp_dir={directory}", "model.micro_batch_size=8", "trainer.max_epochs=4",
            "model.finetuning_optim.lr=0.01"]  # fmt: skip


def run(*given: str) -> None:
    carry_out(load("downstream_flip_sec_str", given, schema=DownstreamConfig))


def test_a_run_leaves_a_head_and_a_report(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*words(model, written(tmp_path / "data"), tmp_path / "run"))
    said = capsys.readouterr().out
    assert "60 train (" in said
    assert "best epoch" in said
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"head.safetensors", "report.json", "report.png"}
    told = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told["test_accuracy"] > 90
    assert told["classes"] == ["C", "E", "H"]
    assert sum(map(sum, told["confusion"])) == sum(
        row.split(",")[3].count("1") for row in (tmp_path / "data" / "test" / "x000.csv").read_text().split()[1:]
    )
    assert len(told["epochs"]) == 4
    with safe_open(tmp_path / "run" / "head.safetensors", "pt") as file:
        assert json.loads(file.metadata()["task"])["classes"] == ["C", "E", "H"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["model.restore_encoder_path=null"], "give model.restore_encoder_path="),
        (["model.restore_encoder_path=none"], "none: there is no such checkpoint"),
        (["model.data.target_column=[3state,8state]"], "one target at a time"),
        (["model.data.target_column=8state"], "has no column '8state', but 'id', 'sequence', '3state', 'resolved'"),
        (["model.data.target_sizes=[2]"], "has 3 labels (C, E, H), but target_sizes says 2"),
        (["model.data.dataset.val=x001"], "x001.csv"),
        (["trainer.max_epochs=null"], "trainer.max_epochs=None"),
    ],
)
def test_mistakes(more: list[str], told: str, model: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        run(*words(model, data, tmp_path / "run"), *more)
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_command_line_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from bionemo.cli.finetune import main

    monkeypatch.setattr(sys, "argv", ["finetune", "--help"])
    main()
    assert "model.restore_encoder_path=" in capsys.readouterr().out
