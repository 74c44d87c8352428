# SPDX-License-Identifier: Apache-2.0
"""Connection of a rank to the heartbeat server: sends the rank's status and receives the diagnosis."""

import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bionemo.common.launcher_environment import launched_process
from bionemo.training.health.heartbeat_server import close_on_fork
from bionemo.training.health.rank_status import RECONNECT_SECONDS, Diagnosis, RankStatus

_runs = itertools.count()  # runs of this process
_MAX_UNANSWERED = 3  # number of heartbeats without reply after which the client sends no more
log = logging.getLogger(__name__)


class _PortUnreachable(OSError):
    """Rank 0 runs, but its heartbeat port cannot be reached, for example because of a firewall."""


class HeartbeatClient(threading.Thread):
    """Thread that sends heartbeats until there is a diagnosis or the run is complete.

    Args:
        get_status: returns the heartbeat, with the names of attributes of RankStatus as keys.
        on_diagnosis: called with the diagnosis, and whether this rank made it because rank 0 does not answer.
        store_address: host and port of torch.distributed's store, which tells the heartbeat port.
        server_port: port of the heartbeat server on rank 0; None on other ranks.
        timeout: seconds without reply after which rank 0 is considered hung.
        interval: seconds between heartbeats.
    """

    def __init__(
        self,
        get_status: Callable[[], dict[str, Any]],
        on_diagnosis: Callable[[Diagnosis, bool], None],
        store_address: tuple[str, int],
        server_port: int | None,
        timeout: float,
        interval: float,
    ) -> None:
        super().__init__(name="heartbeat client", daemon=True)
        self._get_status, self._on_diagnosis = get_status, on_diagnosis
        # The store of a launcher outlives a run of a sweep, and its processes take part in all runs.
        self._store_key = f"bionemo/heartbeat/{next(_runs) if launched_process() else 0}"
        self._store_address, self._port, self._is_rank_0 = store_address, server_port, server_port is not None
        self._timeout, self._interval = timeout, interval
        self._rank_0 = RankStatus(0)  # as known from the server's answers
        if self._is_rank_0:
            self._rank_0.host, self._rank_0.pid = socket.gethostname(), os.getpid()
        self._connection: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._stopped = threading.Event()

    def send(self) -> None:
        """Send a heartbeat immediately; any thread may call this."""
        with self._send_lock, suppress(OSError):  # the receiving thread gets the same error
            if self._connection is not None:
                self._connection.sendall(json.dumps(self._get_status()).encode() + b"\n")

    def kill_unresponsive_rank_0(self) -> None:
        """Kill the process of rank 0 if it runs on this host: no thread of its own can end it."""
        if self._rank_0.host == socket.gethostname():
            with suppress(OSError):
                os.kill(self._rank_0.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def run(self) -> None:
        """Exchange messages with the server."""
        try:
            store = self._publish_port() if self._is_rank_0 else None  # must live as long as ranks may connect
        except RuntimeError as error:  # the main thread gets the same error
            log.info("health monitoring is not available: %s", error)
            return
        result = self._wait_for_diagnosis()
        del store
        if result is not None and not self._stopped.is_set():
            self._on_diagnosis(*result)

    def _wait_for_diagnosis(self) -> tuple[Diagnosis, bool] | None:
        """Connect, and reconnect when the connection is lost; return the arguments of `on_diagnosis`."""
        lost = time.monotonic()
        while not self._stopped.is_set():
            try:
                self._connection = self._connect()
                return self._exchange(self._connection)
            except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of torch's store
                if self._connection is not None:
                    self._rank_0.disconnected = lost = time.monotonic()
                seconds = time.monotonic() - lost
                if isinstance(error, _PortUnreachable):
                    if seconds > self._timeout:
                        log.warning("health monitoring is not available on this rank: %s", error)
                        return None
                elif seconds > (RECONNECT_SECONDS if self._rank_0.pid else self._timeout):
                    if self._rank_0.pid:
                        return Diagnosis("died", 0, f"{self._rank_0} {self._rank_0.describe_exit()}"), True
                    return Diagnosis("hung", 0, f"{self._rank_0} {self._rank_0.describe_silence(seconds)}"), True
            finally:
                with self._send_lock:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
            self._stopped.wait(RECONNECT_SECONDS / 10)
        return None

    def _publish_port(self) -> dist.TCPStore:
        """Create the store, which torch's process group will share, and write the heartbeat port to it."""
        store = self._open_store(is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
        store.set(self._store_key, json.dumps([self._port, self._rank_0.host, self._rank_0.pid]))
        return store

    def _open_store(self, is_master: bool = False) -> dist.TCPStore:
        timeout = timedelta(seconds=self._timeout)
        return dist.TCPStore(
            *self._store_address, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )

    def _connect(self) -> socket.socket:
        host = self._store_address[0]
        if self._rank_0.last_heartbeat is None and not self._is_rank_0:
            # Test the address first: torch's store logs many lines if nobody listens.
            socket.create_connection(self._store_address, RECONNECT_SECONDS).close()
            self._port, self._rank_0.host, self._rank_0.pid = json.loads(self._open_store().get(self._store_key))
        try:
            return close_on_fork(lambda: socket.create_connection((host, self._port or 0), RECONNECT_SECONDS))
        except OSError as error:
            if self._rank_0.last_heartbeat is None:  # although the store of rank 0 was reachable
                raise _PortUnreachable(f"port {self._port} of {host} cannot be reached") from error
            raise

    def _exchange(self, connection: socket.socket) -> tuple[Diagnosis, bool] | None:
        """Send heartbeats and process answers until the connection is lost."""
        unanswered, received = 0, b""
        while not self._stopped.is_set():
            if unanswered < _MAX_UNANSWERED:
                self.send()
            unanswered += 1  # a count instead of a time: the time during which this process was stopped is not counted
            next_heartbeat = time.monotonic() + self._interval
            while (remaining := next_heartbeat - time.monotonic()) > 0:
                connection.settimeout(remaining)
                try:
                    data = connection.recv(1 << 16)
                except TimeoutError:
                    break
                if not data:
                    raise ConnectionResetError
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    answer, unanswered = json.loads(line), 0
                    vars(self._rank_0).update(answer["rank_0"], last_heartbeat=time.monotonic())
                    if answer["diagnosis"]:
                        return Diagnosis(**answer["diagnosis"]), False
                    if answer["finished"]:
                        return None
            if (seconds := unanswered * self._interval) > self._timeout:
                return Diagnosis("hung", 0, f"{self._rank_0} {self._rank_0.describe_silence(seconds)}"), True
        return None
