# SPDX-License-Identifier: Apache-2.0
"""Patches of private parts of Lightning are undone afterwards and verified for one version of its source."""

import hashlib
import inspect
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from bionemo.training import patches

SOURCES: dict[Callable[..., Any], str] = {
    subprocess_script._launch_process_observer: "7cad8dc4cafba3a8",
    _TrainingEpochLoop._broadcast_sigterm_tensor: "d4e504c3f7d8bcb5",
    _SignalConnector.teardown: "adc8388942cc3edb",
}


@pytest.mark.parametrize("function", SOURCES, ids=lambda function: function.__qualname__)
def test_the_patched_source_is_the_one_that_was_verified(function: Callable[..., Any]) -> None:
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    assert found == SOURCES[function], (
        f"the source of {function.__qualname__} has changed in lightning {pl.__version__}: check that the patch in "
        f"bionemo/training/patches.py is still correct, then set the checksum to {found}"
    )


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
