# SPDX-License-Identifier: Apache-2.0
"""A lock on a directory that works on file systems without locks, such as some network and FUSE file systems.

The lock is a lease of the package filelock: a file that names its holder, who renews it every 10 seconds. The lease of
a dead process of this host is taken over within a second, any other one when it has not been renewed for 30 seconds.
"""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import SoftFileLease, Timeout

from bionemo.common.errors import UserError

LOCK = ".bionemo.lock"
_LEASE_SECONDS = 30.0  # after which a lease that is not renewed expires
_LOCAL_SECONDS = 1.0  # within which the lease of a dead process of this host is taken over
log = logging.getLogger(__name__)


class RunLock:
    """The lock of a directory; see `run_lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lease = SoftFileLease(path, lease_duration=_LEASE_SECONDS, thread_local=False)

    def check(self) -> None:
        """Raise a UserError if another process has taken over the lock, as can happen while this one is suspended."""
        owner = self.lease.owner
        if owner is not None and owner.token != self.lease.token:
            raise UserError(
                f"{self.path.parent} was taken over by another run ({self._describe_owner()}) while this run did not "
                "respond: this run exits"
            )

    def acquire(self, wait: bool) -> None:
        """Take the lock if it is free or its holder is dead."""
        with suppress(Timeout):
            return self._acquire(_LOCAL_SECONDS)
        owner, directory = self._describe_owner(), self.path.parent
        if wait:
            log.warning("%s is in use by another run (%s): waiting for it to end", directory, owner)
            return self._acquire(-1)
        if not self._is_owned_here():
            log.warning(
                "%s is locked by a run (%s): waiting up to %.0f s for a sign of it; if that run is dead, delete %s to "
                "continue at once", directory, owner, _LEASE_SECONDS, self.path,
            )  # fmt: skip
            with suppress(Timeout):
                return self._acquire(_LEASE_SECONDS + 2 * _LOCAL_SECONDS)
        raise UserError(
            f"{directory} is in use by another run ({owner}): wait for it to end, stop it, or choose another output "
            "directory"
        )

    def _acquire(self, timeout: float) -> None:
        while not self.lease.is_locked:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.lease.acquire(timeout, poll_interval=min(_LOCAL_SECONDS / 5, 0.2))
            except FileNotFoundError:  # the previous holder has removed the empty directory
                continue
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # filelock leaves its new file
                    with suppress(OSError):
                        if not self.path.stat().st_size:
                            self.path.unlink()
                raise

    def _describe_owner(self) -> str:
        if (owner := self.lease.owner) is None:
            return f"delete {self.path} if it is dead"
        return f"process {owner.pid} on host {owner.hostname.partition('?')[0]}"

    def _is_owned_here(self) -> bool:
        """Return whether the holder is a process of this host, in a container: of this container.

        In a PID namespace other than the initial one, filelock appends `?pidns-` and its inode to the host name.
        """
        if (owner := self.lease.owner) is None:
            return False
        host, _, namespace = owner.hostname.partition("?")
        is_same = not namespace or namespace == f"pidns-{os.stat('/proc/self/ns/pid').st_ino:x}"
        return host == socket.gethostname() and is_same


@contextmanager
def run_lock(directory: Path, name: str = LOCK, wait: bool = False) -> Iterator[RunLock]:
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
        UserError: if another process holds the lock; names the host and the process.
        OSError: if the lock file cannot be written.
    """
    created = [each for each in (directory, *directory.parents) if not each.exists()]
    lock = RunLock(directory / name)
    try:
        lock.acquire(wait)
        yield lock
    finally:
        lock.lease.release()
        for each in created:
            with suppress(OSError):  # not empty
                each.rmdir()
