# SPDX-License-Identifier: Apache-2.0
"""Patches of private parts of Lightning are undone afterwards, and have an effect."""

import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import subprocess_script

from bionemo.training import patches


def boring_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", max_steps=3,
                      enable_progress_bar=False, enable_model_summary=False, **options)  # fmt: skip


@pytest.mark.parametrize("disabled", [False, True])
def test_signals_are_broadcast_before_every_step_unless_disabled(
    monkeypatch: pytest.MonkeyPatch, disabled: bool
) -> None:
    calls = []
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda _: calls.append(1))
    trainer = boring_trainer()
    if disabled:
        patches.disable_sigterm_broadcast(trainer)
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer.fit(BoringModel())
    finally:
        torch.distributed.destroy_process_group()
    assert bool(calls) != disabled


def test_sigterm_is_ignored_after_training() -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = boring_trainer(
        callbacks=LambdaCallback(on_train_end=lambda each, _: patches.ignore_sigterm_after_training(each))
    )
    try:
        trainer.fit(BoringModel())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_process_observer_is_restored() -> None:
    original = subprocess_script._launch_process_observer
    with patches.disable_process_observer():
        assert subprocess_script._launch_process_observer is not original
    assert subprocess_script._launch_process_observer is original


def test_only_one_trainer_is_patched() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    patches.disable_sigterm_broadcast(trainer)
    patches.ignore_sigterm_after_training(trainer)
    assert "_broadcast_sigterm_tensor" in vars(trainer.fit_loop.epoch_loop)
    assert trainer._signal_connector._original_handlers[signal.SIGTERM] == signal.SIG_IGN
    other = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert "_broadcast_sigterm_tensor" not in vars(other.fit_loop.epoch_loop)
    assert signal.SIGTERM not in other._signal_connector._original_handlers
