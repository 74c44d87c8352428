# SPDX-License-Identifier: Apache-2.0
"""Only one run at a time uses a directory, on every file system, and no stale lock needs manual removal."""

import errno
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
HOLD = "import sys, time; from pathlib import Path; from bionemo.common import lock\n"
HOLD += "lock._LEASE_SECONDS = 2.0\n"
HOLD += "with lock.run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_LEASE_SECONDS", 2.0)


@pytest.fixture
def other_process(tmp_path: Path) -> subprocess.Popen[str]:
    """Start another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def written(directory: Path, host: str) -> None:
    """Write the lock file of a process on another host."""
    with run_lock(directory):
        content = (directory / LOCK).read_text()
    (directory / LOCK).write_text(content.replace(f"host={os.uname().nodename}", f"host={host}"))


def test_a_second_run_is_refused_in_one_line_that_names_the_first(
    tmp_path: Path, other_process: subprocess.Popen[str]
) -> None:
    try:
        with pytest.raises(UserError) as caught, run_lock(tmp_path):
            pytest.fail("two runs hold the lock")
        assert f"(process {other_process.pid} on host {os.uname().nodename})" in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        other_process.kill()
        other_process.wait()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(
    tmp_path: Path, other_process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    monkeypatch.setattr(lock, "_LEASE_SECONDS", 1e9)
    with run_lock(tmp_path):
        assert f"pid={os.getpid()}\n" in (tmp_path / LOCK).read_text()
    assert not any(tmp_path.iterdir())


def test_a_lock_of_another_container_is_that_of_another_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Containers of one host can share its name; their process numbers mean nothing to each other."""
    written(tmp_path, f"{os.uname().nodename}?pidns-{os.stat('/proc/self/ns/pid').st_ino + 1:x}")
    logging.getLogger("bionemo").propagate = True
    with run_lock(tmp_path):
        pass
    (message,) = {text for record in caplog.records if str(tmp_path / LOCK) in (text := record.getMessage())}
    assert f"on host {os.uname().nodename})" in message
    assert "pidns" not in message


def test_directories_created_for_a_lock_are_removed_if_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an error"), run_lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
        raise ValueError("an error")
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
    for _ in range(3):
        if stale:
            ended = FORK.Process(target=os._exit, args=(0,))
            ended.start()
            ended.join()
            written(tmp_path, os.uname().nodename)
            content = (tmp_path / LOCK).read_text()
            (tmp_path / LOCK).write_text(content.replace(f"pid={os.getpid()}", f"pid={ended.pid}"))
        results: Any = FORK.Queue()
        refused = FORK.Value("i", 0)
        processes = [FORK.Process(target=_take, args=(tmp_path, results, refused)) for _ in range(8)]
        for process in processes:
            process.start()
        assert sorted(results.get(timeout=180) for _ in processes) == ["held"] + ["refused"] * 7
        for process in processes:
            process.join()
        assert not any(tmp_path.iterdir())


def test_a_lock_of_another_host_that_is_renewed_is_respected(tmp_path: Path) -> None:
    written(tmp_path, "elsewhere")
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.1):
            (tmp_path / LOCK).touch()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"\(process \d+ on host elsewhere\)"):
            run_lock(tmp_path).__enter__()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", ["lease", "{}", "\0" * 50])
def test_a_lock_of_another_host_that_is_not_renewed_is_taken_over(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The content of the lock does not matter."""
    written(tmp_path, "elsewhere")
    if content != "lease":
        (tmp_path / LOCK).write_text(content)
    logging.getLogger("bionemo").propagate = True
    with run_lock(tmp_path):
        assert f"pid={os.getpid()}\n" in (tmp_path / LOCK).read_text()
    (message,) = {text for record in caplog.records if str(tmp_path / LOCK) in (text := record.getMessage())}
    assert f"delete {tmp_path / LOCK} to continue at once" in message


def test_an_empty_lock_file_must_be_deleted(tmp_path: Path) -> None:
    """A process that has just created it may be about to write to it."""
    (tmp_path / LOCK).touch()
    with pytest.raises(UserError, match=r"delete .* if it is dead"), run_lock(tmp_path):
        pass


def test_a_full_disk_leaves_no_lock_file(tmp_path: Path) -> None:
    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", fill)
        with pytest.raises(OSError, match="No space left"), run_lock(tmp_path / "x"):
            pytest.fail("the lock is held")
    assert not any(tmp_path.iterdir())
    with run_lock(tmp_path / "x"):
        pass


def test_the_holder_renews_its_lock_and_notices_a_takeover(tmp_path: Path) -> None:
    with run_lock(tmp_path) as held:
        before, until = (tmp_path / LOCK).stat().st_mtime_ns, time.monotonic() + 120
        while (tmp_path / LOCK).stat().st_mtime_ns == before and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime_ns != before
        held.check()
        written_by_other = (tmp_path / LOCK).read_text().replace(held.lease.token or "", "0" * 32)
        (tmp_path / LOCK).rename(tmp_path / "old")  # the inode is not reused
        (tmp_path / LOCK).write_text(written_by_other)
        with pytest.raises(UserError, match="was taken over by another run"):
            held.check()
    assert (tmp_path / LOCK).read_text() == written_by_other  # the lock belongs to another process


def test_waiting_for_the_holder(tmp_path: Path, other_process: subprocess.Popen[str]) -> None:
    begun = time.monotonic()
    threading.Timer(2.0, other_process.kill).start()
    with run_lock(tmp_path, wait=True):
        assert time.monotonic() - begun > 1.9
    other_process.wait()


def test_a_lock_on_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, *_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as caught, run_lock(tmp_path / "run"):
        pass
    monkeypatch.undo()
    assert "No space left" in (describe(caught.value) or "")
    assert not any(tmp_path.iterdir())
