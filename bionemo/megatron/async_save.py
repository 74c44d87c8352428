# SPDX-License-Identifier: Apache-2.0
"""Writing checkpoints from all processes together, at once or behind the training that goes on."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bionemo.checkpoint import Piece, save_together


class Saver:
    """Saves one checkpoint at a time.

    Args:
        behind: copy the tensors and write them in a thread, while training goes on. It costs a copy in main memory;
            where the model lies on a GPU, the copy is far faster than the writing, and training waits for it alone.
    """

    def __init__(self, behind: bool = False) -> None:
        self.behind = behind
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def connect(self) -> None:
        """Make a group of processes of its own: the thread must not meet the collectives of the training step."""
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def save(
        self, path: Path, state: Mapping[str, Any], pieces: list[Piece], then: Callable[[], None] | None = None
    ) -> None:
        """Write a checkpoint, after the one before it; rank 0 does `then` when it is on disk.

        Raises:
            UserError: when it cannot be written, or the one before it could not.
        """
        self.wait()
        if not self.behind:
            self._save(path, state, pieces, then)
            return
        copies = [replace(piece, values=piece.values.detach().cpu().clone()) for piece in pieces]
        self._writing = self._thread.submit(self._save, path, state, copies, then)

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            UserError: when it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _save(
        self, path: Path, state: Mapping[str, Any], pieces: list[Piece], then: Callable[[], None] | None
    ) -> None:
        rank = dist.get_rank(self._group) if self._group else 0
        save_together(path, state, pieces, rank, self._exchange)
        if then is not None and rank == 0:
            then()
        self._exchange(None)  # nobody goes on before the older ones are pruned

    def _exchange(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
