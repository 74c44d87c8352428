# SPDX-License-Identifier: Apache-2.0
"""Deterministic mode and asynchronous saving do not change the trained weights."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bionemo.common.errors import UserError
from bionemo.training.build_trainer import require_determinism
from tests.support.runs import FAMILIES, config, fingerprint, logged, run, run_on_ranks, train


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "esm2nv" else pytest.mark.slow) for model in FAMILIES]
)
def test_equal_commands_give_bitwise_equal_weights(tmp_path: Path, model: str) -> None:
    """With and without the mode: on a CPU all operations are deterministic."""
    for name, overrides in {"a": ["++trainer.deterministic=True"], "b": []}.items():
        status, lines = run(tmp_path / name, *overrides, model=model)
        assert status == 0, lines
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_nondeterministic_operations_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU almost all operations are deterministic: a nondeterministic one is added to the loss."""
    from bionemo.training import module

    forward = module.ParallelModel.gradient_norm

    def norm(self: module.ParallelModel) -> torch.Tensor:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which of the two wins is not defined
        return forward(self)

    monkeypatch.setattr(module.ParallelModel, "gradient_norm", norm)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            train(config(tmp_path / "closed", "++trainer.deterministic=True"))
    finally:
        torch.use_deterministic_algorithms(False)
    train(config(tmp_path / "open"))


def test_options_that_contradict_deterministic_mode_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_asynchronous_saves_equal_synchronous_ones(tmp_path: Path, ranks: int) -> None:
    """Save at every step while the next step changes the weights that are being saved."""
    overrides = ("exp_manager.checkpoint_callback_params.every_n_train_steps=1",)
    behind = ("++exp_manager.checkpoint_callback_params.async_save=True",)
    for name, more in {"behind": behind, "at once": ()}.items():
        consoles = run_on_ranks(tmp_path / name, *overrides, *more, ranks=ranks)
        assert [status for status, _ in consoles] == [0] * ranks, consoles
    assert fingerprint(tmp_path / "behind") == fingerprint(tmp_path / "at once")
    names = [
        sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("behind", "at once")
    ]
    assert names[0] == names[1]


def test_a_failed_asynchronous_save_is_one_line(tmp_path: Path) -> None:
    overrides = ("exp_manager.checkpoint_callback_params.every_n_train_steps=2",)
    behind = "++exp_manager.checkpoint_callback_params.async_save=True"
    status, lines = run(tmp_path / "run", *overrides, behind, LARGEST_FILE="200000")
    assert status == 1, lines
    assert "could not be written (" in lines[-1]
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert list((tmp_path / "run" / "checkpoints").glob("*")) == []


RECOMPUTED = [
    ["granularity=selective"],
    ["granularity=full", "method=uniform", "num_layers=2"],
    ["granularity=full", "method=block", "num_layers=1"],
]


@pytest.mark.slow
def test_activation_recomputation_is_bitwise_equal(tmp_path: Path) -> None:
    """With dropout, whose masks must be reproduced."""
    overrides = (
        "trainer.max_steps=3",
        "model.num_layers=3",
        "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
    )
    train(config(tmp_path / "kept", *overrides, model="esm1nv"))
    for number, keys in enumerate(RECOMPUTED):
        again = tmp_path / str(number)
        train(config(again, *overrides, *(f"model.activations_checkpoint_{key}" for key in keys), model="esm1nv"))
        for figure in ("reduced_train_loss", "grad_norm"):
            assert logged(again, figure) == logged(tmp_path / "kept", figure)
        assert len(logged(again, "grad_norm")) == 3
