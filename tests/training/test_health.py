# SPDX-License-Identifier: Apache-2.0
"""If one of several ranks dies, hangs, fails or has another configuration, all others exit, and one line names it."""

import ctypes
import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from functools import wraps
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from bionemo.common.console import BUG_MESSAGE, one_line_errors
from bionemo.common.errors import UserError
from bionemo.data.loader import StepDataset
from bionemo.data.proteins import splits
from bionemo.data.proteins.mock import MockSource
from bionemo.megatron.strategy import MegatronStrategy
from bionemo.training import health
from bionemo.training.health import HealthMonitor, ObservedRank, diagnose, report_first_error
from bionemo.training.module import TrainingModule
from tests.support.runs import FAMILIES, FORK, Command, _main, tiny

LIMIT = 3.0  # seconds


def fail(error: type[Exception]) -> None:
    raise error("in two\nlines")


def killed_worker() -> None:
    if get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "x.pt")


FAULTS: dict[str, Callable[[], Any]] = {
    "killed worker": killed_worker,
    "full disk": full_disk,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "killed later": lambda: time.sleep(3) or os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "asleep": lambda: time.sleep(600),
    "deaf": lambda: ctypes.PyDLL(None).sleep(600),  # no Python thread runs meanwhile
    "other": lambda: MockSource(300, 20, 90, seed=7, split="train"),
    "mistaken": lambda: fail(UserError),
    "defective": lambda: fail(ValueError),
}


PLACES: dict[str, tuple[Any, str]] = {
    "step": (TrainingModule, "training_step"),
    "save": (MegatronStrategy, "save_checkpoint"),
    "data": (StepDataset, "__iter__"),
    "mock data": (splits, "MockSource"),
}


class Bare(Command):
    """A rank that only runs synchronized steps, with a fault before one of them."""

    def __init__(self, output: Path, **options: Any) -> None:
        self._output = output
        self.process: ForkServerProcess = FORK.Process(target=_steps, args=(output,), kwargs=options)
        self.process.start()


def _steps(console: Path, rank: int, ranks: int, port: int, fault: str = "", at: int = 0) -> None:
    os.dup2(os.open(console, os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    health.EXIT_SECONDS = 1.0
    environment = SimpleNamespace(main_address="127.0.0.1", main_port=port)
    strategy = SimpleNamespace(cluster_environment=environment, launcher=None)
    trainer: Any = SimpleNamespace(world_size=ranks, global_rank=rank, strategy=strategy, loggers=[])
    monitor = HealthMonitor(LIMIT)
    console.with_name(f"{rank}.started").touch()
    while len([*console.parent.glob("*.started")]) < ranks:  # LIMIT does not include the start of the processes
        time.sleep(0.01)
    with one_line_errors(), report_first_error(monitor, trainer):
        for step in range(1000):
            monitor.status.phase = f"in step {step}" if step else "before the start"
            if fault and step == at:
                FAULTS[fault]()
            if step:
                dist.all_reduce(torch.ones(1))
            else:
                dist.init_process_group("gloo", rank=rank, world_size=ranks)
                while not all(each.beat for each in monitor.ranks.values()):  # all are known before any fault
                    time.sleep(0.005)
            time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def host(command: Command) -> str:
    return f"(host {socket.gethostname()}, process {command.process.pid})"


def finish(commands: list[Command], gone: int | None = None) -> list[list[str]]:
    """Check that all ranks exit, with status 1 except for the killed one; return the errors that each printed."""
    try:
        ended = [command.end() for rank, command in enumerate(commands) if rank != gone]
        assert {status for status, _ in ended} == {1}, ended
    finally:
        for command in commands:
            command.process.kill()
    lines = [command.end()[1] for command in commands]
    return [[line for line in each if line.startswith("error: ")] for each in lines]


def bare(directory: Path, faulty: int, fault: str, at: int, gone: bool) -> tuple[list[list[str]], str]:
    """Run three ranks, one with a fault; return the errors of all ranks, and how the faulty rank is named."""
    port = free_port()
    commands: list[Command] = [
        Bare(
            directory / str(rank),
            rank=rank,
            ranks=3,
            port=port,
            **({"fault": fault, "at": at} if rank == faulty else {}),
        )
        for rank in range(3)
    ]
    return finish(commands, faulty if gone else None), host(commands[faulty])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(tmp_path: Path, rank: int) -> None:
    """Rank 0 names it, or all others if it is rank 0."""
    errors, name = bare(tmp_path, rank, "killed", 30, gone=True)
    speakers = [1, 2] if rank == 0 else [0]
    assert [len(lines) for lines in errors] == [number in speakers for number in range(3)]
    for speaker in speakers:
        who, when = errors[speaker][0].split(" ended without an error message, last seen ")
        assert who == f"error: rank {rank} {name}"
        assert re.fullmatch(r"in step \d+|before the start", when)


def test_a_rank_that_dies_before_process_groups_exist(tmp_path: Path) -> None:
    """Rank 0 waits for it until the timeout; it may not have written any status."""
    errors, name = bare(tmp_path, 1, "killed", 0, gone=True)
    assert errors[1:] == [[], []]
    (error,) = errors[0]
    assert error.startswith((f"error: rank 1 {name} has not answered for", "error: rank 1 has not connected for"))


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (0, "stopped"),
        pytest.param(1, "stopped", marks=pytest.mark.slow),
        pytest.param(0, "deaf", marks=pytest.mark.slow),
    ],
)
def test_an_unresponsive_rank_is_named(tmp_path: Path, rank: int, fault: str) -> None:
    errors, name = bare(tmp_path, rank, fault, 30, gone=True)
    speakers = [1, 2] if rank == 0 else [0]
    assert [len(lines) for lines in errors] == [number in speakers for number in range(3)]
    for speaker in speakers:
        assert re.match(rf"error: rank {rank} {re.escape(name)} has not answered for \d+ s ", errors[speaker][0])


