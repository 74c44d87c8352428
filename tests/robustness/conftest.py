# SPDX-License-Identifier: Apache-2.0
"""Fixtures with a command server and a model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bionemo.checkpoint import list_complete
from tests.robustness.commands import Server
from tests.robustness.scenarios import scenarios


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Start one server for all tests of a process."""
    running = Server()
    yield running
    running.end()


@pytest.fixture(scope="session")
def model(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of a tiny ESM-2nv."""
    scenario = scenarios(Path())["pretrain"]
    directory = tmp_path_factory.mktemp("model")
    scenario.prepare(directory)
    done = server.run(scenario.arguments(directory), directory)
    assert done.status == 0, done.console
    return list_complete(directory / "out" / "checkpoints")[0]
