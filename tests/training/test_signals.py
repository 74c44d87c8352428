# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and a closed terminal save a checkpoint without killing workers or other ranks; a second signal exits."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bionemo.checkpoint import find_defect, load_manifest
from bionemo.training.signals import Signals
from tests.conftest import RANKS, ROOT
from tests.support.runs import last_checkpoint, tiny

LONG = ("trainer.max_steps=20000", "trainer.val_check_interval=20000")
_START = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
from bionemo.cli.pretrain import main
main()
"""
_SLOW_SAVE = (
    "import time; from bionemo.megatron import async_save\n"
    "async_save.save_distributed = lambda *_: (print('writing', flush=True), time.sleep(60))\n"
)


class Terminal:
    """A run in its own process group, as a shell starts it.

    Attributes:
        directory: run directory.
        process: leader of the group.
    """

    def __init__(self, directory: Path, *words: str, before: str = "") -> None:
        self.directory, self._console = directory / "run", directory / "console"
        (script := directory / "script.py").write_text(before + _START)  # a file, so that the run can be restarted
        words = (f"exp_manager.exp_dir={self.directory}", *LONG, *words)
        environment = {name: value for name, value in os.environ.items() if name not in RANKS}  # of earlier runs
        environment["PYTHONPATH"] = str(ROOT)
        with self._console.open("w") as console:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *tiny(*words)], stdout=console, stderr=console,
                start_new_session=True, cwd=ROOT, env=environment,
            )  # fmt: skip

    def lines(self) -> list[str]:
        return self._console.read_text().splitlines()

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 400  # the machine may be busy
        while text not in self._console.read_text():
            assert self.process.poll() is None, self.lines()
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, like a terminal."""
        os.killpg(self.process.pid, number)

    def end(self) -> int:
        status = self.process.wait(120)
        assert not any("Traceback" in line for line in self.lines()), self.lines()
        return status


def group_is_gone(number: int) -> bool:
    """Return whether all processes of a group exit within some seconds."""
    for _ in range(100):
        try:
            os.killpg(number, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, ("model.data.num_workers=2",)),
        (signal.SIGHUP, ()),
        (signal.SIGTERM, ("model.data.num_workers=2",)),
        (signal.SIGINT, ("trainer.devices=2",)),
    ],
)
def test_a_signal_to_all_processes_saves_the_step(
    tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    run = Terminal(tmp_path, *words)
    run.wait_for("step 200 of")
    run.send(number)
    assert run.end() == 128 + number, run.lines()
    (step,) = re.findall(rf"received {number.name}: saving step (\d+) and exiting", "\n".join(run.lines()))
    last = last_checkpoint(run.directory)
    assert load_manifest(last)["step"] == int(step) >= 200
    assert find_defect(last) == ""
    assert not any(line.startswith("error") for line in run.lines())
    assert group_is_gone(run.process.pid)


@pytest.mark.parametrize(
    ("words", "seconds"), [((), 0.0), (("trainer.devices=2",), 1.0)], ids=["one rank", "waiting for another rank"]
)
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    tmp_path: Path, words: tuple[str, ...], seconds: float
) -> None:
    run = Terminal(tmp_path, *words)
    run.wait_for("from the beginning")
    time.sleep(seconds)
    begun = time.monotonic()
    run.send(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert time.monotonic() - begun < 10
    assert run.lines()[-1] == "interrupted"
    assert run.lines().count("interrupted") == 1
    assert not any(line.startswith("error") for line in run.lines())
    assert group_is_gone(run.process.pid)


def test_a_second_signal_ends_the_run_without_an_incomplete_checkpoint(tmp_path: Path) -> None:
    run = Terminal(tmp_path, before=_SLOW_SAVE)
    run.wait_for("step 200 of")
    run.send(signal.SIGINT)
    run.send(signal.SIGINT)  # the same key press, also forwarded by a launcher
    run.wait_for("writing")
    time.sleep(0.6)
    assert run.process.poll() is None
    begun = time.monotonic()
    run.send(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert time.monotonic() - begun < 5
    assert run.lines()[-1] == "interrupted"
    assert list((run.directory / "checkpoints").glob("*-last")) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_ignored_signals_remain_ignored(name: str) -> None:
    """Like by nohup, and in background jobs of a script."""
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.save_on_interrupt = True
            signals.listen(signal.SIGHUP)
            assert signal.getsignal(number) == signal.SIG_IGN
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            assert signals.received == 0
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.fixture
def handlers() -> Callable[[], list[object]]:
    return lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]


def test_signal_handlers_are_restored(handlers: Callable[[], list[object]]) -> None:
    before = handlers()
    signals = Signals()
    signals.listen(signal.SIGUSR1)
    with signals:
        signals.listen(signal.SIGHUP)
        assert handlers() != before
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1


def test_saving_after_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a terminal also kills `| tee`; the next print must not end the run."""
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        with os.fdopen(writer, "w", buffering=1) as pipe, Signals() as signals:
            monkeypatch.setattr(sys, "stderr", pipe)
            signals.save_on_interrupt = True
            signals.listen(signal.SIGHUP)
            os.close(reader)
            os.kill(os.getpid(), signal.SIGHUP)
            print("a line", file=sys.stderr, flush=True)
            assert signals.received == signal.SIGHUP
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    finally:
        signal.signal(signal.SIGHUP, before)