@pytest.mark.slow
def test_a_suspended_run_continues(tmp_path: Path) -> None:
    """As with Slurm's SUSPEND,GANG, or a laptop that sleeps."""
    port = free_port()
    commands = [Bare(tmp_path / str(rank), rank=rank, ranks=2, port=port) for rank in range(2)]
    while not all((tmp_path / f"{rank}.started").exists() for rank in range(2)):
        time.sleep(0.01)
    for number, seconds in ((signal.SIGSTOP, LIMIT + 2), (signal.SIGCONT, 0)):
        for command in commands:
            os.kill(command.process.pid or 0, number)
        time.sleep(seconds)
    assert [command.end() for command in commands] == [(0, []), (0, [])]


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_exits(tmp_path: Path) -> None:
    errors, name = bare(tmp_path, 1, "asleep", 30, gone=False)
    assert errors[1:] == [[], []]
    expected = rf"error: rank 1 {re.escape(name)} is in step 30: others have waited for \d+ s"
    assert re.match(expected, *errors[0])


@pytest.mark.parametrize(
    ("rank", "fault", "expected"),
    [
        (0, "mistaken", "error: in two lines"),
        (1, "mistaken", "error: rank 1: in two lines"),
        (
            1, "full disk",
            "error: rank 1 {} failed in step 30: x.pt: No space left on device: free disk space or choose another "
            "output directory, then run the command again",
        ),
        (1, "defective", "error: rank 1 {} failed in step 30: ValueError: in two lines"),
    ],
)  # fmt: skip
def test_only_the_failing_rank_prints_an_error(tmp_path: Path, rank: int, fault: str, expected: str) -> None:
    errors, name = bare(tmp_path, rank, fault, 30, gone=False)
    assert errors == [[expected.format(name)], [f"error: {BUG_MESSAGE}"] if fault == "defective" else [], []]
    assert ("Traceback" in (tmp_path / str(rank)).read_text()) == (fault == "defective")


class Faulty(Command):
    """A fault of a rank in a real run: type, location, and number of passes before it."""

    def __init__(self, output: Path, fault: tuple[str, str, int], *overrides: str, **environment: str) -> None:
        self._output = output
        arguments = (FAMILIES["esm2nv"], tiny(*overrides), output, environment)
        self.process = FORK.Process(target=_with_fault, args=(*fault, *arguments))
        self.process.start()


def _with_fault(what: str, where: str, before: int, *arguments: Any) -> None:
    owner, name = PLACES[where]
    original, passes = getattr(owner, name), iter(range(before))

    @wraps(original)  # Lightning inspects its parameters
    def faulty(*given: Any, **named: Any) -> Any:
        done = None if next(passes, None) is not None else FAULTS[what]()
        return done or original(*given, **named)

    setattr(owner, name, faulty)
    _main(*arguments)


