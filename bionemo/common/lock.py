# SPDX-License-Identifier: Apache-2.0
"""A lock on a directory that works on file systems without locks, such as some network and FUSE file systems.

The lock is a file that names its holder. The holder increments a counter in the file every 10 seconds. A process of
the same machine is looked up in the process table, so the lock of a killed process is taken over at once. The lock of
a process on another machine is taken over if the counter has not changed for a minute, or if Slurm has requeued the
holder's job.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.regular import open_regular

LOCK = ".bionemo.lock"
_HEARTBEAT_SECONDS = 10.0  # interval at which the holder increments its counter
_POLL_SECONDS, _STALE_POLLS = 1.0, 60  # time between checks; checks without a change until a lock is stale
_GUARD_STALE_POLLS = 1500  # every 20 ms; the guard is held for milliseconds
_MAX_BYTES = 4096  # of a lock file
log = logging.getLogger(__name__)


@contextmanager
def run_lock(directory: Path, name: str = LOCK, wait: bool = False) -> Iterator["RunLock"]:
    """Hold the lock of a directory during the `with` block.

    Only rank 0 of a run takes the lock, for all ranks. Do not take the same lock twice in one process. The directory
    is created if it does not exist. At the end, the lock file and the created directories that are empty are removed.

    Args:
        directory: directory to lock.
        name: name of the lock file in it; use another name to lock a single file of the directory.
        wait: wait for the holder to end instead of raising an error.

    Yields:
        The lock. A long-running process calls its `check` before it replaces or deletes files.

    Raises:
        UserError: if another process holds the lock; names the host, the process and its start time.
        OSError: if the lock file cannot be written.
    """
    path = directory / name
    created = [each for each in (directory, *directory.parents) if not each.exists()]
    lock = RunLock(path)
    try:
        lock._acquire(wait)
        yield lock
    finally:
        lock._release()
        for each in created:
            with suppress(OSError):  # not empty
                each.rmdir()


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    token: str  # unique id of this acquisition
    host: str  # host name
    machine: str  # boot id of the host and process namespace in which `process` is valid; "" if unknown
    process: int  # process id
    ticks: int  # start time of the process in clock ticks since boot; -1 if unknown
    since: str  # time at which the lock was taken
    job: str  # Slurm job of the process, "" if none
    restarts: int  # number of times that Slurm had requeued this job

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}, started {self.since}"


class RunLock:
    """The lock file of a directory; see `run_lock`."""

    def __init__(self, path: Path) -> None:
        self.path, self.holder = path, _this_process()
        self._beats = 0
        self._held = False
        self._released = threading.Event()

    def check(self) -> None:
        """Raise a UserError if another process has taken over the lock, as can happen while this one is suspended."""
        try:
            content = _read(self.path)
        except OSError:  # the file system is temporarily unavailable
            return
        if content is not None and (other := _parse(content)) != self.holder:
            raise UserError(
                f"{self.path.parent} was taken over by another run ({other or 'unknown'}) while this run did not "
                "respond: this run exits"
            )

    def _acquire(self, wait: bool) -> None:
        """Take the lock if it is free or its holder is dead."""
        last: bytes | None = None
        unchanged_polls, logged = 0, False
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with _guard(self.path, self.holder):
                    content = _read(self.path)
                    holder = None if content is None else _parse(content)
                    is_alive = None if content is None else _is_alive(holder, self.holder)
                    if content is None or is_alive is False or unchanged_polls == _STALE_POLLS:
                        self._write()
                        break
            except FileNotFoundError:  # the previous holder has removed the empty directory
                continue
            if is_alive or (last is not None and content != last):
                if not wait:
                    raise UserError(
                        f"{self.path.parent} is in use by another run ({holder or f'see {self.path}'}): wait for it "
                        "to end, stop it, or choose another output directory"
                    )
                unchanged_polls = 0
            else:
                unchanged_polls += 1
            last = content
            if not logged:
                logged = True
                self._log_waiting(holder, bool(is_alive))
            time.sleep(_POLL_SECONDS)
        self._held = True
        threading.Thread(target=self._run_heartbeat, name="lock", daemon=True).start()

    def _log_waiting(self, holder: Holder | None, is_alive: bool) -> None:
        directory, who = self.path.parent, holder or "unknown"
        if is_alive:
            log.warning("%s is in use by another run (%s): waiting for it to end", directory, who)
        else:
            log.warning(
                "%s is locked by a run (%s): waiting up to %.0f s for its counter to change; if that run is dead, "
                "delete %s to continue at once", directory, who, _STALE_POLLS * _POLL_SECONDS, self.path,
            )  # fmt: skip

    def _write(self) -> None:
        """Replace the lock file atomically; the caller holds the guard."""
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.unlink(missing_ok=True)
            new.write_bytes(_encode(self.holder))
            os.replace(new, self.path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def _run_heartbeat(self) -> None:
        """Increment the counter in our file, even if another process has just replaced it."""
        while not self._released.wait(_HEARTBEAT_SECONDS):
            with suppress(OSError):  # the disk is full, or the file system is temporarily unavailable
                descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    if _parse(os.read(descriptor, _MAX_BYTES)) != self.holder:
                        return
                    self._beats += 1
                    os.pwrite(descriptor, _encode(self.holder, self._beats), 0)
                finally:
                    os.close(descriptor)

    def _release(self) -> None:
        self._released.set()
        if not self._held or os.getpid() != self.holder.process:  # a forked process does not hold it
            return
        with suppress(OSError):
            content = _read(self.path)
            if content is not None and _parse(content) == self.holder:
                self.path.unlink()


@contextmanager
def _guard(path: Path, here: Holder) -> Iterator[None]:
    """Let one process at a time read and replace a lock file, so that only one takes over the lock of a dead process.

    The guard is another file, held for milliseconds. The guard of a killed process is removed: at once if the process
    ran on this machine, otherwise if the guard has not changed for half a minute.
    """
    guard = path.with_name(f"{path.name}.guard")
    last, unchanged_polls = None, 0
    while True:
        try:
            descriptor = os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                status = guard.lstat()
                found = status.st_ino, status.st_mtime_ns
                unchanged_polls = unchanged_polls + 1 if found == last else 0
                last = found
                if unchanged_polls == _GUARD_STALE_POLLS:
                    guard.unlink()
            _remove_dead(guard, here)
            time.sleep(0.02)
    try:
        try:
            os.write(descriptor, _encode(here))
        finally:
            os.close(descriptor)
        yield
    finally:
        guard.unlink(missing_ok=True)


def _remove_dead(guard: Path, here: Holder) -> None:
    """Remove a guard whose holder has died on this machine; an flock lets one process at a time do so."""
    with suppress(OSError):  # for example, the file no longer exists, or the file system has no locks
        descriptor = os.open(guard, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_dead = _is_alive(_parse(os.read(descriptor, _MAX_BYTES)), here) is False
            if is_dead and os.path.samestat(os.fstat(descriptor), guard.lstat()):
                guard.unlink()
        finally:
            os.close(descriptor)


def _this_process() -> Holder:
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine_id(),
        process=os.getpid(),
        ticks=_start_time(os.getpid()),
        since=datetime.now().astimezone().isoformat(" ", "seconds"),
        job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _machine_id() -> str:
    """Return the boot id of this machine and the process namespace, within which process ids are unique."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(process: int) -> int:
    """Return the start time of a process in clock ticks; -1 if it cannot be read, 0 if the process has ended."""
    try:
        values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if values[0] in "ZX" else int(values[19])
    except (OSError, ValueError, IndexError):
        return -1


