# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints from all ranks, either synchronously or in a thread while training continues."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bionemo.checkpoint import Piece, save_distributed


class CheckpointWriter:
    """Write one checkpoint at a time.

    Args:
        asynchronous: copy tensors and state to main memory and write them in a thread. Training waits only for the
            copy, which is much faster than writing if the model is on a GPU.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._group: Any = None
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[None]] = []

    def create_process_group(self) -> None:
        """Create a separate process group, because the thread runs concurrently with collectives of the training."""
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def save(self, path: Path, state: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Write a checkpoint after the previous one is complete; all ranks must call it.

        Raises:
            UserError: if this checkpoint (when synchronous) or the previous one could not be written.
        """
        self.wait()
        if self.asynchronous:
            pieces = [replace(piece, values=piece.values.detach().to("cpu", copy=True)) for piece in pieces]
            state = deepcopy(dict(state))  # training changes lists and dictionaries of callbacks while the thread runs
        self._run(lambda: save_distributed(path, state, pieces, self._rank(), self._all_gather))

    def after_save(self, task: Callable[[], None]) -> None:
        """Run a task on rank 0 once the last checkpoint is written, and let all ranks wait for it.

        The task does not run if the checkpoint could not be written. All ranks must call this method.
        """
        saves = list(self._pending)

        def run() -> None:
            for save in saves:
                save.result()
            if self._rank() == 0:
                task()
            self._all_gather(None)

        self._run(run)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            UserError: if a checkpoint could not be written.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _run(self, task: Callable[[], None]) -> None:
        if self.asynchronous:
            self._pending.append(self._executor.submit(task))
        else:
            task()

    def _rank(self) -> int:
        return dist.get_rank(self._group) if self._group else 0

    def _all_gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
