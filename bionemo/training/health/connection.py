# SPDX-License-Identifier: Apache-2.0
"""The line from a rank to rank 0: what this rank does goes there every few seconds, the verdict comes back."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bionemo.training.health.heartbeat_client import PATIENCE, Presence, Verdict, how_it_ended, silence
from bionemo.training.health.heartbeat_server import drop, keep

_UNANSWERED = 3  # words after which it only listens
log = logging.getLogger(__name__)


class _PortClosed(OSError):
    """Rank 0 is there, but not for us: a firewall, say."""


class Line(threading.Thread):
    """The thread of a rank that tells and listens until there is a verdict, or the run is over.

    Args:
        words: gives what this rank says of itself, see `Presence`.
        obey: is called with the verdict, and whether it was reached here, because rank 0 could not tell one.
        store: host and port of the store of torch.distributed.
        key: of the roll call's port in the store.
        port: the roll call's, on rank 0; 0 on all others.
        limit: seconds that rank 0 may keep silent.
        interval: seconds between two words.
    """

    def __init__(
        self,
        words: Callable[[], dict[str, Any]],
        obey: Callable[[Verdict, bool], None],
        store: tuple[str, int],
        key: str,
        port: int,
        limit: float,
        interval: float,
    ) -> None:
        super().__init__(name="line to rank 0", daemon=True)
        self._words, self._obey = words, obey
        self._address, self._key, self._port, self._is_first = store, key, port, bool(port)
        self._limit, self._interval = limit, interval
        self._first = Presence(0)  # as far as it has told us
        if self._is_first:
            self._first.host, self._first.process = socket.gethostname(), os.getpid()
        self._connection: socket.socket | None = None
        self._speaking = threading.Lock()
        self._over = threading.Event()

    def speak(self) -> None:
        """Tell now, and not only in a while; any thread may call it."""
        with self._speaking, suppress(OSError):  # listening meets the same error
            if self._connection is not None:
                self._connection.sendall(json.dumps(self._words()).encode() + b"\n")

    def end(self) -> None:
        """Listen no more."""
        self._over.set()

    def run(self) -> None:
        """Tell and listen."""
        try:
            store = self._serve() if self._is_first else None  # it lasts as long as this thread
        except RuntimeError as error:  # the main thread meets the same
            log.info("not watching: %s", error)
            return
        found = self._wait()
        del store
        if found is not None and not self._over.is_set():
            self._obey(*found)

    def _wait(self) -> tuple[Verdict, bool] | None:
        """Wait for a verdict, or for the end of the run."""
        lost = time.monotonic()
        while not self._over.is_set():
            try:
                self._connection = self._connect()
                return self._listen(self._connection)
            except (OSError, ValueError, RuntimeError) as error:  # the last of torch's store
                if self._connection is not None:
                    self._first.lost = lost = time.monotonic()
                seconds = time.monotonic() - lost
                if isinstance(error, _PortClosed):
                    if seconds > self._limit:
                        log.warning("this rank is not watched: %s", error)
                        return None
                elif seconds > (PATIENCE if self._first.process else self._limit):
                    return self._without_rank_0(seconds), True
            finally:
                self._hang_up()
            self._over.wait(PATIENCE / 10)
        return None

    def _serve(self) -> dist.TCPStore:
        """Open the store, which torch's process group then shares, and say there where rank 0 listens."""
        server = self._store(is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
        server.set(self._key, json.dumps([self._port, self._first.host, self._first.process]))
        return server

    def _connect(self) -> socket.socket:
        """Call rank 0 at its port, which at first only the store knows."""
        host, _ = self._address
        if self._first.heard is None and not self._is_first:
            # torch's store would tell in many lines that nobody is there
            socket.create_connection(self._address, PATIENCE).close()
            self._port, self._first.host, self._first.process = json.loads(self._store().get(self._key))
        try:
            return keep(socket.create_connection((host, self._port), PATIENCE))
        except OSError as error:
            if self._first.heard is None:  # a moment ago rank 0 was there
                raise _PortClosed(f"port {self._port} of {host} cannot be reached") from error
            raise

    def _hang_up(self) -> None:
        with self._speaking:
            if self._connection is not None:
                drop(self._connection)
                self._connection = None

    def _without_rank_0(self, seconds: float) -> Verdict:
        if self._first.process:
            return Verdict("gone", 0, f"{self._first} {how_it_ended(self._first)}")
        return Verdict("stuck", 0, f"{self._first} {silence(self._first, seconds)}")

    def _listen(self, connection: socket.socket) -> tuple[Verdict, bool] | None:
        """Tell at intervals and listen in between, as long as the connection holds."""
        unanswered, unread = 0, b""
        while not self._over.is_set():
            if unanswered < _UNANSWERED:
                self.speak()
            unanswered += 1  # counted, not timed: while this process itself is stopped, nobody is late
            due = time.monotonic() + self._interval
            while (left := due - time.monotonic()) > 0:
                connection.settimeout(left)
                try:
                    received = connection.recv(1 << 16)
                except TimeoutError:
                    break
                if not received:
                    raise ConnectionResetError
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    answer, unanswered = json.loads(line), 0
                    vars(self._first).update(answer["first"], heard=time.monotonic())
                    if answer["verdict"]:
                        return Verdict(**answer["verdict"]), False
                    if answer["over"]:
                        return None
            if (seconds := unanswered * self._interval) > self._limit:
                return Verdict("stuck", 0, f"{self._first} {silence(self._first, seconds)}"), True
        return None

    def _store(self, is_master: bool = False) -> dist.TCPStore:
        return dist.TCPStore(
            *self._address, is_master=is_master, timeout=timedelta(seconds=self._limit), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
