# SPDX-License-Identifier: Apache-2.0
"""Start the same command again for the other devices of this machine, if no launcher did."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bionemo.common.errors import UserError

LAUNCHER = "the first process"  # name of this launcher in the workers


@contextmanager
def spawn_local_workers(count: int) -> Iterator[Callable[[], None]]:
    """Start further processes with the same command; they are terminated at the end of the block.

    Args:
        count: number of processes, including this one.

    Yields:
        A function that raises UserError if one of the processes was killed or crashed. If one has ended with status 1,
        it has printed its error, and the function ends this process with the same status.
    """
    processes = [
        subprocess.Popen([sys.executable, *_program(), *sys.argv[1:]], env=os.environ | environment)
        for environment in _environments(count)
    ]

    def check_workers() -> None:
        for rank, process in enumerate(processes, 1):
            if process.poll() == 1:
                raise SystemExit(1)
            if process.returncode:
                raise UserError(f"process {rank} of {count} has ended with status {process.returncode}")

    try:
        yield check_workers
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()


def _environments(count: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables of the further processes, which share the cores."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "BIONEMO_LAUNCHER": LAUNCHER,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1))),
    }  # fmt: skip
    for rank in range(1, count):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _program() -> list[str]:
    """Return the arguments of `python` that start this program again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec is not None else [sys.argv[0]]
