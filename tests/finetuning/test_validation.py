# SPDX-License-Identifier: Apache-2.0
"""Validation on a downstream task during pretraining measures the embeddings and does not change training."""

from pathlib import Path

import pytest

import bionemo
from bionemo.config.schema import OptimConfig, SchedConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.heads import TokenHead
from tests.support.finetuning import written
from tests.support.runs import fingerprint, logged, run, run_on_ranks


def overrides(data: Path) -> list[str]:
    key = "model.dwnstr_task_validation"
    return [f"{key}.enabled=True", f"{key}.dataset.dataset_path={data}", f"{key}.dataset.num_epochs=2",
            f"{key}.dataset.batch_size=8", f"{key}.dataset.optim.lr=0.01", "model.hidden_dropout=0.1"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("task") / "data")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "run"
    assert run(directory, "model.hidden_dropout=0.1")[0] == 0
    return directory


def test_validation_does_not_change_the_weights(data: Path, alone: Path, tmp_path: Path) -> None:
    status, console = run(tmp_path / "run", *overrides(data))
    assert status == 0, console
    assert fingerprint(tmp_path / "run") == fingerprint(alone)
    for key in ("reduced_train_loss", "val_loss", "grad_norm"):
        assert logged(tmp_path / "run", key) == logged(alone, key)
    for key in ("dwnstr_task_val_loss", "test_3state_accuracy", "dwnstr_task_seconds"):
        assert list(logged(tmp_path / "run", key)) == [4, 8]
    assert sum("test_3state_accuracy" in line and "dwnstr_task_seconds" in line for line in console) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "model.tensor_model_parallel_size=2"])
def test_parallel_layouts_give_equal_metrics(layout: str, data: Path, tmp_path: Path) -> None:
    """Compare data and tensor parallelism on two ranks with one rank, up to rounding in training."""
    assert run(tmp_path / "one", *overrides(data), "model.micro_batch_size=8")[0] == 0
    given = [layout, "model.micro_batch_size=8"] if layout else ["model.micro_batch_size=4"]
    ended = run_on_ranks(tmp_path / "two", *overrides(data), *given, ranks=2)
    assert [status for status, _ in ended] == [0, 0], ended
    one, two = (logged(tmp_path / name, "dwnstr_task_val_loss") for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-3)


def test_metrics_equal_those_of_the_saved_checkpoint(data: Path, tmp_path: Path) -> None:
    """Run the same task with the fine-tuning command on the saved weights."""
    assert run(tmp_path / "run", *overrides(data))[0] == 0
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*-last")
    model = bionemo.load(saved)
    from bionemo.config.schema.downstream import DatasetConfig, DownstreamDataConfig
    from bionemo.finetuning.features import compute_features
    from bionemo.finetuning.task_data import read_splits
    from bionemo.inference.batching import DEFAULT_LIMITS

    config = DownstreamDataConfig(
        task_name="x", task_type="token-level-classification", preprocessed_data_path="", dataset_path=str(data),
        dataset=DatasetConfig(train="x000", val="x000", test="x000"), sequence_column="sequence",
        target_column="3state", target_sizes=[3], mask_column="resolved", emb_batch_size=3, shuffle=True,
        split="auto", min_seq_id=0.3, coverage=0.8, on_invalid="skip", wild_type=None, preprocessing=None,  # type: ignore[arg-type]
    )  # fmt: skip
    splits, classes, *_ = read_splits(config, "x", ["train", "test"])
    train, test = (
        compute_features(model, splits[name], config.task_type, DEFAULT_LIMITS)[0] for name in ("train", "test")
    )
    optim = OptimConfig(
        name="adam", lr=0.01, weight_decay=0.01, betas=[0.9, 0.999], eps=1e-8,
        sched=SchedConfig(name="WarmupAnnealing", min_lr=1e-5, warmup_ratio=0.01, max_steps=1000),
    )  # fmt: skip
    recipe = linear_probe.ProbeConfig(epochs=2, batch_size=8, shuffle=True, seed=1234, optim=optim)
    trained = linear_probe.train_head(
        lambda: TokenHead(model.hidden_size, len(classes)), train, None, recipe, model.device
    )
    found = linear_probe.evaluate(trained.head, test)
    assert found["loss"] == pytest.approx(logged(tmp_path / "run", "dwnstr_task_val_loss")[8], rel=1e-6)
    assert found["accuracy"] == pytest.approx(logged(tmp_path / "run", "test_3state_accuracy")[8], rel=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.dwnstr_task_validation.dataset.dataset_path=/none"], "x000.csv"),
        (
            ["model.dwnstr_task_validation.dataset.mask_column=[mask]"],
            "has no column 'mask', but 'id', 'sequence', '3state', 'resolved': set "
            "model.dwnstr_task_validation.dataset.mask_column",
        ),
        (["model.dwnstr_task_validation.dataset.target_sizes=[2]"], "but target_sizes is 2"),
    ],
)
def test_user_errors_are_reported_before_writing(more: list[str], message: str, data: Path, tmp_path: Path) -> None:
    status, console = run(tmp_path / "run", *overrides(data), *more)
    assert status == 1
    assert message in console[-1]
    assert not (tmp_path / "run").exists()
