# SPDX-License-Identifier: Apache-2.0
"""Time limits of a run."""

import logging
import time
from typing import Any

import lightning.pytorch as pl

from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.training.patches import stop_training
from bionemo.training.rank_consistency import max_at_logged_steps

log = logging.getLogger(__name__)


class TimeLimit(pl.Callback):
    """Ends a run between two steps when it has reached a time limit; the checkpoint callback then saves.

    With several ranks, the run ends at a step that is logged.

    Args:
        per_start: `exp_manager.max_time_per_run`, measured from each start of the run.
        total: `trainer.max_time`, the time of training, including the time before the run was resumed.

    Raises:
        UserError: if a limit is not a duration.
    """

    def __init__(self, per_start: str | None, total: str | dict[str, int] | None) -> None:
        self._limits = per_start, total
        self._per_start = duration_in_seconds("exp_manager.max_time_per_run", per_start) if per_start else None
        self._total = duration_in_seconds("trainer.max_time", total) if total else None
        self._started = self._training_started = time.monotonic()
        self._seconds_before = 0.0  # time of training before this start

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start measuring the time of training."""
        self._training_started = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Stop all ranks if one has reached a limit."""
        if trainer.should_stop or self._per_start is self._total is None:
            return
        reached = 0
        if self._total is not None and self._seconds() >= self._total:
            reached = 1
        if self.is_reached():
            reached = 2
        reached = max_at_logged_steps(trainer, pl_module, reached)
        if not reached:
            return
        limit = str(self) if reached == 2 else f"trainer.max_time={self._limits[1]}"
        log.warning("%s is reached: exiting at step %d", limit, trainer.global_step)
        if reached == 2:
            stop_training(trainer)
        else:
            trainer.should_stop = True  # with a last validation, and after trainer.min_steps

    def is_reached(self) -> bool:
        """Return whether the limit per start is reached."""
        return self._per_start is not None and time.monotonic() - self._started >= self._per_start

    def __str__(self) -> str:
        return f"exp_manager.max_time_per_run={self._limits[0]}"

    def state_dict(self) -> dict[str, Any]:
        """Return the time of training; {} without `trainer.max_time`, so that equal runs have equal checkpoints."""
        return {} if self._total is None else {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the time of training of a resumed run."""
        self._seconds_before = float(state_dict.get("seconds", 0))

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._training_started
