# SPDX-License-Identifier: Apache-2.0
"""A run that was interrupted and resumed equals an uninterrupted one bitwise."""

import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bionemo.checkpoint import find_damage, list_complete, load_manifest
from tests.support.runs import FAMILIES, Command, config, fingerprint, last_checkpoint, logged, train

PARAMS = "exp_manager.checkpoint_callback_params"
EVERY_3 = f"{PARAMS}.every_n_train_steps=3"


SLOW_FAMILIES = [pytest.param(name, marks=[] if name == "esm2nv" else pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module", params=SLOW_FAMILIES)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(f"whole-{request.param}")
    train(config(directory, EVERY_3, model=request.param))
    return request.param, directory


def for_models(*cases: tuple[int, ...]) -> list[Any]:
    """Return the cases for every family; they are slow except for ESM-2nv."""
    return [
        pytest.param(model, *case, marks=[] if model == "esm2nv" else pytest.mark.slow)
        for model in FAMILIES
        for case in cases
    ]


@pytest.mark.parametrize(
    ("uninterrupted", "workers", "stop"),
    for_models((0, 2), (0, 4), (0, 6), (0, 8), (2, 5)),
    indirect=["uninterrupted"],
)
def test_a_resumed_run_is_bitwise_equal(
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


OFTEN = (
    "trainer.max_steps=20", "trainer.val_check_interval=5",
    f"{PARAMS}.every_n_train_steps=2", f"{PARAMS}.save_top_k=2",
)  # fmt: skip


class Killable:
    """A run that can be killed at any time after it has begun to write, and restarted."""

    def __init__(self, directory: Path, model: str, *overrides: str, workers: int = 0) -> None:
        self.directory, self.model = directory, model
        self._words = (f"exp_manager.exp_dir={directory}", *overrides, f"model.data.num_workers={workers}")
        self._environment = {"PROCESSORS": str(workers)} if workers else {}

    def start(self) -> Command:
        """Start the command; return it when it has begun to write."""
        before = len(self._logs())
        console = self.directory.with_name(f"{self.directory.name}.console")
        command = Command(console, *self._words, model=self.model, **self._environment)
        while command.process.is_alive() and len(self._logs()) == before:
            time.sleep(0.002)
        return command

    def _logs(self) -> list[Path]:
        return list(self.directory.glob("events.out.tfevents.*"))

    def kill_after(self, seconds: float, beyond: int = -1) -> bool:
        """Start, wait for a checkpoint beyond a step and some seconds, then kill; return whether it was running."""
        command = self.start()
        while command.process.is_alive() and self.steps() <= beyond:
            time.sleep(0.002)
        time.sleep(seconds)
        command.process.kill()
        command.process.join()
        assert command.process.exitcode in (-signal.SIGKILL, 0), command.end()
        return bool(command.process.exitcode)

    def end(self) -> list[str]:
        """Wait until it exits; return its console lines."""
        command = self.start()
        command.process.join(600)
        status, lines = command.end()
        assert status == 0, lines
        return lines

    def steps(self) -> int:
        """Return the step of the newest checkpoint; the run may remove older ones meanwhile."""
        found = list_complete(self.directory / "checkpoints")
        return max((int(load_manifest(path).get("step", 0)) for path in found), default=0)

    def ends_as(self, whole: Path) -> None:
        """Wait until it exits, and compare checkpoints (bitwise), logs and files."""
        lines = self.end()
        assert not [line for line in lines if re.search(r"skipped|Warning|WARNING|\bwarning", line)]
        assert fingerprint(self.directory) == fingerprint(whole)
        # a killed run loses what it had not written to its log yet
        assert logged(self.directory, "reduced_train_loss").items() <= logged(whole, "reduced_train_loss").items()
        assert logged(self.directory, "val_loss").items() <= logged(whole, "val_loss").items()
        assert last_checkpoint(self.directory).name == last_checkpoint(whole).name
        kept = list((self.directory / "checkpoints").iterdir())
        assert set(list_complete(self.directory / "checkpoints")) == set(kept)  # no leftovers
        assert len(kept) <= 1 + int(OFTEN[-1].partition("=")[2])
        assert [find_damage(path) for path in kept] == [""] * len(kept)


@pytest.mark.parametrize(("uninterrupted", "workers"), for_models((0,), (2,)), indirect=["uninterrupted"])
def test_a_killed_and_resumed_run_is_bitwise_equal(
    uninterrupted: tuple[str, Path], tmp_path: Path, workers: int
) -> None:
    model, whole = uninterrupted
    overrides, generator = (EVERY_3, OFTEN[-1]), random.Random(workers)
    killed = Killable(tmp_path / "run", model, *overrides, workers=workers)
    while not killed.kill_after(generator.uniform(0, 0.3)):
        shutil.rmtree(tmp_path / "run")
    killed.ends_as(whole)


@pytest.fixture(scope="module", params=FAMILIES)
def often(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, float]:
    """Return a model, an uninterrupted run that saves at every other step, and its duration."""
    run = Killable(tmp_path_factory.mktemp(f"often-{request.param}") / "run", request.param, *OFTEN)
    command, begun = run.start(), time.monotonic()
    assert command.end()[0] == 0
    return request.param, run.directory, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_kills_at_fifty_times(often: tuple[str, Path, float], tmp_path: Path, workers: int) -> None:
    model, whole, seconds = often
    generator, reached, number = random.Random(f"{model} {workers}"), [], 0
    while len(reached) < 50:
        number += 1
        killed = Killable(tmp_path / f"run{number}", model, *OFTEN, workers=workers)
        if killed.kill_after(generator.uniform(0, seconds)):
            reached.append(killed.steps())
            killed.ends_as(whole)
        shutil.rmtree(killed.directory)
    print(f"{model}, {workers} workers: killed after the checkpoint of step {sorted(reached)}")
    assert len(set(reached)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_one_run_killed_a_hundred_times(tmp_path: Path, model: str) -> None:
    """Two workers; one of four kills comes before any progress, the others some steps later."""
    overrides = ("trainer.max_steps=600", "trainer.val_check_interval=10", *OFTEN[2:])
    whole, killed = (
        Killable(tmp_path / "whole", model, *overrides),
        Killable(tmp_path / "run", model, *overrides, workers=2),
    )
    whole.end()
    generator, steps = random.Random(model), [0]
    for number in range(100):
        beyond = -1 if number % 4 == 0 else steps[-1]
        assert killed.kill_after(generator.uniform(0, 0.2), beyond), f"it ended before kill {number + 1}"
        steps.append(killed.steps())
        assert steps[-1] >= steps[-2]
    print(f"{model}: newest checkpoint after each kill: {steps}")
    assert len(set(steps)) > 75
    killed.ends_as(whole.directory)
