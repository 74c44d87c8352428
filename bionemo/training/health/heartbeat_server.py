# SPDX-License-Identifier: Apache-2.0
"""Heartbeat server on rank 0: receives the status of all ranks, answers each heartbeat and sends the diagnosis.

Each rank has one TCP connection. Messages are JSON objects, one per line.
"""

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from subprocess import Popen
from typing import Any
from weakref import WeakSet

from bionemo.training.health.rank_status import RECONNECT_SECONDS, Diagnosis, RankStatus, diagnose

_MAX_MESSAGE = 1 << 24  # bytes of a heartbeat, which contains the whole message of an error
_RETRY_SECONDS = 0.2  # pause after an error of `accept`, such as too many open files
_sockets: WeakSet[socket.socket] = WeakSet()
_fork_lock = threading.Lock()  # held while a socket is created and while this process forks
log = logging.getLogger(__name__)


def close_on_fork(create: Callable[[], socket.socket]) -> socket.socket:
    """Create a socket that forked processes close: a data loader worker could otherwise keep a dead rank's open."""
    with _fork_lock:
        connection = create()
        _sockets.add(connection)
    return connection


def _close_sockets() -> None:
    for connection in list(_sockets):
        connection.close()
    _fork_lock.release()


os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_sockets)


class HeartbeatServer(threading.Thread):
    """Thread that runs the server until there is a diagnosis or the run is complete.

    Args:
        num_ranks: number of ranks.
        timeout: seconds within which some rank must make progress.
        interval: seconds between heartbeats of a rank.
        child_processes: returns the processes of ranks 1, 2, ... that this process has started.

    Attributes:
        ranks: status of all ranks, in order.
        port: TCP port.
    """

    def __init__(
        self, num_ranks: int, timeout: float, interval: float, child_processes: Callable[[], Sequence[Popen[Any]]]
    ) -> None:
        super().__init__(name="heartbeat server", daemon=True)
        self.ranks = [RankStatus(rank) for rank in range(num_ranks)]
        # an answer may precede the first heartbeat of rank 0
        self.ranks[0].host, self.ranks[0].pid = socket.gethostname(), os.getpid()
        self._timeout, self._interval, self._child_processes = timeout, interval, child_processes
        self._diagnosis: Diagnosis | None = None
        self._finished = False
        self._now = 0.0
        self._connections: dict[asyncio.StreamWriter, int | None] = {}  # open connections and their ranks
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio keeps weak references only
        self._listener = close_on_fork(_listen)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def finish(self) -> None:
        """Tell all ranks that the run is complete, and wait until they have disconnected."""
        self._finished = True
        self.join(RECONNECT_SECONDS + self._interval)

    def run(self) -> None:
        """Run the server."""
        try:
            asyncio.run(self._serve())
        except Exception as error:
            log.error("the heartbeat server has ended: %s: %s", type(error).__name__, " ".join(str(error).split()))
        finally:
            self._listener.close()

    async def _serve(self) -> None:
        self._accept()
        previous = time.monotonic()
        while self._diagnosis is None and not self._finished:
            await asyncio.sleep(min(self._interval / 4, 0.5))
            elapsed, previous = time.monotonic() - previous, time.monotonic()
            self._now += min(elapsed, self._interval)  # the time during which this process was stopped does not count
            for status, process in zip(self.ranks[1:], self._child_processes(), strict=False):
                if process.poll() is not None and status.exit_code is None:
                    status.exit_code, status.disconnected = process.returncode, self._now
            self._diagnosis = diagnose(self.ranks, self._now, self._timeout, self._interval)
        for writer in self._connections:
            self._answer(writer)
        deadline = time.monotonic() + RECONNECT_SECONDS
        while self._connections and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for writer in self._connections:
            writer.transport.abort()

    def _accept(self) -> None:
        """Accept all waiting connections, then call this method again when there are more, or after an error."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        try:
            while True:
                connection = close_on_fork(lambda: self._listener.accept()[0])
                connection.setblocking(False)
                self._tasks.add(task := loop.create_task(self._receive(connection)))
                task.add_done_callback(self._tasks.discard)
        except BlockingIOError:
            loop.add_reader(self._listener, self._accept)
        except OSError:
            loop.call_later(_RETRY_SECONDS, self._accept)

    async def _receive(self, connection: socket.socket) -> None:
        """Process the heartbeats of one connection until it is closed."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_MESSAGE)
        self._connections[writer] = None
        with suppress(OSError, ValueError, LookupError, TypeError):  # connection lost, or not one of our ranks
            while line := await reader.readline():
                heartbeat = json.loads(line)
                rank = heartbeat["rank"]
                self.ranks[rank].update(heartbeat, self._now)
                self._connections[writer] = rank
                self._answer(writer)
        rank = self._connections.pop(writer)
        writer.close()
        if rank is not None and rank not in self._connections.values():
            self.ranks[rank].disconnected = self._now

    def _answer(self, writer: asyncio.StreamWriter) -> None:
        rank_0 = self.ranks[0]
        answer = {
            "rank_0": {"host": rank_0.host, "pid": rank_0.pid, "phase": rank_0.phase},
            "diagnosis": asdict(self._diagnosis) if self._diagnosis else None,
            "finished": self._finished,
        }
        writer.write(json.dumps(answer).encode() + b"\n")


def _listen() -> socket.socket:
    """Listen on any free port, over IPv6 and IPv4 if the host has both."""
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)
