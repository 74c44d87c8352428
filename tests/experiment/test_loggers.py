# SPDX-License-Identifier: Apache-2.0
"""Loggers: one run for all starts, errors that do not end training, and the real packages (slow)."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.loggers import Logger

from bionemo.config.compose import load
from bionemo.experiment import loggers
from tests.conftest import ROOT
from tests.support.runs import run

SHORT = ("trainer.max_steps=2", "trainer.val_check_interval=2", "exp_manager.create_tensorboard_logger=False")
LONGER = ("trainer.max_steps=4", *SHORT[1:])


class Broken(Logger):
    """A logger that always fails."""

    name = version = "broken"
    calls = 0

    def log_hyperparams(self, params: Any, *_: Any) -> None:
        raise RuntimeError("no\nanswer")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        type(self).calls += 1
        raise TimeoutError("still no answer")


def test_an_error_of_a_logger_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = Broken()
    loggers._tolerate_errors(logger)
    logger.log_hyperparams({})
    for step in range(3):
        logger.log_metrics({}, step)
    assert [message.partition(": ")[2] for message in caplog.messages] == ["no answer", "still no answer"]


def test_a_slow_logger_is_not_called_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 60.0, 61.0, 659.0, 661.0, 662.0])  # begin and end of a call, two that are skipped, another
    monkeypatch.setattr(loggers.time, "monotonic", lambda: next(clock))
    logger = Broken()
    monkeypatch.setattr(Broken, "calls", 0)
    loggers._tolerate_errors(logger)
    for _ in range(4):
        logger.log_metrics({})
    assert Broken.calls == 2


def test_a_logger_that_cannot_start_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(*_: object) -> Logger:
        raise ConnectionError("refused")

    monkeypatch.setattr(loggers, "_start_wandb", fail)
    config = load("pretrain_esm2_8M", ["exp_manager.create_wandb_logger=True"]).exp_manager
    trainer: Any = SimpleNamespace(loggers=[], is_global_zero=True)
    loggers.start_loggers(trainer, config, tmp_path, "id")
    assert trainer.loggers == []
    assert "create_wandb_logger=True: nothing is logged there by this start: refused" in caplog.text


@pytest.mark.parametrize("name", ["mlflow", "dllogger", "clearml", "neptune"])
def test_a_missing_package_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    status, lines = run(tmp_path / "run", f"++exp_manager.create_{name}_logger=True", *SHORT)
    assert status == 1
    assert lines[-1].startswith(f"error: exp_manager.create_{name}_logger=True: the package {name} cannot be imported")
    assert "pip install" in lines[-1]


def test_all_starts_are_one_run_of_wandb(tmp_path: Path) -> None:
    wandb = ("exp_manager.create_wandb_logger=True", "exp_manager.wandb_logger_kwargs.log_model=all")
    for steps in (SHORT, LONGER):
        status, lines = run(tmp_path / "run", *steps, *wandb, WANDB_MODE="offline")
        assert status == 0
        assert sum("wandb_logger_kwargs.log_model (checkpoints are not uploaded)" in line for line in lines) == 1
    names = [path.name.rpartition("-")[2] for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(names) == 2
    assert len(set(names)) == 1


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that installs packages into a directory, which a run finds by PYTHONPATH."""

    def call(*packages: str) -> str:
        place = tmp_path_factory.mktemp("packages")
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(place), *packages]
        subprocess.run(command, check=True, capture_output=True)
        return str(place)

    return call


def train(place: str, directory: Path, *overrides: str, **environment: str) -> list[str]:
    """Train with packages in a directory after those of the environment; return the console lines."""
    code = (
        f"import sys; sys.path.append({place!r}); from tests.support.runs import tiny; "
        f"sys.argv = ['pretrain', *tiny('exp_manager.exp_dir={directory}', *{list(overrides)!r})]; "
        "from bionemo.cli.pretrain import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory.parent, check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing is logged" not in done.stderr
    assert "has lost values" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.slow
def test_mlflow(install: Any, tmp_path: Path) -> None:
    """A second start adds its steps to the same MLflow run and keeps the parameters."""
    place, key = install("mlflow-skinny==2.22.0"), "++exp_manager.mlflow_logger_kwargs"
    mlflow = ("++exp_manager.create_mlflow_logger=True", f"{key}.tracking_uri=file:{tmp_path}/store",
              f"{key}.experiment_name=esm")  # fmt: skip
    train(place, tmp_path / "run", *SHORT, *mlflow)
    lines = train(place, tmp_path / "run", *LONGER, *mlflow)
    assert sum("MLflow keeps the first values" in line and "trainer/max_steps" in line for line in lines) == 1
    [record] = (tmp_path / "store").glob("[1-9]*/*/meta.yaml")
    assert yaml.safe_load(record.read_text())["status"] == 3  # finished
    losses = (record.parent / "metrics" / "reduced_train_loss").read_text().splitlines()
    assert [line.split()[2] for line in losses] == ["1", "2", "3", "4"]
    assert (record.parent / "params" / "trainer" / "max_steps").read_text() == "2"


@pytest.mark.slow
def test_clearml_offline(install: Any, tmp_path: Path) -> None:
    lines = train(install("clearml==2.1.12"), tmp_path / "run", *SHORT, "++exp_manager.create_clearml_logger=True",
                  CLEARML_OFFLINE_MODE="1", HOME=str(tmp_path))  # fmt: skip
    assert lines
    [archive] = tmp_path.rglob("offline-*.zip")
    with zipfile.ZipFile(archive) as files:
        task = json.loads(files.read("task.json"))
    assert (task["project_name"], task["name"], task["tags"]) == ("NeMo", "Trainer esm2-8M", ["NeMo"])
    assert not task.get("script")  # neither `git diff` nor imports of a checkout


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(pl.loggers, "NeptuneLogger"), reason="this version of lightning has no logger for Neptune"
)
def test_neptune_offline(install: Any, tmp_path: Path) -> None:
    kwargs = "++exp_manager.neptune_logger_kwargs={project: a/b, mode: offline, log_model_checkpoints: false}"
    train(
        install("neptune==1.14.0.post2"), tmp_path / "run", *SHORT, "++exp_manager.create_neptune_logger=True", kwargs
    )
