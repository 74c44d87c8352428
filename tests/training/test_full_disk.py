# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or becomes full during a run causes a one-line error, no traceback and no loss of data."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from bionemo.common.errors import UserError
from bionemo.experiment import nemo
from tests.support.runs import config, logged, train

PARAMS = "exp_manager.checkpoint_callback_params"
LOGS = {"cmd-args.log", "git-info.log", "config.yaml", "hparams.yaml", "nemo_error_log.txt", "lightning_logs.txt"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a small file system, or changes its size."""
    place, mounted = tmp_path / "disk", False
    place.mkdir()

    def mount(size: str) -> Path:
        nonlocal mounted
        options = f"size={size}" + (",remount" if mounted else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mount is not permitted here")
        mounted = True
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


def slow(*sizes: str) -> list[ParameterSet]:
    return [pytest.param(size, marks=pytest.mark.slow) for size in sizes]


@pytest.mark.parametrize("size", ["4k", "200k", *slow("16k", "64k")])
def test_a_full_disk_at_the_start(
    disk: Callable[[str], Path], tmp_path: Path, size: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place = disk(size)
    with pytest.raises(
        UserError, match=r"run(/checkpoints)? cannot be written \(No space left on device\): free disk space"
    ) as error:
        train(config(place / "run", "trainer.max_steps=1"))
    assert "\n" not in str(error.value)
    assert not list(place.iterdir())
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out
    disk("64m")
    train(config(place / "run", "trainer.max_steps=1"))
    assert list(logged(place / "run", "reduced_train_loss")) == [1]


@pytest.mark.parametrize("size", ["8k", "48k", *slow("12k", "24k", "64k")])
def test_a_disk_that_fills_up_while_a_run_starts(
    disk: Callable[[str], Path], size: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo, "_MIN_SPACE", 0)  # another program uses the remaining space
    place = disk(size)
    with pytest.raises(UserError, match=r"\(No space left on device\): free disk space"):
        train(config(place / "run", "trainer.max_steps=1"))
    assert not LOGS & {path.name for path in (place / "run").glob("*")}  # no incomplete file
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out
    disk("64m")
    monkeypatch.undo()
    train(config(place / "run", "trainer.max_steps=1"))
    assert {path.name for path in (place / "run").iterdir()} >= LOGS


def test_logs_that_cannot_be_written_do_not_end_a_run(
    disk: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo, "_MIN_SPACE", 0)
    place = disk("100k")
    train(config(place / "run", f"{PARAMS}.dirpath={tmp_path / 'checkpoints'}"), plot=True)
    (last,) = (tmp_path / "checkpoints").glob("*-last")
    assert "step=8" in last.name
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out
    notes = [line for line in output.err.splitlines() if "No space left on device" in line]
    assert 1 <= len(notes) <= 2, notes  # of the logs and of the loss curve
