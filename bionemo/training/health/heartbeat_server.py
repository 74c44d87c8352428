# SPDX-License-Identifier: Apache-2.0
"""Rank 0 listens to what all ranks say of themselves, answers each, and tells all of them when they have to leave."""

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from subprocess import Popen
from typing import Any

from bionemo.training.health.heartbeat_client import PATIENCE, Presence, Verdict, judge

_inherited: set[socket.socket] = set()


def keep(connection: socket.socket) -> socket.socket:
    """Close a connection in workers, which inherit it: with one end left there it would outlive its rank."""
    _inherited.add(connection)
    return connection


def drop(connection: socket.socket) -> None:
    """Close a connection."""
    _inherited.discard(connection)
    connection.close()


os.register_at_fork(after_in_child=lambda: [connection.close() for connection in list(_inherited)])  # type: ignore[func-returns-value]


class RollCall(threading.Thread):
    """Keeps the list of ranks, each by one connection; a line is a JSON object, and so is its answer.

    Attributes:
        ranks: all of them, in order.
        port: where they find it.
    """

    def __init__(
        self, ranks: int, limit: float, interval: float, children: Callable[[], Sequence[Popen[Any]]]
    ) -> None:
        """Begin to listen.

        Args:
            ranks: how many there are.
            limit: seconds in which some rank has to move.
            interval: seconds between two words of a rank.
            children: gives the processes of ranks 1, 2, ..., as far as this one has started them.
        """
        super().__init__(name="roll call", daemon=True)
        self.ranks = [Presence(number) for number in range(ranks)]
        self._limit, self._interval, self._children = limit, interval, children
        self._verdict: Verdict | None = None
        self._over = False
        self._unread: dict[socket.socket, bytes] = {}
        self._connections: dict[int, socket.socket] = {}
        self._listener = keep(_listener())
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def finish(self) -> None:
        """Tell all that nothing has to be watched any more, and see that they have heard it."""
        self._over = True
        self.join(PATIENCE + self._interval)

    def run(self) -> None:
        """Listen until all have gone."""
        now, before, told = 0.0, time.monotonic(), None
        while told is None or (self._unread and now - told < PATIENCE):
            time.sleep(min(self._interval / 4, 0.5))  # what has come meanwhile is taken at once
            elapsed, before = time.monotonic() - before, time.monotonic()
            now += min(elapsed, self._interval)  # while this process was stopped, nobody was late
            for key, _ in self._selector.select(0):
                self._accept() if key.fileobj is self._listener else self._hear(key.fileobj, now)  # type: ignore[arg-type]
            for number, child in enumerate(self._children(), 1):
                rank = self.ranks[number]
                if child.poll() is not None and rank.status is None:
                    rank.status, rank.lost = child.returncode, now
            if told is None:
                self._verdict = judge(self.ranks, now, self._limit, self._interval)
                if self._verdict or self._over:
                    told = now
                    for connection in self._unread:
                        self._answer(connection)
        for connection in [self._listener, *self._unread]:
            drop(connection)

    def _accept(self) -> None:
        """Take all calls that have come."""
        with suppress(BlockingIOError):
            while True:
                connection = keep(self._listener.accept()[0])
                connection.setblocking(False)
                self._unread[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket, now: float) -> None:
        """Take in what has come on a connection."""
        try:
            received = connection.recv(1 << 16)
            *lines, self._unread[connection] = (self._unread[connection] + received).split(b"\n")
            for line in lines:
                said = json.loads(line)
                self._connections[said["rank"]] = connection
                self.ranks[said["rank"]].update(said, now)
                self._answer(connection)
        except (OSError, ValueError, LookupError, TypeError):  # broken, or none of ours
            received = b""
        if not received:
            self._selector.unregister(connection)
            del self._unread[connection]
            drop(connection)
            for number, used in self._connections.items():
                if used is connection:
                    self.ranks[number].lost = now

    def _answer(self, connection: socket.socket) -> None:
        first = self.ranks[0]
        answer = {
            "first": {"host": first.host, "process": first.process, "doing": first.doing},
            "verdict": asdict(self._verdict) if self._verdict else None,
            "over": self._over,
        }
        with suppress(OSError):  # reading meets it too
            connection.send(json.dumps(answer).encode() + b"\n")


def _listener() -> socket.socket:
    """Any free port, over IPv6 and IPv4 where the host has both."""
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)
