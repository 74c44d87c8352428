# SPDX-License-Identifier: Apache-2.0
"""Only one run at a time uses a directory, on every file system, and no stale lock needs manual removal."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bionemo.common import lock
from bionemo.common.errors import UserError, describe
from bionemo.common.lock import LOCK, run_lock

FORK = multiprocessing.get_context("fork")
HOLD = "import sys, time; from pathlib import Path; from bionemo.common.lock import run_lock\n"
HOLD += "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(lock, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_STALE_POLLS", 20)
    monkeypatch.setattr(lock, "_GUARD_STALE_POLLS", 20)


@pytest.fixture
def other_process(tmp_path: Path) -> subprocess.Popen[str]:
    """Start another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def written(directory: Path, **changes: Any) -> None:
    """Write a lock file like that of another process."""
    with run_lock(directory) as held:
        content = (directory / LOCK).read_text()
        holder = json.loads(content.splitlines()[0])
        assert held.path == directory / LOCK
    (directory / LOCK).write_text(json.dumps(holder | {"token": "other"} | changes) + "\n000000000000\n")


def test_a_second_run_is_refused_in_one_line_that_names_the_first(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    try:
        with pytest.raises(UserError) as caught, run_lock(tmp_path):
            pytest.fail("two runs hold the lock")
        host, year = os.uname().nodename, time.strftime("%Y-")
        assert f"process {other_process.pid} on host {host}, started {year}" in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        other_process.kill()
        other_process.wait()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(
    tmp_path: Path, other_process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_STALE_POLLS", 10**9)
    other_process.send_signal(signal.SIGKILL)  # a zombie until it is waited for, which counts as dead
    while (tmp_path / LOCK).exists() and lock._start_time(other_process.pid) > 0:
        time.sleep(0.01)
    with run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    other_process.wait()
    assert not any(tmp_path.iterdir())


def test_a_reused_process_id_is_not_the_holder(tmp_path: Path) -> None:
    written(tmp_path, process=os.getpid(), ticks=1)
    with run_lock(tmp_path):
        pass


def test_the_lock_file_is_removed_after_success_and_after_an_error(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert (tmp_path / LOCK).exists()
    with pytest.raises(ValueError, match="an error"), run_lock(tmp_path):
        raise ValueError("an error")
    assert not any(tmp_path.iterdir())


def test_directories_created_for_a_lock_are_removed_if_empty(tmp_path: Path) -> None:
    with run_lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert not any(tmp_path.iterdir())
    with run_lock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "result").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "result"]
    existing = tmp_path / "existing"
    existing.mkdir()
    with run_lock(existing):
        pass
    assert existing.exists()


def _take(directory: Path, results: Any, refused: Any) -> None:
    try:
        with run_lock(directory):
            until = time.monotonic() + 120
            while refused.value < 7 and time.monotonic() < until:
                time.sleep(0.01)
        results.put("held")
    except UserError:
        with refused.get_lock():
            refused.value += 1
        results.put("refused")


@pytest.mark.parametrize("stale", [True, False], ids=["stale lock", "no lock"])
def test_one_of_many_concurrent_processes_gets_the_lock(tmp_path: Path, stale: bool) -> None:
    for _ in range(5):
        if stale:
            written(tmp_path, process=os.getpid(), ticks=1)
        results: Any = FORK.Queue()
        refused = FORK.Value("i", 0)
        processes = [FORK.Process(target=_take, args=(tmp_path, results, refused)) for _ in range(8)]
        for process in processes:
            process.start()
        assert sorted(results.get(timeout=180) for _ in processes) == ["held"] + ["refused"] * 7
        for process in processes:
            process.join()
        assert not any(tmp_path.iterdir())


def test_a_lock_of_another_host_with_a_heartbeat_is_respected(tmp_path: Path) -> None:
    written(tmp_path, host="elsewhere", machine="other", process=7, since="2024-05-01 10:00:00+00:00")
    stop = threading.Event()

    def count() -> None:
        beats = 0
        while not stop.wait(0.1):
            beats += 1
            head = (tmp_path / LOCK).read_text().splitlines()[0]
            (tmp_path / LOCK).write_text(f"{head}\n{beats:012d}\n")

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(UserError, match="process 7 on host elsewhere, started 2024-05-01 10:00:00"):
            run_lock(tmp_path).__enter__()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", ["", "{}", "[" * 9999, '{"process": -1}', "\0" * 50])
def test_a_lock_of_another_host_without_a_heartbeat_is_taken_over_with_a_note(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The content of the lock does not matter."""
    written(tmp_path, host="elsewhere", machine="other")
    if content:
        (tmp_path / LOCK).write_text(content)
    logging.getLogger("bionemo").propagate = True
    with run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    # a thread of another test may still wait for its own lock
    (message,) = {text for record in caplog.records if str(tmp_path / LOCK) in (text := record.getMessage())}
    assert "for its counter to change" in message


def test_a_requeued_job_takes_over_at_once_on_any_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_STALE_POLLS", 10**9)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    written(tmp_path, host="elsewhere", machine="other")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with run_lock(tmp_path):
        pass


def test_the_holder_sends_heartbeats_and_notices_a_takeover(tmp_path: Path) -> None:
    with run_lock(tmp_path) as held:
        before = (tmp_path / LOCK).read_bytes()
        until = time.monotonic() + 120
        while (tmp_path / LOCK).read_bytes() == before and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / LOCK).read_bytes() != before
        held.check()
        written_by_other = (tmp_path / LOCK).read_text().replace(held.holder.token, "other")
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).write_text(written_by_other)
        with pytest.raises(UserError, match="was taken over by another run"):
            held.check()
    assert (tmp_path / LOCK).read_text() == written_by_other  # the lock belongs to another process


def test_waiting_for_the_holder(tmp_path: Path, other_process: subprocess.Popen[str]) -> None:
    begun = time.monotonic()
    threading.Timer(0.3, other_process.kill).start()
    with run_lock(tmp_path, wait=True):
        assert time.monotonic() - begun > 0.2
    other_process.wait()


def test_a_stale_guard_of_this_machine_causes_no_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_GUARD_STALE_POLLS", 10**9)
    written(tmp_path, process=os.getpid(), ticks=1)
    (tmp_path / LOCK).rename(tmp_path / f"{LOCK}.guard")
    with run_lock(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def test_a_stale_guard_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{LOCK}.guard").touch()
    with run_lock(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def test_a_symbolic_link_instead_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(victim)
    with run_lock(tmp_path / "run"):
        pass
    assert victim.read_text() == "precious"


def test_a_lock_on_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught, run_lock(tmp_path / "run"):
        pass
    assert "No space left" in (describe(caught.value) or "")
    assert not any(tmp_path.iterdir())
