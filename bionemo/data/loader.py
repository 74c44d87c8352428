# SPDX-License-Identifier: Apache-2.0
"""Torch's data loader, whose worker processes report errors in one line and cannot hang the run."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bionemo.common.errors import UserError, describe

_LOST = re.compile(r"DataLoader (worker \(pid|timed out)|Pin memory thread exited")  # what torch says of lost workers
_ADVICE = "check the memory of the machine and the size of /dev/shm, or set model.data.num_workers=0"


@dataclass(frozen=True)
class Failure:
    """What a worker yields in place of a step when a user, a file or the machine caused an error.

    An exception would reach the main process with the worker's traceback in its text.
    """

    text: str


def with_failures(steps: Iterator[Any]) -> Iterator[Any]:
    """Yield the steps and, in a worker process, a `Failure` in place of an error that has a one-line description."""
    if get_worker_info() is None:
        yield from steps
        return
    try:
        yield from steps
    except Exception as error:
        if (line := describe(error)) is None:
            raise
        yield Failure(line)


class StepLoader(DataLoader[Any]):
    """A loader of ready-made steps.

    Args:
        steps: the dataset; see `with_failures`.
        workers: processes; 0: the steps are made in this one.
        patience: seconds to wait for a step of a worker.
        pin_memory: whether steps are put into page-locked memory.
    """

    def __init__(self, steps: IterableDataset[Any], *, workers: int, patience: float, pin_memory: bool) -> None:
        super().__init__(
            steps,
            batch_size=None,
            num_workers=workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            persistent_workers=workers > 0,
            timeout=patience if workers else 0,
            worker_init_fn=_leave_signals_to_the_main_process,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start the workers, and give the steps.

        Raises:
            UserError: the workers cannot be started, one of them is lost, or one has failed.
        """
        _check_semaphores(self.num_workers)
        try:
            steps = super().__iter__()
        except OSError as error:
            raise UserError(
                f"{self.num_workers} data loader workers cannot be started ({error.strerror or error}): {_ADVICE}"
            ) from error
        return _Steps(steps)


class _Steps:
    """An iterator that raises what workers report."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps = steps

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> Any:
        try:
            step = next(self._steps)
        except RuntimeError as error:
            if not _LOST.match(str(error)):
                raise
            raise UserError(f"{str(error).splitlines()[0].rstrip(' .')}: {_ADVICE}") from error
        if isinstance(step, Failure):
            raise UserError(step.text)
        return step


def _leave_signals_to_the_main_process(worker: int) -> None:
    """Keep a worker alive when a terminal, `timeout` or Slurm signals all processes: the main one decides when to end.

    It saves first, and then ends its workers.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the thread, which knows who has sent it
    threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _check_semaphores(workers: int) -> None:
    """Check that /dev/shm has room for the queues of the workers; torch fails half-way through making them.

    Raises:
        UserError: when it has not.
    """
    try:
        [multiprocessing.Event() for _ in range(workers + 2 if workers else 0)]
    except OSError as error:
        raise UserError(
            f"data loader workers need semaphores in /dev/shm ({error.strerror}): enlarge it (docker run --shm-size), "
            "or set model.data.num_workers=0"
        ) from error
