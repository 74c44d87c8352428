# SPDX-License-Identifier: Apache-2.0
"""A lock on a directory that works on file systems without locks, such as some network and FUSE file systems.

The lock is a file that names its holder. The holder rewrites a counter in it every 10 seconds. A process of the same
machine is looked up in the process table, so the lock of a killed one is taken over at once. The lock of a process
elsewhere is taken over when the counter has not changed for a minute, or when Slurm has requeued the holder's job.
"""

import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from bionemo.common.errors import UserError

LOCK = ".bionemo.lock"
_BEAT = 10.0  # seconds between two counts of the holder
_LOOK = 1.0  # seconds between two looks of a process that waits
_DEAD_AFTER = 60  # looks without a new count
_GUARD_LOOKS, _GUARD_LOOK = 1500, 0.02  # seconds: 30 in all, for what takes milliseconds
_MOST_BYTES = 4096
log = logging.getLogger(__name__)


@contextmanager
def run_lock(directory: Path, name: str = LOCK, wait: bool = False) -> Iterator["RunLock"]:
    """Hold the lock of a directory while the block of the `with` statement runs.

    Only rank 0 of a run takes it: all ranks of a run are one holder. Do not take the same lock twice in one process.
    The directory is created if it does not exist. On leaving the block the lock file is removed, and so are the
    directories that were created for it and are empty.

    Args:
        directory: what the lock is for.
        name: of the lock file in it; give another name for a lock on a single file of a directory.
        wait: wait for the holder to end instead of raising an error.

    Yields:
        The lock. Call its `check` before replacing or deleting files, in a process that runs for long.

    Raises:
        UserError: when another process holds it; names the host, the process and its start time.
        OSError: when the lock file cannot be written.
    """
    path = directory / name
    created = _missing(directory)
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
    """The process that holds a lock.

    Attributes:
        token: unique to this hold.
        host: name of its host.
        machine: boot of the host and process namespace in which `process` is valid; "" when unknown.
        process: its number.
        ticks: when it started, in clock ticks since boot; -1 when unknown.
        since: when it took the lock.
        job: Slurm job that it belongs to, "" for none.
        restarts: how often Slurm had requeued this job.
    """

    token: str
    host: str
    machine: str
    process: int
    ticks: int
    since: str
    job: str
    restarts: int

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
        """See that no other process has taken the lock over, as one may when this one was suspended for minutes.

        Raises:
            UserError: when one has.
        """
        try:
            content = _read(self.path)
        except OSError:  # a file system that is away for a while
            return
        if content is not None and (other := _parse(content)) != self.holder:
            raise UserError(
                f"{self.path.parent} was taken over by another run ({other or 'unknown'}) while this one did not "
                "respond: this one ends, the other one goes on"
            )

    def _acquire(self, wait: bool) -> None:
        """Take the lock when it is free or its holder is dead."""
        last: bytes | None = None
        looks, told = 0, False
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with _guard(self.path, self.holder):
                    content = _read(self.path)
                    holder = None if content is None else _parse(content)
                    alive = None if content is None else _alive(holder, self.holder)
                    if content is None or alive is False or looks == _DEAD_AFTER:
                        self._write()
                        break
            except FileNotFoundError:  # its last holder has removed the empty directory
                continue
            changed = last is not None and content != last
            if (alive or changed) and not wait:
                raise UserError(self._busy(holder))
            looks = 0 if alive or changed else looks + 1
            last = content
            if not told:
                told = True
                self._tell(holder, bool(alive))
            time.sleep(_LOOK)
        self._held = True
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _busy(self, holder: Holder | None) -> str:
        return (
            f"{self.path.parent} is in use by another run ({holder or f'see {self.path}'}): wait for it to end, stop "
            "it, or choose another output directory"
        )

    def _tell(self, holder: Holder | None, alive: bool) -> None:
        directory, who = self.path.parent, holder or "unknown"
        if alive:
            log.warning("%s is in use by another run (%s): waiting for it to end", directory, who)
        else:
            log.warning(
                "%s is locked by a run (%s): waiting up to %.0f s to see whether it is alive; if it is not, deleting "
                "%s saves the wait", directory, who, _DEAD_AFTER * _LOOK, self.path,
            )  # fmt: skip

    def _write(self) -> None:
        """Put the lock file in its place, whole; only one process at a time does."""
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.unlink(missing_ok=True)
            new.write_bytes(_encode(self.holder))
            os.replace(new, self.path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def _beat(self) -> None:
        """Count, in the file that is ours even when another process has just replaced it."""
        while not self._released.wait(_BEAT):
            with suppress(OSError):  # a full disk, a file system that is away for a while
                descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    if _parse(os.read(descriptor, _MOST_BYTES)) != self.holder:
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
    """Let one process at a time read and replace a lock file, so that only one takes over that of a dead process.

    The guard is another file, held for milliseconds. One that is left over from a process that was killed is removed:
    at once when it was a process of this machine, otherwise when it has not changed for half a minute.
    """
    guard = path.with_name(f"{path.name}.guard")
    last, looks = None, 0
    while True:
        try:
            descriptor = os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                status = guard.lstat()
                found = status.st_ino, status.st_mtime_ns
                looks = looks + 1 if found == last else 0
                last = found
                if looks == _GUARD_LOOKS:
                    guard.unlink()
            _remove_dead(guard, here)
            time.sleep(_GUARD_LOOK)
    try:
        try:
            os.write(descriptor, _encode(here))
        finally:
            os.close(descriptor)
        yield
    finally:
        guard.unlink(missing_ok=True)


def _remove_dead(guard: Path, here: Holder) -> None:
    """Remove a guard whose holder has died on this machine; a file lock lets one process at a time do so."""
    with suppress(OSError):  # among others: no such file any more, or a file system without locks
        descriptor = os.open(guard, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dead = _alive(_parse(os.read(descriptor, _MOST_BYTES)), here) is False
            if dead and os.path.samestat(os.fstat(descriptor), guard.lstat()):
                guard.unlink()
        finally:
            os.close(descriptor)


def _missing(directory: Path) -> list[Path]:
    """The directories that have to be created for one, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def _this_process() -> Holder:
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        process=os.getpid(),
        ticks=_ticks(os.getpid()),
        since=datetime.now().astimezone().isoformat(" ", "seconds"),
        job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def _machine() -> str:
    """Name the boot of this machine and the process namespace, within which process numbers are unique."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _ticks(process: int) -> int:
    """When a process started; -1 when that cannot be read, 0 when it has ended and only waits for its parent."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if words[0] in "ZX" else int(words[19])
    except (OSError, ValueError, IndexError):
        return -1


def _alive(holder: Holder | None, here: Holder) -> bool | None:
    """Whether a holder is alive, as seen from here; None when only its counter can tell."""
    if holder is None:
        return None
    if here.machine and holder.machine == here.machine:
        try:
            os.kill(holder.process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:  # it belongs to another user
            pass
        ticks = _ticks(holder.process)
        return -1 in (ticks, holder.ticks) or ticks == holder.ticks
    if here.job and holder.job == here.job and holder.restarts < here.restarts:
        return False  # Slurm has ended it before it requeued the job
    return None


def _read(path: Path) -> bytes | None:
    """The content of a lock file; None when there is none. Nothing but a plain file is read."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return b""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _encode(holder: Holder, beats: int = 0) -> bytes:
    """The content of a lock file: as long as before, so that it can be written over."""
    return f"{json.dumps(asdict(holder))}\n{beats:012d}\n".encode()


def _parse(content: bytes) -> Holder | None:
    """The holder that a lock file names; None when the content is not that of a lock file."""
    try:
        values = json.loads(content.partition(b"\n")[0])
        holder = Holder(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    plain = {"process": int, "ticks": int, "restarts": int}
    for field in fields(Holder):
        value = getattr(holder, field.name)
        if type(value) is not plain.get(field.name, str) or (isinstance(value, str) and not value.isprintable()):
            return None
    return holder if holder.process > 0 else None
