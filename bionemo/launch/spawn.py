# SPDX-License-Identifier: Apache-2.0
"""The same command once more for each further device of this machine, where no launcher has started it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bionemo.common.errors import UserError


@contextmanager
def started_again(count: int) -> Iterator[Callable[[], None]]:
    """Be the first of so many processes; the others end with this one.

    Args:
        count: of processes, this one included.

    Yields:
        A function that raises UserError when one of the others has failed.
    """
    processes = [
        subprocess.Popen([sys.executable, *_program(), *sys.argv[1:]], env=os.environ | environment)
        for environment in _environments(count)
    ]

    def see_that_none_has_failed() -> None:
        for rank, process in enumerate(processes, 1):
            if process.poll():
                raise UserError(f"process {rank} of {count} has ended with status {process.returncode}")

    try:
        yield see_that_none_has_failed
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()


def _environments(count: int) -> Iterator[dict[str, str]]:
    """Who each of the others is; they share the cores."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "BIONEMO_LAUNCHER": "the first process",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1))),
    }  # fmt: skip
    for rank in range(1, count):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _program() -> list[str]:
    """Return the arguments of `python` that start this program again."""
    if sys.argv[0].startswith("bionemo "):  # set by cli/main.py, which has removed the name of the command
        return ["-m", "bionemo.cli.main", sys.argv[0].split()[1]]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec is not None else [sys.argv[0]]
