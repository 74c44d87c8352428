# SPDX-License-Identifier: Apache-2.0
"""Run the tasks of a preparation on a Ray cluster. Its machines share the directories of the input and the output."""

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from bionemo.common.errors import UserError
from bionemo.launch.ray import set_token
from bionemo.preparation.pool import configure_malloc

_ADDRESS = "RAY_ADDRESS"
_WAIT = 60  # seconds; a cluster that was started in the background of a job takes some


class RayExecutor(Executor):
    """Submits every task to Ray, which repeats those whose machine or process is lost.

    The connection remains open until this process ends.

    Attributes:
        num_workers: number of tasks that run at a time, one per core of the cluster.

    Raises:
        UserError: if there is no cluster.
    """

    def __init__(self) -> None:
        address, until = os.environ.get(_ADDRESS, "auto"), time.monotonic() + _WAIT
        while not ray.is_initialized():
            set_token()
            try:
                if re.fullmatch(r"[^/]+:\d+", address):  # Ray itself would try for minutes
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host, int(port)), timeout=5).close()
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except OSError as error:
                if time.monotonic() > until:
                    raise UserError(
                        f"no Ray cluster responded at {address} within {_WAIT} seconds: start one with "
                        f"scripts/start_ray_cluster.sh, or set {_ADDRESS} to HOST:PORT of its head"
                    ) from error
                time.sleep(1)
        self.num_workers = int(ray.cluster_resources().get("CPU", 1))
        self._task, self._directory = ray.remote(_run).options(scheduling_strategy="SPREAD"), os.getcwd()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """See Executor."""
        future: Future[Any] = Future()

        def finish(found: Future[Any]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if (error := found.exception()) is None:
                future.set_result(found.result())
            else:
                future.set_exception(_translate(error))

        self._task.remote(self._directory, function, *arguments, **keywords).future().add_done_callback(finish)
        return future


def _run(directory: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a task on a machine of the cluster."""
    configure_malloc()
    try:
        os.chdir(directory)
        return function(*arguments, **keywords)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(
            f"{error.filename} cannot be used on {socket.gethostname()} ({error.strerror}): the machines of the Ray "
            "cluster must share the directories of the input and the output"
        ) from error


def _translate(error: BaseException) -> BaseException:
    if isinstance(error, RayTaskError):
        return error.cause
    if isinstance(error, RayError):
        lines = str(error).strip().splitlines()
        return UserError(f"a task failed on the Ray cluster: {lines[0] if lines else type(error).__name__}")
    return error
