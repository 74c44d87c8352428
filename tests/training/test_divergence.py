# SPDX-License-Identifier: Apache-2.0
"""A state with NaN or infinity never replaces a checkpoint, and ends the run with one line."""

import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bionemo
from bionemo import checkpoint
from bionemo.checkpoint import Checkpoint, tools
from bionemo.checkpoint.tools import write_weights
from bionemo.common.errors import UserError
from bionemo.common.lock import LOCK
from bionemo.megatron.precision import LossScaler
from bionemo.training import module as training_module
from bionemo.training.checkpointing import CheckpointCallback
from bionemo.training.module import TrainingModule
from tests.support.runs import config, last_checkpoint, read_weights, run_on_ranks, train

PARAMS = "exp_manager.checkpoint_callback_params"


def contents(directory: Path) -> dict[str, bytes]:
    """Return the content of all files except the lock, which exists during a run."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path): path.read_bytes() for path in files}


def spoil_weights(module: TrainingModule) -> None:
    next(module.parameters()).data.view(-1)[-1] = math.nan


def spoil_optimizer(module: TrainingModule) -> None:
    (optimizer,) = module.trainer.strategy.optimizers
    next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = math.inf


def spoil_metric(module: TrainingModule) -> None:
    """Make the validation loss of this step NaN; the state remains finite."""
    losses = module._sums["loss"]
    losses.append(torch.tensor([math.nan, 1.0]))


def after_step(patch: pytest.MonkeyPatch, step: int, spoil: Callable[[TrainingModule], object]) -> None:
    original = TrainingModule.training_step

    def spoiling(self: TrainingModule, batch: Any) -> None:
        original(self, batch)
        if self.trainer.global_step == step:
            spoil(self)

    patch.setattr(TrainingModule, "training_step", spoiling)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(spoil_weights, "the weights are not finite"), (spoil_optimizer, "the optimizer state is not finite")],
)
@pytest.mark.parametrize(
    "overrides", [(), ("async_save=True",), ("save_weights_only=True",), ("always_save_nemo=True",)]
)
def test_nonfinite_states_replace_and_prune_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[TrainingModule], None], what: str,
    overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Loss and gradient norm of the step are finite, like all earlier losses."""
    options = [
        f"{PARAMS}.save_top_k=1",
        f"{PARAMS}.every_n_train_steps=4",
        *(f"{PARAMS}.{override}" for override in overrides),
    ]
    options += ["trainer.limit_val_batches=0", "trainer.log_every_n_steps=100"]
    before: dict[str, bytes] = {}

    def spoil_and_look(module: TrainingModule) -> None:
        strategy: Any = module.trainer.strategy
        strategy.checkpoint_writer.wait()
        before.update(contents(tmp_path / "checkpoints"))
        spoil(module)

    after_step(monkeypatch, 8, spoil_and_look)
    with pytest.raises(UserError, match=rf"^step 8: {what}") as caught:
        train(config(tmp_path, "trainer.max_steps=8", *options))
    assert str(last_checkpoint(tmp_path)) in str(caught.value)
    assert "(step 4)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert before
    assert contents(tmp_path / "checkpoints") == before


@pytest.mark.parametrize("create", [True, False], ids=["saving", "not saving"])
def test_the_final_state_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: bool) -> None:
    after_step(monkeypatch, 2, spoil_weights)
    overrides = ("trainer.max_steps=2", "trainer.limit_val_batches=0", f"{PARAMS}.every_n_train_steps=100")
    with pytest.raises(UserError, match=r"step 2: the weights are not finite.*no checkpoint has been saved"):
        train(config(tmp_path, *overrides, f"exp_manager.create_checkpoint_callback={create}"))
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_a_nonfinite_validation_loss_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainingModule.on_validation_epoch_end

    def end(self: TrainingModule) -> None:
        if self.trainer.global_step == 8:
            spoil_metric(self)
        original(self)

    monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", end)
    with pytest.raises(UserError, match=r"^step 8: val_loss is nan.*\(step 4\)"):
        train(config(tmp_path))
    assert {checkpoint.load_manifest(path)["step"] for path in (tmp_path / "checkpoints").iterdir()} == {4}


