# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and a closed terminal save a checkpoint without killing workers or other ranks; a second signal exits."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from bionemo.checkpoint import find_damage, load_manifest
from bionemo.cli.pretrain import main
from bionemo.megatron import async_save
from bionemo.training.signals import _SAME_KEY_PRESS, Signals
from tests.conftest import ROOT
from tests.support.runs import FAMILIES, FORK, last_checkpoint, tiny

LONG = ("trainer.max_steps=5000", "trainer.val_check_interval=5000")  # the console shows every 50th step
MANY = "model.data.mock.num_validation_sequences=20000"  # a validation of several seconds
_START = """\
import os, pathlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
from bionemo.cli.pretrain import main
pathlib.Path(f"{__file__}.{os.environ.get('LOCAL_RANK', 0)}").touch()
main()
"""
LIMIT = 400  # seconds: the machine may be busy


class Terminal:
    """A run in its own process group, as a shell starts it; its process is the leader of the group.

    Attributes:
        directory: run directory.
        pid: number of the process.
    """

    def __init__(self, directory: Path, *overrides: str) -> None:
        self.directory, self._console = directory / "run", directory / "console"
        self._words = tiny(f"exp_manager.exp_dir={self.directory}", *LONG, *overrides)
        self._start()

    def _start(self) -> None:
        """Start a new Python process from a file, which the run starts again for its second device."""
        (script := self.directory.with_name("script.py")).write_text(_START)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment.pop("OMP_NUM_THREADS", None)  # OpenBLAS starts threads in the data workers then
        with self._console.open("w") as console:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *self._words], stdout=console, stderr=console,
                start_new_session=True, cwd=ROOT, env=environment,
            )  # fmt: skip
        self.pid = self._process.pid

    def lines(self) -> list[str]:
        return self._console.read_text().splitlines()

    def status(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + LIMIT
        while not self._console.exists() or text not in self._console.read_text():
            assert self.status() is None, self.lines()
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)

    def wait_for_rank(self, rank: int) -> None:
        """Wait until a rank has imported the package and calls `main`."""
        end = time.monotonic() + LIMIT
        while not self.directory.with_name(f"script.py.{rank}").exists():
            assert self.status() is None, self.lines()
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, like a terminal."""
        os.killpg(self.pid, number)

    def end(self) -> int:
        end = time.monotonic() + LIMIT
        while (status := self.status()) is None:
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)
        assert not any("Traceback" in line for line in self.lines()), self.lines()
        return status


class Forked(Terminal):
    """The same in a process that has imported all modules; only for one device. See FORK."""

    slow_save = False

    def _start(self) -> None:
        self._forked: ForkServerProcess = FORK.Process(target=_run, args=(self._console, self._words, self.slow_save))
        self._forked.start()
        self.pid = self._forked.pid or 0

    def status(self) -> int | None:
        return self._forked.exitcode


class ForkedWithSlowSave(Forked):
    """A run that does not complete a save within the time limit of these tests."""

    slow_save = True


def _run(console: Path, overrides: list[str], slow_save: bool) -> None:
    output = os.open(console, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    multiprocessing.set_start_method("fork", force=True)  # for the run's own workers, like in a new Python process
    if slow_save:
        async_save.save_distributed = lambda *_: (print("writing", flush=True), time.sleep(2 * LIMIT))
    sys.argv = ["pretrain.py", *overrides]
    main(FAMILIES["esm2nv"].name, FAMILIES["esm2nv"].directory / "conf")


def group_is_gone(number: int) -> bool:
    """Return whether all processes of a group exit."""
    for _ in range(10 * LIMIT):
        try:
            os.killpg(number, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("start", "number", "overrides"),
    [
        (Forked, signal.SIGINT, ("model.data.num_workers=2",)),
        (Forked, signal.SIGHUP, ()),
        (Forked, signal.SIGTERM, ("model.data.num_workers=2",)),
        pytest.param(Terminal, signal.SIGTERM, ("model.data.num_workers=1",), marks=pytest.mark.slow),
        pytest.param(Terminal, signal.SIGINT, ("trainer.devices=2",), marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_all_processes_saves_the_step(
    tmp_path: Path, start: type[Terminal], number: signal.Signals, overrides: tuple[str, ...]
) -> None:
    run = start(tmp_path, *overrides)
    run.wait_for("step 50 of")
    run.send(number)
    assert run.end() == 128 + number, run.lines()
    (step,) = re.findall(rf"received {number.name}: saving step (\d+) and exiting", "\n".join(run.lines()))
    last = last_checkpoint(run.directory)
    assert load_manifest(last)["step"] == int(step) >= 50
    written = json.loads((run.directory / "run.json").read_text())
    assert (written["step"], written["ended"]) == (int(step), f"stopped by {number.name}")
    assert find_damage(last) == ""
    assert not any(line.startswith("error") for line in run.lines())
    assert group_is_gone(run.pid)


@pytest.mark.parametrize(
    ("start", "number", "overrides"),
    [
        pytest.param(Forked, signal.SIGINT, (), id="Ctrl-C"),
        pytest.param(Forked, signal.SIGTERM, ("trainer.num_sanity_val_steps=-1", MANY), id="in the sanity check"),
        pytest.param(Forked, signal.SIGUSR1, ("trainer.num_sanity_val_steps=-1", MANY), id="time limit of Slurm"),
        pytest.param(
            Terminal, signal.SIGINT, ("trainer.devices=2",), id="waiting for another rank", marks=pytest.mark.slow
        ),
    ],
)
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    tmp_path: Path, start: type[Terminal], number: signal.Signals, overrides: tuple[str, ...]
) -> None:
    run = start(tmp_path, *overrides)
    run.wait_for("from the beginning")
    if "trainer.devices=2" in overrides:
        run.wait_for_rank(1)
    run.send(number)
    assert run.end() == 128 + number
    assert not any("saving step" in line for line in run.lines())
    message = f"received {number.name} before the first step: nothing is saved"
    assert run.lines()[-1] == message
    assert run.lines().count(message) == 1
    assert not any(line.startswith("error") for line in run.lines())
    assert group_is_gone(run.pid)


@pytest.mark.parametrize(
    ("start", "devices"), [(Forked, 1), pytest.param(Terminal, 2, marks=pytest.mark.slow, id="two devices")]
)
def test_a_signal_in_a_validation_saves_the_step(tmp_path: Path, start: type[Terminal], devices: int) -> None:
    """The next start repeats the validation before it continues."""
    run = start(tmp_path, MANY, "trainer.val_check_interval=50", f"trainer.devices={devices}")
    run.wait_for("step 50 of")
    time.sleep(1)
    run.send(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.lines()
    assert any("received SIGTERM in the validation: saving step 50 and exiting" in line for line in run.lines())
    assert not any("data ended" in line for line in run.lines())
    manifest = load_manifest(last_checkpoint(run.directory))
    assert (manifest["step"], manifest["metrics"]) == (50, {})
    assert json.loads((run.directory / "run.json").read_text())["ended"] == "stopped by SIGTERM"
    few = MANY.replace("20000", "8")
    resumed = Forked(tmp_path, few, "trainer.val_check_interval=50", "trainer.max_steps=51", "trainer.devices=1")
    assert resumed.end() == 0, resumed.lines()
    assert any(line.startswith("step 50  val_loss") for line in resumed.lines())
    assert load_manifest(last_checkpoint(run.directory))["step"] == 51


@pytest.mark.slow
def test_a_signal_in_the_last_validation_does_not_lose_its_metric(tmp_path: Path) -> None:
    """The same command repeats the validation; it ends with the checkpoints and metrics of a run without a signal."""
    last = ("trainer.val_check_interval=50", "trainer.max_steps=50")
    run = Forked(tmp_path, MANY, *last)
    run.wait_for("step 50 of")
    time.sleep(1)
    run.send(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.lines()
    resumed = Forked(tmp_path, MANY.replace("20000", "8"), *last)
    assert resumed.end() == 0, resumed.lines()
    assert any(line.startswith("step 50  val_loss") for line in resumed.lines())
    (other := tmp_path / "other").mkdir()
    whole = Forked(other, MANY.replace("20000", "8"), *last)
    assert whole.end() == 0, whole.lines()
    found, expected = (
        {path.name: load_manifest(path)["metrics"] for path in (each.directory / "checkpoints").iterdir()}
        for each in (resumed, whole)
    )
    assert found == expected


@pytest.mark.slow
def test_a_signal_in_a_test_ends_the_run_at_once(tmp_path: Path) -> None:
    short = ("trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=1")
    run = Forked(tmp_path, MANY, "do_testing=True", *short)
    run.wait_for("logs, ")
    time.sleep(1)
    run.send(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.lines()
    assert run.lines()[-1] == "received SIGTERM in the test: no test result"


def test_a_second_signal_ends_the_run_without_an_incomplete_checkpoint(tmp_path: Path) -> None:
    run = ForkedWithSlowSave(tmp_path)
    run.wait_for("step 50 of")
    run.send(signal.SIGINT)
    run.send(signal.SIGINT)  # the same key press, also forwarded by a launcher
    run.wait_for("writing")
    time.sleep(2 * _SAME_KEY_PRESS)
    assert run.status() is None
    run.send(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert run.lines()[-1] == "received SIGINT again: the steps since the last checkpoint are not saved"
    assert list((run.directory / "checkpoints").glob("*-last")) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_ignored_signals_remain_ignored(name: str) -> None:
    """Like by nohup, and in background jobs of a script."""
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.has_steps_to_save = True
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
            signals.has_steps_to_save = True
            signals.listen(signal.SIGHUP)
            os.close(reader)
            os.kill(os.getpid(), signal.SIGHUP)
            print("a line", file=sys.stderr, flush=True)
            assert signals.received == signal.SIGHUP
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    finally:
        signal.signal(signal.SIGHUP, before)
