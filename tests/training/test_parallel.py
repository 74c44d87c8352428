# SPDX-License-Identifier: Apache-2.0
"""Several ranks are one process with the same global batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bionemo.megatron import checkpoint
from tests.conftest import EXAMPLES

from .runs import config, last_checkpoint, logged, run, run_on_ranks, tiny, train

KEYS = ("reduced_train_loss", "grad_norm", "lr", "consumed_samples")


def same_run(one: Path, other: Path) -> None:
    """Losses, norms and weights within 1e-6; what is counted, exactly."""
    for key in KEYS:
        found, expected = logged(one, key), logged(other, key)
        assert list(found) == list(expected) == list(range(1, 9))
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6), key
    assert list(logged(one, "val_loss")) == [4, 8]
    assert list(logged(one, "val_loss").values()) == pytest.approx(list(logged(other, "val_loss").values()), rel=1e-6)
    states = [checkpoint.load(last_checkpoint(directory)) for directory in (one, other)]
    assert states[0]["global_step"] == states[1]["global_step"] == 8
    weights = [torch.cat([tensor.reshape(-1) for tensor in state["state_dict"].values()]) for state in states]
    # Adam divides by the root of squares: where a gradient is rounding noise, so is the update's sign
    assert (weights[0] - weights[1]).abs().max() < 1e-6 * weights[1].abs().max() + 8 * 4e-4 * 1e-3


def spoken(consoles: list[tuple[int, list[str]]]) -> list[str]:
    """See that all ended well and the first rank alone spoke; give its lines."""
    assert [status for status, _ in consoles] == [0] * len(consoles), consoles
    assert all(lines == [] for _, lines in consoles[1:])
    return consoles[0][1]


@pytest.mark.parametrize("model", ["esm1nv", "esm2nv"])
def test_two_ranks_are_one_process_with_the_same_micro_batches(tmp_path: Path, model: str) -> None:
    """With dropout too: its noise belongs to the micro-batch, not to the rank."""
    lines = spoken(run_on_ranks(tmp_path / "two", ranks=2, model=model))
    train(config(tmp_path / "one", "trainer.accumulate_grad_batches=2", model=model))
    same_run(tmp_path / "two", tmp_path / "one")
    assert sum("from the beginning" in line for line in lines) == 1
    assert sum("val_loss" in line for line in lines) == 2
    assert (tmp_path / "two" / "nemo_log_globalrank-1_localrank-1.txt").exists()


def test_one_large_micro_batch_is_the_same_step(tmp_path: Path) -> None:
    """Every masked token counts alike, however rows are grouped: 8 at once, 2 x 4, and 2 ranks x 2 x 2."""
    train(config(tmp_path / "large", "model.micro_batch_size=8"))
    train(config(tmp_path / "parts", "model.micro_batch_size=4", "trainer.accumulate_grad_batches=2"))
    same_run(tmp_path / "parts", tmp_path / "large")
    words = ("model.micro_batch_size=2", "trainer.accumulate_grad_batches=2")
    spoken(run_on_ranks(tmp_path / "ranks", *words, ranks=2))
    same_run(tmp_path / "ranks", tmp_path / "large")


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    stops = ("trainer.max_steps=4", "model.optim.sched.max_steps=8")
    spoken(run_on_ranks(tmp_path / "run", *stops, ranks=2))
    train(config(tmp_path / "run", "trainer.accumulate_grad_batches=2"))
    train(config(tmp_path / "whole", "trainer.accumulate_grad_batches=2"))
    same_run(tmp_path / "run", tmp_path / "whole")


def test_one_command_starts_all_devices(tmp_path: Path) -> None:
    """Lightning starts the second process with the same words; the console is that of one run."""
    words = tiny(f"exp_manager.exp_dir={tmp_path}", "trainer.devices=2")
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "pretrain.py", *words], cwd=EXAMPLES / "esm2nv", env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines
    assert sum(" on 2 x cpu" in line for line in lines) == 1
    assert len([line for line in lines if line.startswith("step ")]) == 8 + 2 + 1
    assert len(lines) == len(set(lines))
    assert "arning" not in done.stdout


def test_a_mistake_is_told_once_and_ends_every_rank(tmp_path: Path) -> None:
    consoles = run_on_ranks(tmp_path / "run", "trainer.max_time=soon", ranks=2)
    assert [status for status, _ in consoles] == [1, 1]
    assert [len(lines) for _, lines in consoles] == [3, 0]  # two notes on the data and the error
    assert not (tmp_path / "run").exists()


def test_weights_that_fit_no_rank_are_told_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert run(directory, "trainer.max_steps=1")[0] == 0
    ended_by_one_line(run_on_ranks(directory, "model.hidden_size=64", ranks=2), "weights are those of another model")


def test_an_error_of_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    """The first rank cannot save: the other does not wait for it, and one line says why."""
    consoles = run_on_ranks(tmp_path / "run", ranks=2, LARGEST_FILE="200000")
    ended_by_one_line(consoles, "could not be written (")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def ended_by_one_line(consoles: list[tuple[int, list[str]]], said: str) -> None:
    """The rank that failed first tells it, whichever it was."""
    assert [status for status, _ in consoles] == [1, 1]
    (error,) = [line for _, lines in consoles for line in lines if line.startswith("error: ")]
    assert said in error
    assert consoles[1][1] in ([], [error])
    assert not any("Traceback" in line for line in consoles[0][1])
