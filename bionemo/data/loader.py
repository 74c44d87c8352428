# SPDX-License-Identifier: Apache-2.0
"""Data loader: assigns steps to ranks and workers; errors in workers become one line and cannot hang the run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bionemo.common.errors import WORKER_ADVICE, UserError, describe
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.dataset import TokenizedBatch
from bionemo.data.sampler import DataPosition, GlobalBatchSampler

_TOKENS_PER_CALL = 1 << 16  # tokens collated per call: a compromise between call overhead and cache size

# Garbage collection in a forked worker must skip inherited objects: gloo, for example, would join threads that exist
# only in the parent, and hang.
os.register_at_fork(after_in_child=gc.freeze)


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one rank in one step, and the stream position after the step."""

    micro_batches: list[PackedBatch]
    next_position: DataPosition

    def to(self, device: torch.device | str) -> StepBatch:
        """Copy to a device."""
        return replace(self, micro_batches=[batch.to(device) for batch in self.micro_batches])

    def pin_memory(self) -> StepBatch:
        """Copy to page-locked memory; called by the data loader."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


@dataclass(frozen=True, eq=False)
class StepDataset(IterableDataset):
    """The steps of one rank, from a stream position on.

    Worker i of n makes steps i, i + n, ..., and the data loader collects them in turn, so the order does not depend on
    the number of workers. Every worker packs every window, which costs a fifth of collating all batches. Several steps
    are collated per call, only for speed: a sample does not depend on those it is collated with.
    """

    sampler: GlobalBatchSampler
    collate: Collator
    start: DataPosition
    rank: int
    ranks: int
    num_micro_batches: int

    def __iter__(self) -> Iterator[Any]:
        """Yield each `StepBatch`; in a worker its parts, which are smaller."""
        if (info := get_worker_info()) is None:
            return map(_unpack, self._steps(0, 1))
        return self._steps(info.id, info.num_workers)

    def _steps(self, worker: int, workers: int) -> Iterator[tuple[list[TokenizedBatch], DataPosition]]:
        size, max_lengths = self.collate.micro_batch_size, self.collate.dataset.max_lengths
        starts = [(index * self.ranks + self.rank) * size for index in range(self.num_micro_batches)]
        steps_per_call = max(1, _TOKENS_PER_CALL // (self.num_micro_batches * size * sum(filter(None, max_lengths))))
        own = islice(self.sampler.batches(self.start), worker, None, workers)
        while batches := list(islice(own, steps_per_call)):
            collated = iter(self.collate([batch.rows[i : i + size] for batch in batches for i in starts]))
            for batch in batches:
                yield list(islice(collated, self.num_micro_batches)), batch.next_position


def _unpack(step: Sequence[Any]) -> StepBatch:
    """Convert to tensors what the data loader has not converted; see `TokenizedBatch.pin_memory`."""
    batches, position = step
    return StepBatch([each.unpack() if isinstance(each, TokenizedBatch) else each for each in batches], position)


class StepLoader(DataLoader[Any]):
    """Data loader of complete steps; without `workers`, the main process makes them.

    `timeout` is the maximum time to wait for a step of a worker, in seconds. With `pin_memory`, and if there is a GPU,
    steps are copied to page-locked memory.
    """

    def __init__(self, steps: IterableDataset[Any], *, workers: int, timeout: float, pin_memory: bool) -> None:
        super().__init__(
            steps,
            batch_size=None,
            num_workers=workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            persistent_workers=workers > 0,
            timeout=timeout if workers else 0,
            worker_init_fn=_set_up_worker_signals,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start the workers and yield the steps.

        Raises:
            UserError: if the workers cannot be started, one of them is lost, or one reports an error.
        """
        _check_semaphores(self.num_workers)
        # Threads that exist in a worker before `_set_up_worker_signals`, such as those that OpenBLAS starts after a
        # fork, inherit the mask.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self.num_workers else ())
        try:
            steps = super().__iter__()
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"{self.num_workers} data loader workers cannot be started ({reason}): {WORKER_ADVICE}"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        return self._unpack(steps)

    def _unpack(self, steps: Iterator[Any]) -> Iterator[Any]:
        try:
            for step in steps:
                yield _unpack(step) if isinstance(step, tuple | list) else step
        except Exception as error:
            if self.num_workers == 0 or (line := describe(error)) is None:
                raise
            raise UserError(line) from error


def _set_up_worker_signals(worker: int) -> None:
    """Keep the worker alive when a terminal, `timeout` or Slurm signals all processes.

    The main process then saves a checkpoint before it stops its workers.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM is blocked, see `StepLoader.__iter__`; the thread exits only if the parent sends it.
    threading.Thread(target=_exit_on_sigterm_from, args=(os.getppid(),), daemon=True).start()


def _exit_on_sigterm_from(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _check_semaphores(workers: int) -> None:
    """Check that /dev/shm has space for the workers' queues; torch would fail while it creates them."""
    try:
        [multiprocessing.Event() for _ in range(workers + 2 if workers else 0)]
    except OSError as error:
        raise UserError(
            f"data loader workers need semaphores in /dev/shm ({error.strerror}): enlarge it (docker run --shm-size), "
            "or set model.data.num_workers=0"
        ) from error