def _is_alive(holder: Holder | None, here: Holder) -> bool | None:
    """Return whether a holder is alive; None if only its counter can tell."""
    if holder is None:
        return None
    if here.machine and holder.machine == here.machine:
        try:
            os.kill(holder.process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:  # the process belongs to another user
            pass
        ticks = _start_time(holder.process)
        return -1 in (ticks, holder.ticks) or ticks == holder.ticks
    if here.job and holder.job == here.job and holder.restarts < here.restarts:
        return False  # Slurm ended the process before it requeued the job
    return None


def _read(path: Path) -> bytes | None:
    """Return the content of a lock file; None if it does not exist, b"" if it is not a regular file."""
    try:
        with open_regular(path, follow=False) as file:
            return file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except ValueError:
        return b""


def _encode(holder: Holder, beats: int = 0) -> bytes:
    """Return the content of a lock file; its length is constant, so that the file can be overwritten in place."""
    return f"{json.dumps(asdict(holder))}\n{beats:012d}\n".encode()


def _parse(content: bytes) -> Holder | None:
    """Return the holder named in a lock file; None if the content is invalid."""
    try:
        values = json.loads(content.partition(b"\n")[0])
        holder = Holder(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    for field in fields(Holder):
        value = getattr(holder, field.name)
        if type(value) is not field.type or (isinstance(value, str) and not value.isprintable()):
            return None
    return holder if holder.process > 0 else None
