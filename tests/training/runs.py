# SPDX-License-Identifier: Apache-2.0
"""Whole training runs, small enough for a test."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.pretrain import pretrain
from bionemo.training.module import TrainingModule

from ..conftest import EXAMPLES

TINY = [
    "model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.micro_batch_size=4",
    "model.seq_length=64", "data@model.data=mock", "model.data.mock.num_sequences=300", "model.data.num_workers=0",
    "model.data.mock.num_validation_sequences=20", "model.data.mock.min_length=20", "model.data.mock.max_length=90",
    "trainer.max_steps=8", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1", "trainer.precision=32",
    "trainer.accelerator=cpu", "trainer.num_sanity_val_steps=0", "exp_manager.create_wandb_logger=False",
]  # fmt: skip


class Stop(Exception):
    """What interrupts a run in these tests."""


def config(directory: Path, *overrides: str, model: str = "esm2nv") -> RunConfig:
    name = {"esm2nv": "pretrain_esm2_8M", "esm1nv": "pretrain_small"}[model]
    return load(name, [*TINY, f"exp_manager.exp_dir={directory}", *overrides], EXAMPLES / model / "conf")


def train(cfg: RunConfig, stop_before_step: int | None = None) -> None:
    """Run a training; with `stop_before_step`, it dies when that step is about to begin."""
    with pytest.MonkeyPatch.context() as patch:
        if stop_before_step is not None:
            original = TrainingModule.training_step

            def step(self: TrainingModule, batch: object) -> None:
                if self.trainer.global_step + 1 == stop_before_step:
                    raise Stop
                original(self, batch)

            patch.setattr(TrainingModule, "training_step", step)
            with pytest.raises(Stop):
                pretrain(cfg)
        else:
            pretrain(cfg)


def last_checkpoint(directory: Path) -> Path:
    (path,) = (directory / "checkpoints").glob("*-last")
    return path


def fingerprint(directory: Path) -> dict[str, str]:
    """Checksums of everything in the last checkpoint: weights, optimizer, position in the data, counters."""
    checksums: dict[str, str] = json.loads((last_checkpoint(directory) / "manifest.json").read_text())["sha256"]
    return checksums


def logged(directory: Path, key: str) -> dict[int, float]:
    """Every value of a metric by step; a step that was trained twice must have given the same value twice."""
    values: dict[int, float] = {}
    for file in sorted(directory.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        if key in events.Tags()["scalars"]:
            for event in events.Scalars(key):
                assert values.setdefault(event.step, event.value) == event.value
    return values
