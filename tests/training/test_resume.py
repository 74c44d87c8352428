# SPDX-License-Identifier: Apache-2.0
"""A run that was interrupted and started again is the run that was not, bit for bit."""

from pathlib import Path

import pytest

from .runs import config, fingerprint, logged, train

EVERY_3 = "exp_manager.checkpoint_callback_params.every_n_train_steps=3"


@pytest.fixture(scope="module", params=["esm1nv", "esm2nv"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(f"whole-{request.param}")
    train(config(directory, EVERY_3, model=request.param))
    return request.param, directory


@pytest.mark.parametrize(("workers", "stop"), [(0, 2), (0, 4), (0, 6), (0, 8), (2, 5)])
def test_resumed_run_is_bitwise_the_uninterrupted_one(
    uninterrupted: tuple[str, Path], tmp_path: Path, workers: int, stop: int
) -> None:
    model, whole = uninterrupted
    cfg = config(tmp_path, EVERY_3, f"model.data.num_workers={workers}", model=model)
    train(cfg, stop_before_step=stop)
    train(cfg)
    assert logged(tmp_path, "reduced_train_loss") == logged(whole, "reduced_train_loss")
    assert len(logged(whole, "reduced_train_loss")) == 8
    assert logged(tmp_path, "val_loss")[8] == logged(whole, "val_loss")[8]
    assert fingerprint(tmp_path) == fingerprint(whole)


def test_a_longer_run_continues_a_finished_one(uninterrupted: tuple[str, Path], tmp_path: Path) -> None:
    model, _ = uninterrupted
    schedule = "model.optim.sched.max_steps=8"
    train(config(tmp_path, "trainer.max_steps=6", schedule, EVERY_3, model=model))
    train(config(tmp_path, schedule, EVERY_3, model=model))
    assert list(logged(tmp_path, "reduced_train_loss")) == list(range(1, 9))