def real(directory: Path, faulty: int, fault: tuple[str, str, int], *overrides: str) -> tuple[list[list[str]], str]:
    """Run two ranks of a training run, like `bare`."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    overrides = (f"exp_manager.exp_dir={directory / 'run'}", "trainer.devices=2", *overrides)
    victim = Faulty(directory / str(faulty), fault, *overrides, LOCAL_RANK=str(faulty), **environment)
    other = Command(directory / str(1 - faulty), *overrides, LOCAL_RANK=str(1 - faulty), **environment)
    return finish([victim, other][:: -1 if faulty else 1], faulty if fault[0] == "killed later" else None), host(
        victim
    )


@pytest.mark.parametrize(
    ("rank", "where", "before"),
    [
        (1, "step", 2),
        pytest.param(1, "save", 0, marks=pytest.mark.slow),
        pytest.param(0, "step", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_killed_rank(tmp_path: Path, rank: int, where: str, before: int) -> None:
    errors, name = real(tmp_path, rank, ("killed later", where, before))  # a status is written every second
    assert errors[rank] == []
    (error,) = errors[1 - rank]
    assert error.startswith(f"error: rank {rank} {name} ended without an error message, last seen ")
    assert list((tmp_path / "run" / "checkpoints").glob("*-last")) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_with_a_killed_data_worker(tmp_path: Path, rank: int) -> None:
    errors, _ = real(tmp_path, rank, ("killed worker", "data", 0), "model.data.num_workers=1")
    assert errors[1] == []
    (error,) = errors[0]
    assert re.fullmatch(
        rf"error: {f'rank {rank}: ' if rank else ''}DataLoader worker \(pid.+\) .+: check the memory .+",
        error,
    )
    assert BUG_MESSAGE not in "".join((tmp_path / console).read_text() for console in ("0", "1"))


def test_a_teardown_error_does_not_hide_the_original_error() -> None:
    """Lightning's teardown fails on a partially built loader, and its error is raised last."""
    trainer: Any = SimpleNamespace(world_size=1)
    monitor, full = HealthMonitor(LIMIT), OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left") as caught, report_first_error(monitor, trainer):
        monitor.on_exception(trainer, None, full)
        raise RuntimeError("Please call `iter(combined_loader)` first.")
    assert caught.value is full
    with pytest.raises(KeyError), report_first_error(monitor, trainer):  # another run, and a defect
        raise KeyError("x")


@pytest.mark.slow
def test_a_run_whose_data_loader_hangs(tmp_path: Path) -> None:
    errors, name = real(tmp_path, 0, ("asleep", "data", 1), "trainer.rank_timeout=00:00:00:10")
    assert errors[1] == []
    (error,) = errors[0]
    assert error.startswith(f"error: rank 0 {name} is preparing the first step: ")
    assert re.search(r"others have waited for \d+ s", error)


def test_ranks_with_different_data(tmp_path: Path) -> None:
    """The files have equally many sequences, of different lengths."""
    errors, _ = real(tmp_path, 1, ("other", "mock data", 0))
    assert errors[1] == []
    (error,) = errors[0]
    number = r"300 sequences, [\d,]+ tokens, checksum \w{8}"
    there = re.escape(f"rank 1 (host {socket.gethostname()})")
    assert re.match(rf"error: the train data is {number} on rank 0, {number} on {there}: all ranks need ", error)


def test_ranks_with_different_configurations(tmp_path: Path) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    overrides = (f"exp_manager.exp_dir={tmp_path / 'run'}", "trainer.devices=2")
    commands = [
        Command(tmp_path / str(rank), *overrides, f"model.optim.lr={rank + 1}e-4", LOCAL_RANK=str(rank), **environment)
        for rank in range(2)
    ]
    (error,), nothing = finish(commands)
    assert nothing == []
    there = f"rank 1 (host {socket.gethostname()})"
    assert error.startswith(f"error: model.optim.lr is 0.0001 on rank 0, 0.0002 on {there}: all ranks need the same ")


def statuses(*collectives: dict[str, int]) -> list[ObservedRank]:
    return [
        ObservedRank(rank, "h", rank + 1, beat=1, collectives=each, phase="in step 1", last_heartbeat=100.0)
        for rank, each in enumerate(collectives)
    ]


def test_the_named_rank_is_one_that_waits_for_no_other() -> None:
    """Rank 0 waits in group a for rank 1, which waits in group b for rank 2, which hangs before either."""
    ranks = statuses({"a": 5, "c": 3}, {"a": 4, "b": 7}, {"b": 6, "d": 2}, {"c": 3, "d": 2})
    assert diagnose(ranks, 99.0, timeout=100, interval=1) is None
    message = "rank 2 (host h, process 3) is in step 1: others have waited for 101 s (trainer.rank_timeout)"
    assert diagnose(ranks, 101.0, timeout=100, interval=1) == (2, message)


def test_ranks_that_wait_for_each_other_are_not_named() -> None:
    verdict = diagnose(statuses(*[{"a": 5}] * 5), 101.0, timeout=100, interval=1)
    assert verdict is not None
    assert verdict.message.startswith("rank 0 (host h, process 1) is in step 1; rank 1 (host h")
    assert verdict.message.endswith("; 2 more: all ranks have waited for each other for 101 s (trainer.rank_timeout)")


def test_a_long_save_is_not_reported_as_a_hang() -> None:
    ranks = [ObservedRank(0), ObservedRank(1)]
    for beat, (rank, megabytes) in enumerate(((0, 1), (1, 1), (0, 900))):
        ranks[rank].update({"beat": beat + 1, "io_megabytes": megabytes}, now=megabytes)
    for rank in (0, 1):
        ranks[rank].update({"beat": 9}, now=1000)
    assert diagnose(ranks, 990, timeout=100, interval=1) is None
    verdict = diagnose(ranks, 1001, timeout=100, interval=1)
    assert verdict is not None
    assert "all ranks have waited" in verdict.message