def test_validation_without_targets_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss would be 0, the lowest of all."""
    original = TrainingModule.on_validation_epoch_end

    def end(self: TrainingModule) -> None:
        self._sums = {name: [torch.zeros(2)] for name in self._sums}
        original(self)

    monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", end)
    with pytest.raises(UserError, match=r"there is no val_loss: check model\.data\.dataset\.val"):
        train(config(tmp_path))


def test_a_large_loss_has_a_finite_perplexity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainingModule.on_validation_epoch_end

    def end(self: TrainingModule) -> None:
        self._sums["loss"] = [torch.tensor([5000.0, 1.0])]
        original(self)

    monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", end)
    train(config(tmp_path, f"{PARAMS}.monitor=val_perplexity", "trainer.max_steps=4"))
    value = checkpoint.load_manifest(last_checkpoint(tmp_path))["metrics"]["val_perplexity"]
    assert 1e37 < value < math.inf


def scaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training_module.Precision, "needs_scaling", property(lambda self: True))


def test_a_nan_loss_with_loss_scaling_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled(monkeypatch)
    after_step(monkeypatch, 4, lambda module: [each.data.fill_(math.nan) for each in module.parameters()])
    with pytest.raises(UserError, match=r"^step 5: the loss is nan.*trainer\.precision=bf16-mixed"):
        train(config(tmp_path, "trainer.limit_val_batches=0", f"{PARAMS}.every_n_train_steps=100"))
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_a_run_that_skips_every_update_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is finite; the gradients are not, at any loss scale."""
    scaled(monkeypatch)
    monkeypatch.setattr(training_module.ParallelModel, "gradient_norm", lambda self: torch.tensor(math.inf))
    overrides = ("model.native_amp_init_scale=4", "model.hysteresis=1", "trainer.max_steps=50")
    with pytest.raises(
        UserError, match=r"the gradients of the last 10 updates are not finite.*loss scale is at its minimum of 1"
    ):
        train(config(tmp_path, *overrides, "trainer.val_check_interval=50", "trainer.log_every_n_steps=100"))


def test_a_few_overflows_do_not_end_a_run() -> None:
    scaler = LossScaler(2.0**8, growth_interval=1000, hysteresis=1)
    for _ in range(20):
        for _ in range(9):
            scaler.update(overflow=True)
            assert not scaler.exhausted
        scaler.update(overflow=False)
    for _ in range(10):
        scaler.update(overflow=True)
    assert scaler.exhausted


def test_checkpoints_with_a_nan_metric_are_never_the_best(tmp_path: Path) -> None:
    """Earlier versions wrote such checkpoints; comparisons with NaN are false, so sorting would misplace them."""
    values = {1: 3.0, 2: math.nan, 3: 2.0, 4: -math.inf, 5: math.nan, 6: 2.5}
    for step, value in values.items():
        piece = checkpoint.Piece("weights/w", (1,), (0,), torch.ones(1))
        checkpoint.save(tmp_path / f"at-{step}", {"global_step": step, "metrics": {"val_loss": value}}, [piece])
    callback = CheckpointCallback(
        tmp_path, config(tmp_path, f"{PARAMS}.monitor=val_loss", f"{PARAMS}.mode=min").exp_manager
    )
    best = callback.find_best()
    assert best is not None
    assert best.name == "at-3"


@pytest.mark.slow
def test_a_nonfinite_state_on_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    overrides = ("model.optim.lr=1e38", "model.optim.sched.max_lr=1e38", "trainer.log_every_n_steps=100")
    ended = run_on_ranks(directory, *overrides, ranks=2)
    assert [status for status, _ in ended] == [1, 1]
    errors = [[line for line in lines if line.startswith("error: ")] for _, lines in ended]
    assert errors[1] == []
    (error,) = errors[0]
    assert re.match(r"error: step 4: the loss is nan.*the weights are not finite.*lower model\.optim\.lr", error)
    assert list((directory / "checkpoints").glob("*")) == []


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a checkpoint of weights, and a copy with one NaN."""
    directory = tmp_path_factory.mktemp("spoiled")
    train(config(directory / "run", "trainer.max_steps=1"))
    good = last_checkpoint(directory / "run")
    weights = read_weights(good)
    name = "encoder.final_layernorm.weight"
    weights[name] = weights[name].clone()
    weights[name][3] = math.nan
    write_weights(directory / "bad", Checkpoint(good).state, iter(weights.items()))
    return good, directory / "bad"


def test_training_does_not_start_from_weights_that_are_not_finite(tmp_path: Path, spoiled: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"bad has NaN or infinite values in encoder\.final_layernorm\.weight"):
        train(config(tmp_path / "run", f"restore_from_path={spoiled[1]}"))


def test_opening_a_model_that_is_not_finite_warns_in_one_line(
    spoiled: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("bionemo"), "callHandlers", records.append)
    monkeypatch.setattr(logging.getLogger("bionemo.megatron.sharded_state_dict"), "callHandlers", records.append)
    bionemo.load(spoiled[0], device="cpu")
    bionemo.load(spoiled[1], device="cpu")
    (message,) = [each.getMessage() for each in records]
    assert "bad has NaN or infinite values in encoder.final_layernorm.weight" in message
    assert "\n" not in message


def test_an_average_with_weights_that_are_not_finite_is_refused(tmp_path: Path, spoiled: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"bad has NaN or infinite values in encoder\.final_layernorm\.weight"):
        tools.average(tmp_path / "mean", spoiled)
    assert not (tmp_path / "mean").exists()


def test_manifests_hold_json_numbers(spoiled: tuple[Path, Path]) -> None:
    """JSON has no NaN."""
    json.loads((spoiled[0] / "manifest.json").read_text(), parse_constant=pytest.fail)
