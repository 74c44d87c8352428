# SPDX-License-Identifier: Apache-2.0
"""The heartbeat server accepts connections despite temporary errors, and forked processes do not keep them open."""

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from bionemo.training.health import heartbeat_client, heartbeat_server
from bionemo.training.health.heartbeat_client import HeartbeatClient
from bionemo.training.health.heartbeat_server import HeartbeatServer


class Listener:
    """A listening socket that calls `before` or `after` around `accept`."""

    def __init__(
        self, listener: socket.socket, before: Callable[[], Any], after: Callable[[socket.socket], Any]
    ) -> None:
        self._listener, self._before, self._after = listener, before, after

    def accept(self) -> tuple[socket.socket, Any]:
        self._before()
        connection, address = self._listener.accept()
        self._after(connection)
        return connection, address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


@contextmanager
def running(
    before: Callable[[], Any] = lambda: None, after: Callable[[socket.socket], Any] = lambda connection: None
) -> Iterator[HeartbeatServer]:
    server = HeartbeatServer(1, timeout=60, interval=0.1, child_processes=list)
    server._listener = Listener(server._listener, before, after)  # type: ignore[assignment]
    server.start()
    yield server
    server.finish()
    assert not server.is_alive()


def heartbeat(port: int) -> dict[str, Any]:
    """Send a heartbeat of rank 0 and return the answer."""
    keys = ("rank", "pid", "collectives", "io_megabytes", "phase", "finished", "error")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(json.dumps(dict.fromkeys(keys) | {"rank": 0, "phase": "in a test"}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(connection.makefile().readline())
        return answer


def test_a_rank_does_not_connect_to_the_server_of_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a launcher outlives the runs of a sweep; rank 1 may be ahead of rank 0."""
    address = "127.0.0.1", find_free_network_port()
    monkeypatch.setattr(heartbeat_client, "launched_process", lambda: True)
    monkeypatch.setattr(heartbeat_client, "_runs", iter((0, 1, 1)))  # this test is two processes

    def client(server_port: int | None) -> HeartbeatClient:
        return HeartbeatClient(lambda: {}, lambda diagnosis, own: None, address, server_port, timeout=60, interval=0.1)

    with running() as first, running() as second:
        clients = [client(first.port), client(None), client(second.port)]
        store = clients[0]._publish_port()
        rank_1 = threading.Thread(target=lambda: clients[1]._connect().close())
        rank_1.start()
        rank_1.join(0.2)
        clients[2]._publish_port()
        rank_1.join()
        assert clients[1]._port == second.port
        del store


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED], ids=errno.errorcode.get)
def test_an_error_of_accept_does_not_end_the_server(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_server, "_RETRY_SECONDS", 0.01)
    errors = [OSError(number, os.strerror(number)) for _ in range(3)]

    def fail() -> None:
        if errors:
            raise errors.pop()

    with running(before=fail) as server:
        for _ in range(2):
            assert heartbeat(server.port)["rank_0"]["phase"] == "in a test"
    assert not errors


def test_a_process_forked_during_accept_does_not_keep_the_connection() -> None:
    accepted: list[int] = []
    has_accepted = threading.Event()

    def pause(connection: socket.socket) -> None:
        accepted.append(connection.fileno())
        has_accepted.set()
        time.sleep(0.3)

    with running(after=pause) as server, socket.create_connection(("127.0.0.1", server.port)):
        assert has_accepted.wait(10)
        if (child := os.fork()) == 0:
            try:
                os.fstat(accepted[0])
            except OSError as error:
                os._exit(error.errno == errno.EBADF)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_error_that_ends_the_server_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("in two\nlines")

    monkeypatch.setattr(heartbeat_server, "diagnose", fail)
    with caplog.at_level(logging.ERROR), running() as server:
        server.join(10)
    assert caplog.messages == ["the heartbeat server has ended: ValueError: in two lines"]
