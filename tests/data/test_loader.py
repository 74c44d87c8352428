# SPDX-License-Identifier: Apache-2.0
"""Data loader workers: errors are reported in one line, and a lost worker ends the run."""

import errno
import multiprocessing.synchronize
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.data import IterableDataset, _utils, get_worker_info

from bionemo.common.errors import UserError, describe
from bionemo.data.loader import StepLoader
from tests.support.runs import config, logged, train

MINUTE = 60.0


@pytest.fixture(autouse=True, scope="module")
def short_waits() -> Iterator[None]:
    """Let torch wait 0.1 s instead of 5 s for the exit of a worker before terminating it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
        yield


class Numbers(IterableDataset[int]):
    """Yields 0 and 1, calls a function, then yields 2."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def __iter__(self) -> Iterator[int]:
        return self._numbers()

    def _numbers(self) -> Iterator[int]:
        yield from (0, 1)
        self._then()
        yield 2


def loader(then: Callable[[], object], workers: int = 1, timeout: float = MINUTE) -> Iterator[int]:
    return iter(StepLoader(Numbers(then), workers=workers, timeout=timeout, pin_memory=False))


def fail(error: Exception) -> Callable[[], object]:
    def raise_it() -> None:
        raise error

    return raise_it


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("x000.csv was cut short: restore it"), "x000.csv was cut short: restore it"),
        (MemoryError(), "out of memory"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "x000.csv"), "x000.csv: Input/output error"),
    ],
)
def test_a_user_error_in_a_worker_is_one_line(workers: int, error: Exception, message: str) -> None:
    steps = loader(fail(error), workers)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(type(error) if workers == 0 else UserError) as caught:
        next(steps)
    line = describe(caught.value)
    assert line is not None and message in line
    assert "Traceback" not in line and "worker process" not in line


def test_a_bug_in_a_worker_keeps_its_traceback() -> None:
    steps = loader(fail(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="Traceback") as caught:
        list(steps)
    assert describe(caught.value) is None


def test_a_worker_that_is_killed_ends_the_run() -> None:
    steps = loader(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises((UserError, RuntimeError)) as caught:
        list(steps)
    line = describe(caught.value)
    assert line is not None and line.startswith("DataLoader worker (pid") and "set model.data.num_workers=0" in line


def test_a_worker_that_hangs_ends_the_run() -> None:
    with pytest.raises(UserError, match=r"^DataLoader timed out after 1.* seconds: .*model\.data\.num_workers=0$"):
        list(loader(lambda: time.sleep(60 * MINUTE), timeout=1))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EAGAIN])
def test_workers_that_cannot_be_started_are_one_line(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse)
    with pytest.raises(UserError, match=r"workers need semaphores in /dev/shm .*, or set model\.data\.num_"):
        loader(lambda: None, workers=2)


class Interrupted(Numbers):
    """Sends its worker the signals of a terminal."""

    def _numbers(self) -> Iterator[int]:
        assert get_worker_info() is not None
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
            yield int(number)


def test_workers_ignore_ctrl_c() -> None:
    steps = StepLoader(Interrupted(lambda: None), workers=1, timeout=MINUTE, pin_memory=False)
    assert list(steps) == [signal.SIGINT, signal.SIGHUP]


ONE_PASS = ["model.data.train.use_upsampling=False", "model.data.mock.num_sequences=10", "model.data.packing=False",
            "model.data.mock.max_length=60", "trainer.max_steps=50", "trainer.val_check_interval=2"]  # fmt: skip


def test_too_little_data_for_a_step_is_an_error_before_files_are_written(tmp_path: Path) -> None:
    overrides = [
        *ONE_PASS,
        "model.data.drop_last=True",
        "model.micro_batch_size=6",
        "trainer.accumulate_grad_batches=2",
    ]
    message = (
        r"^model\.data\.drop_last=True leaves no complete step: 10 training sequences in 1 epoch\(s\) give 10 "
        r"rows, but a step needs 12 \(6 in a micro-batch x 1 ranks x 2 micro-batches\): "
        r"use fewer rows per step, .*use_upsampling=True$"
    )
    with pytest.raises(UserError, match=message):
        train(config(tmp_path / "run", *overrides))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("drop_last", [True, False])
def test_training_ends_with_its_data(tmp_path: Path, drop_last: bool, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path / "run", *ONE_PASS, f"model.data.drop_last={drop_last}"))
    assert (
        "note: the training data ended before trainer.max_steps=50: set model.data.train.use_upsampling"
        in capsys.readouterr().err
    )
    consumed = logged(tmp_path / "run", "consumed_samples")
    assert consumed == ({1: 4, 2: 8} if drop_last else {1: 4, 2: 8, 3: 10})
