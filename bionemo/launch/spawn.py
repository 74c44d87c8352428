# SPDX-License-Identifier: Apache-2.0
"""Start the same command again for the other devices of this machine, if no launcher did."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import IO

from bionemo.common.errors import UserError, signal_name
from bionemo.common.launcher_environment import ERROR_DESCRIPTOR

LAUNCHER = "the first process"  # name of this launcher in the workers


@contextmanager
def spawn_local_workers(count: int) -> Iterator[Callable[[], None]]:
    """Start further processes with the same command; they are terminated at the end of the block.

    The workers write their errors to temporary files instead of printing them, so that this process prints one error.

    Args:
        count: number of processes, including this one.

    Yields:
        A function that raises UserError if a process has failed: names it, with its error or how it ended.
    """
    workers: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def check_workers() -> None:
        for rank, (process, errors) in enumerate(workers, 1):
            if process.poll():
                errors.seek(0)
                message = errors.read().decode(errors="replace").strip()
                how = f": {message}" if message else _describe_exit(process.returncode)
                raise UserError(f"rank {rank} (process {process.pid}){how}")

    with ExitStack() as files:
        try:
            for environment in _environments(count):
                errors = files.enter_context(TemporaryFile())
                environment[ERROR_DESCRIPTOR] = str(errors.fileno())
                command = [sys.executable, *_program(), *sys.argv[1:]]
                process = subprocess.Popen(command, env=os.environ | environment, pass_fds=[errors.fileno()])
                workers.append((process, errors))
            yield check_workers
            for process, _ in workers:
                process.wait()
            check_workers()
        finally:
            for process, _ in workers:
                process.terminate()


def _describe_exit(status: int) -> str:
    if status < 0:
        return f" was killed by {signal_name(-status)}: check the memory of this machine"
    return f" exited with status {status}: check its messages above"


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
