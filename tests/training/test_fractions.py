# SPDX-License-Identifier: Apache-2.0
"""Fractions of batches are those of the rows in a split."""

from pathlib import Path

import pytest

from tests.support.runs import config, logged, run, train

# 16 training batches of an epoch, 8 validation batches
ROWS = [
    "data@model.data=mock", "model.data.mock.num_sequences=64", "model.data.mock.num_validation_sequences=32",
    "model.data.packing=False", "model.micro_batch_size=4",
]  # fmt: skip
EPOCHS = ["trainer.max_steps=-1", "trainer.max_epochs=2", "model.optim.sched.max_steps=100"]


def validation_losses(directory: Path, *overrides: str) -> dict[int, float]:
    train(config(directory, *ROWS, *overrides))
    return logged(directory, "val_loss")


def test_a_fraction_of_the_validation_set(tmp_path: Path) -> None:
    half = validation_losses(tmp_path / "half", "trainer.limit_val_batches=0.5")
    assert half == validation_losses(tmp_path / "four", "trainer.limit_val_batches=4")
    assert half != validation_losses(tmp_path / "all")


@pytest.mark.slow
def test_a_fraction_of_the_test_set(tmp_path: Path) -> None:
    found = []
    for limit in ("0.26", "2", "1.0"):
        status, lines = run(tmp_path / limit, *ROWS, "do_testing=True", f"trainer.limit_test_batches={limit}")
        assert status == 0, lines
        found += [line for line in lines if line.startswith("test")]
    assert found[0] == found[1] != found[2]


def test_a_fraction_of_an_epoch(tmp_path: Path) -> None:
    assert list(validation_losses(tmp_path / "half", *EPOCHS, "trainer.val_check_interval=0.5")) == [8, 16, 24, 32]
    assert list(validation_losses(tmp_path / "one", *EPOCHS, "trainer.val_check_interval=1.0")) == [16, 32]
    two = ["trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=2"]
    assert list(validation_losses(tmp_path / "two", *EPOCHS, *two)) == [32]


def test_a_limit_of_training_batches_is_named_when_it_ends_the_run(tmp_path: Path) -> None:
    _, lines = run(tmp_path / "run", *ROWS, "trainer.limit_train_batches=3", "trainer.val_check_interval=1")
    assert any("the training ended after trainer.limit_train_batches=3 before" in line for line in lines), lines
