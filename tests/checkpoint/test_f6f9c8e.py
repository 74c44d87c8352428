# SPDX-License-Identifier: Apache-2.0
"""Runs interrupted by commit f6f9c8e are resumed by the current code exactly as f6f9c8e resumed them.

`tests/fixtures/f6f9c8e/FAMILY/` holds a checkpoint of step 4 of 8 written by that commit, the data files of the run
if there are any, and `expected.json`: the overrides of the run, the results of f6f9c8e in steps 5 to 8, and checksums.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rdkit import rdBase
from torch import Tensor

from bionemo.checkpoint import Checkpoint
from bionemo.cli.pretrain import pretrain
from bionemo.config.compose import load
from bionemo.models.language_model import LanguageModel
from tests.conftest import ROOT
from tests.support.runs import last_checkpoint, logged

FIXTURES = ROOT / "tests" / "fixtures" / "f6f9c8e"
FAMILIES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.json"))
FIRST, LAST = 5, 8  # steps after the resume
MICRO_BATCHES = 2  # of a step; trainer.accumulate_grad_batches of the fixtures


class SaveAtStart(pl.Callback):
    """Saves the loaded state before the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def sha256(tensor: Tensor) -> str:
    """Return the checksum of type, shape and values."""
    head = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} "
    return hashlib.sha256(head.encode() + tensor.contiguous().numpy().tobytes()).hexdigest()


def checksums(path: Path) -> dict[str, str]:
    """Return the checksum of every tensor of a checkpoint: weights and optimizer state."""
    checkpoint = Checkpoint(path)
    return {name: sha256(checkpoint.read(name)) for name in checkpoint.shapes()}


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(json.loads((path / "manifest.json").read_text())["step"])


def sequences(values: Tensor, lengths: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """Split a packed sequence into its sequences, without padding and empty sequences."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return [part for part in np.split(values.numpy().astype(np.int64), ends)[:-1] if len(part)]


def targets(batch: Any) -> list[NDArray[np.int64]]:
    """Return target positions within the sequence and target ids of each sequence, [m, 2]."""
    index, answers = batch.target_positions.numpy(), batch.target_ids.numpy()
    found, start = [], 0
    for length in filter(None, batch.lengths):
        here = (index >= start) & (index < start + length)
        found.append(np.stack([index[here] - start, answers[here]], 1).astype(np.int64))
        start += length
    return found


def sha256_of_all(parts: list[NDArray[np.int64]]) -> str:
    """Return the checksum of arrays, each preceded by its number of values."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.int64(part.size).tobytes() + np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def checksums_of_step(batches: list[Any]) -> dict[str, str]:
    """Return checksums of the model inputs of one step, independent of padding and packing."""
    parts = {
        "tokens": [part for batch in batches for part in sequences(batch.tokens, batch.lengths)],
        "targets": [part for batch in batches for part in targets(batch)],
    }
    if batches[0].source is not None:
        sources = [batch.source for batch in batches]
        parts["source"] = [part for batch in sources for part in sequences(batch.tokens, batch.lengths)]
    return {name: sha256_of_all(arrays) for name, arrays in parts.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_run_is_resumed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, run, saved_at_start = FIXTURES / family, tmp_path / "run", tmp_path / "saved-at-start"
    expected = json.loads((fixture / "expected.json").read_text())
    if expected.get("rdkit", rdBase.rdkitVersion) != rdBase.rdkitVersion:
        pytest.skip(f"another version of RDKit than {expected['rdkit']} may write other random SMILES")
    shutil.copytree(fixture / "checkpoints", run / "checkpoints")
    if (fixture / "data").is_dir():
        shutil.copytree(fixture / "data", tmp_path / "data")

    batches: list[Any] = []
    forward, fit = LanguageModel.forward, pl.Trainer.fit

    def note_batch(model: LanguageModel, batch: Any) -> Tensor:
        if torch.is_grad_enabled():  # not in validation
            batches.append(batch)
        return forward(model, batch)

    def fit_and_save_at_start(trainer: pl.Trainer, *arguments: Any, **options: Any) -> None:
        trainer.callbacks.append(SaveAtStart(saved_at_start))  # type: ignore[attr-defined]
        fit(trainer, *arguments, **options)

    monkeypatch.setattr(LanguageModel, "forward", note_batch)
    monkeypatch.setattr(pl.Trainer, "fit", fit_and_save_at_start)
    overrides = [
        *(word.format(data=tmp_path / "data") for word in expected["overrides"]),
        f"exp_manager.exp_dir={run}",
    ]
    pretrain(load(expected["config_name"], overrides, ROOT / expected["example"] / "conf"))

    steps = range(FIRST, LAST + 1)
    assert checksums(saved_at_start) == expected["checkpoint_sha256"]  # loaded bitwise: weights and optimizer
    assert step_of(saved_at_start) == FIRST - 1
    assert step_of(last_checkpoint(run)) == LAST
    consumed = logged(run, "consumed_samples")
    assert consumed == {step: expected["consumed_samples"][str(step)] for step in steps}
    assert len(batches) == MICRO_BATCHES * len(steps)
    for number, step in enumerate(steps):
        of_step = batches[number * MICRO_BATCHES : (number + 1) * MICRO_BATCHES]
        assert checksums_of_step(of_step) == expected["batches_sha256"][str(step)], f"step {step}"
    for key, name in (("reduced_train_loss", "losses"), ("val_loss", "validation_loss")):
        recorded = {int(step): loss for step, loss in expected[name].items()}
        assert logged(run, key) == pytest.approx(recorded, rel=1e-5), name  # rounding differs between CPUs


def test_fixtures_are_complete() -> None:
    assert FAMILIES == ["esm1b", "esm1nv", "esm2nv", "gpt3", "megamolbart", "prott5nv"]
    for family in FAMILIES:
        expected = json.loads((FIXTURES / family / "expected.json").read_text())
        (checkpoint,) = (FIXTURES / family / "checkpoints").iterdir()
        assert checksums(checkpoint) == expected["checkpoint_sha256"]
