# SPDX-License-Identifier: Apache-2.0
"""Worker processes that exit when the process that started them ends, even if it is killed."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.forkserver import ensure_running
from typing import TypeVar

import pyarrow as pa

from bionemo.common.errors import UserError, optional_dependency
from bionemo.config.schema.preparation import PreparationConfig

_START_METHOD = "forkserver"
_PRELOADED_MODULE = "bionemo.preparation.shards"
_TASKS_PER_WORKER = 2  # tasks in flight: one running, one waiting
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
Task = TypeVar("Task")
Result = TypeVar("Result")


@contextmanager
def worker_pool(job: PreparationConfig, limit: int = sys.maxsize) -> Iterator[Executor]:
    """Open the cluster of `engine=ray`, or a pool of at most `num_preprocess_workers` and `limit` processes.

    If the block fails, tasks that have not started are cancelled.

    Raises:
        UserError: if a worker process was killed, or there is no cluster.
    """
    if job.engine == "ray":
        from bionemo.launch.ray import set_token

        set_token()
        with optional_dependency("ray", "engine=ray"):
            from bionemo.preparation.ray_pool import RayExecutor
        with RayExecutor() as cluster:
            yield cluster
        return
    count, context = _num_processes(job, limit), multiprocessing.get_context(_START_METHOD)
    executor = ProcessPoolExecutor(count, context, _initialize_worker)
    try:
        with _ignore_interrupts():  # a terminal sends Ctrl-C to all processes, and new ones cannot handle it yet
            if _START_METHOD == "forkserver":
                context.set_forkserver_preload([_PRELOADED_MODULE])  # imported once, not by every worker
                ensure_running()
            for _ in range(count):
                executor.submit(int)  # starts a worker
        yield executor
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely because memory ran out: lower num_preprocess_workers"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _num_processes(job: PreparationConfig, limit: int) -> int:
    return max(1, min(job.num_preprocess_workers, limit, os.cpu_count() or 1))


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT in the block.

    This has no effect in threads other than the main thread, where Python does not allow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def map_ordered(
    function: Callable[[Task], Result], tasks: Iterable[Task], job: PreparationConfig, limit: int = sys.maxsize
) -> Generator[Result, None, None]:
    """Apply a function to tasks in the processes of `worker_pool` and yield the results in the order of the tasks.

    Tasks are consumed lazily. One worker means this process. Close the generator when leaving it early.
    """
    if job.engine != "ray" and _num_processes(job, limit) == 1:
        yield from map(function, tasks)
        return
    with worker_pool(job, limit) as workers:
        pending: deque[Future[Result]] = deque()
        num_workers = getattr(workers, "num_workers", _num_processes(job, limit))  # of a cluster, or here
        for task in tasks:
            pending.append(workers.submit(function, task))
            if len(pending) > _TASKS_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _initialize_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process receives Ctrl-C and stops its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    configure_malloc()


def configure_malloc() -> None:
    """Make malloc recycle blocks of some megabytes instead of mapping and clearing them each time."""
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # glibc only
        for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
