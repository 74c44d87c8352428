# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and a closed terminal: the step is saved, workers and other ranks do not die of it; twice ends at once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bionemo.checkpoint import defect, manifest_of
from bionemo.training.signals import Signals
from tests.conftest import RANKS, ROOT
from tests.training.runs import last_checkpoint, tiny

LONG = ("trainer.max_steps=20000", "trainer.val_check_interval=20000")
_START = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
from bionemo.cli.pretrain import main
main()
"""
_SLOW_SAVE = (
    "import time; from bionemo.megatron import saving\n"
    "saving.save_together = lambda *_: (print('writing', flush=True), time.sleep(60))\n"
)


class Terminal:
    """A run in a process group of its own, as a shell starts it.

    Attributes:
        directory: where it writes.
        process: the first of the group.
    """

    def __init__(self, directory: Path, *words: str, before: str = "") -> None:
        self.directory, self._console = directory / "run", directory / "console"
        (script := directory / "script.py").write_text(before + _START)  # a file, so that it can be started again
        words = (f"exp_manager.exp_dir={self.directory}", *LONG, *words)
        environment = {name: value for name, value in os.environ.items() if name not in RANKS}  # of runs before
        environment["PYTHONPATH"] = str(ROOT)
        with self._console.open("w") as console:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *tiny(*words)], stdout=console, stderr=console,
                start_new_session=True, cwd=ROOT, env=environment,
            )  # fmt: skip

    def lines(self) -> list[str]:
        return self._console.read_text().splitlines()

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 400  # a busy machine
        while text not in self._console.read_text():
            assert self.process.poll() is None, self.lines()
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """As the terminal does, to all of the group."""
        os.killpg(self.process.pid, number)

    def end(self) -> int:
        status = self.process.wait(120)
        assert not any("Traceback" in line for line in self.lines()), self.lines()
        return status


def group_is_gone(number: int) -> bool:
    """Whether all processes of a group end within some seconds."""
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
    (step,) = re.findall(rf"received {number.name}: saving step (\d+) and leaving", "\n".join(run.lines()))
    last = last_checkpoint(run.directory)
    assert manifest_of(last)["step"] == int(step) >= 200
    assert defect(last) == ""
    assert not any(line.startswith("error") for line in run.lines())
    assert group_is_gone(run.process.pid)


@pytest.mark.parametrize(
    ("words", "seconds"), [((), 0.0), (("trainer.devices=2",), 1.0)], ids=["one rank", "waiting for another rank"]
)
def test_before_the_first_step_it_ends_at_once(tmp_path: Path, words: tuple[str, ...], seconds: float) -> None:
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


def test_a_second_one_ends_at_once_without_half_a_checkpoint(tmp_path: Path) -> None:
    run = Terminal(tmp_path, before=_SLOW_SAVE)
    run.wait_for("step 200 of")
    run.send(signal.SIGINT)
    run.send(signal.SIGINT)  # the same key press, which a launcher has forwarded too
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
def test_what_is_ignored_stays_ignored(name: str) -> None:
    """As by nohup, and in the background jobs of a script."""
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.saving = True
            signals.listen(signal.SIGHUP)
            assert signal.getsignal(number) == signal.SIG_IGN
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            assert signals.number == 0
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.fixture
def handlers() -> Callable[[], list[object]]:
    return lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]


def test_handlers_are_as_before_afterwards(handlers: Callable[[], list[object]]) -> None:
    before = handlers()
    signals = Signals()
    signals.listen(signal.SIGUSR1)
    with signals:
        signals.listen(signal.SIGHUP)
        assert handlers() != before
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_save_does_not_need_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is closed takes `| tee` with it; the next line that is printed must not end the run."""
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        with os.fdopen(writer, "w", buffering=1) as pipe, Signals() as signals:
            monkeypatch.setattr(sys, "stderr", pipe)
            signals.saving = True
            signals.listen(signal.SIGHUP)
            os.close(reader)
            os.kill(os.getpid(), signal.SIGHUP)
            print("a line", file=sys.stderr, flush=True)
            assert signals.number == signal.SIGHUP
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    finally:
        signal.signal(signal.SIGHUP, before)
