# SPDX-License-Identifier: Apache-2.0
"""The deterministic mode, and saving behind the training: neither changes a bit of what is trained."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bionemo.common.errors import UserError
from bionemo.training.determinism import require_determinism
from tests.training.runs import FAMILIES, config, fingerprint, logged, run, run_on_ranks, train


@pytest.mark.parametrize("model", FAMILIES)
def test_the_same_command_twice_gives_the_same_bits(tmp_path: Path, model: str) -> None:
    """Once with the mode and once without: on a CPU nothing is left to chance anyway."""
    for name, words in {"a": ["++trainer.deterministic=True"], "b": []}.items():
        status, lines = run(tmp_path / name, *words, model=model)
        assert status == 0, lines
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_what_torch_cannot_do_deterministically_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is next to nothing of that kind: one such operation is put into the objective."""
    from bionemo.training import module

    forward = module.ParallelModel.norm

    def norm(self: module.ParallelModel) -> torch.Tensor:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which of the two wins is not defined
        return forward(self)

    monkeypatch.setattr(module.ParallelModel, "norm", norm)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            train(config(tmp_path / "closed", "++trainer.deterministic=True"))
    finally:
        torch.use_deterministic_algorithms(False)
    train(config(tmp_path / "open"))


def test_what_contradicts_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = config(tmp_path, "++trainer.deterministic=True").trainer
    with pytest.raises(UserError, match="benchmark=True"):
        require_determinism(replace(trainer, benchmark=True))
    for variable, wrong in {"NCCL_ALGO": "NVLS", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}.items():
        monkeypatch.delenv("NCCL_ALGO", raising=False)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        require_determinism(trainer)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(UserError, match=f"{variable}={wrong}"):
            require_determinism(trainer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_saving_behind_the_training_saves_the_same(tmp_path: Path, ranks: int) -> None:
    """A save every step, each while the next step changes the weights it was asked to save."""
    words = ("exp_manager.checkpoint_callback_params.every_n_train_steps=1",)
    behind = ("++exp_manager.checkpoint_callback_params.async_save=True",)
    for name, more in {"behind": behind, "at once": ()}.items():
        consoles = run_on_ranks(tmp_path / name, *words, *more, ranks=ranks)
        assert [status for status, _ in consoles] == [0] * ranks, consoles
    assert fingerprint(tmp_path / "behind") == fingerprint(tmp_path / "at once")
    names = [
        sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("behind", "at once")
    ]
    assert names[0] == names[1]


def test_a_disk_that_fills_behind_the_training_ends_it_with_one_line(tmp_path: Path) -> None:
    words = ("exp_manager.checkpoint_callback_params.every_n_train_steps=2",)
    behind = "++exp_manager.checkpoint_callback_params.async_save=True"
    status, lines = run(tmp_path / "run", *words, behind, LARGEST_FILE="200000")
    assert status == 1, lines
    assert "could not be written (" in lines[-1]
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert list((tmp_path / "run" / "checkpoints").glob("*")) == []


RECOMPUTED = [
    ["granularity=selective"],
    ["granularity=full", "method=uniform", "num_layers=2"],
    ["granularity=full", "method=block", "num_layers=1"],
]


def test_activations_that_are_computed_again_change_no_bit(tmp_path: Path) -> None:
    """With dropout, which has to be drawn again as it was."""
    words = ("trainer.max_steps=3", "model.num_layers=3", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    train(config(tmp_path / "kept", *words, model="esm1nv"))
    for number, keys in enumerate(RECOMPUTED):
        again = tmp_path / str(number)
        train(config(again, *words, *(f"model.activations_checkpoint_{key}" for key in keys), model="esm1nv"))
        for figure in ("reduced_train_loss", "grad_norm"):
            assert logged(again, figure) == logged(tmp_path / "kept", figure)
        assert len(logged(again, "grad_norm")) == 3
