# SPDX-License-Identifier: Apache-2.0
"""Worker processes that never outlive the command they work for."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.forkserver import ensure_running
from typing import Any, TypeVar

import pyarrow as pa

from bionemo.common.errors import UserError

_START_METHOD = "forkserver"
_PRELOADED = "bionemo.preparation.shards"
_AHEAD = 2  # tasks in flight per worker: one at work, one waiting
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
Task = TypeVar("Task")
Result = TypeVar("Result")


@contextmanager
def pool(workers: int, initializer: Callable[..., object] | None = None, *arguments: Any) -> Iterator[Executor]:
    """Open a pool of at most one process per core; tasks that have not begun are dropped when the block fails.

    Args:
        workers: processes wanted.
        initializer: called with the arguments in each process before its first task.
        *arguments: for it.

    Raises:
        UserError: when a process is killed from outside.
    """
    context = multiprocessing.get_context(_START_METHOD)
    if _START_METHOD == "forkserver":
        context.set_forkserver_preload([_PRELOADED])  # imported once, not by every worker
        _start_server()
    size = max(1, min(workers, os.cpu_count() or 1))
    executor = _Executor(size, context, _begin, (initializer, arguments))
    try:
        yield executor
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely for want of memory: lower num_preprocess_workers"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


class _Executor(ProcessPoolExecutor):
    """A process pool whose `submit` defers Ctrl-C: it may start a worker, which must be registered to be stopped."""

    def submit(self, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Submit a task."""
        with _interrupts_deferred():
            return super().submit(*arguments, **keywords)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer SIGINT until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        signal.raise_signal(signal.SIGINT)


def _start_server() -> None:
    """Start the server of processes; it ignores Ctrl-C, which a terminal sends to it too, from its first line."""
    if threading.current_thread() is not threading.main_thread():
        ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def in_order(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Generator[Result, None, None]:
    """Work on tasks in several processes; their results come in the tasks' order.

    Tasks are taken as they are needed, so there may be any number of them. One worker is the process itself. Close the
    iterator when leaving it early.
    """
    workers = min(workers, os.cpu_count() or 1)
    if workers <= 1:
        yield from map(function, tasks)
        return
    with pool(workers) as executor:
        pending: deque[Future[Result]] = deque()
        for task in tasks:
            pending.append(executor.submit(function, task))
            if len(pending) > _AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _begin(initializer: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself is asked to stop, and stops its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _keep_memory()
    if initializer:
        initializer(*arguments)


def _keep_memory() -> None:
    """Have blocks of some megabytes, which come and go all the time, recycled instead of mapped and cleared anew."""
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):  # glibc's; elsewhere it stays as it is
        for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
