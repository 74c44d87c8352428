# SPDX-License-Identifier: Apache-2.0
"""Time limit of a run."""

import logging
import time
from typing import Any

import lightning.pytorch as pl

from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.training.patches import stop_training
from bionemo.training.rank_consistency import all_reduce_max

log = logging.getLogger(__name__)


class TimeLimit(pl.Callback):
    """Ends a run between two steps after `exp_manager.max_time_per_run`, measured from each start of the run."""

    def __init__(self, limit: str | None) -> None:
        self._limit = limit
        self._seconds = duration_in_seconds("exp_manager.max_time_per_run", limit) if limit else None
        self._started = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Stop all ranks if one has reached the limit; the checkpoint callback saves at the end."""
        if self._seconds is None or trainer.should_stop:
            return
        if all_reduce_max(trainer, pl_module, time.monotonic() - self._started >= self._seconds):
            log.warning(
                "exp_manager.max_time_per_run=%s is reached: exiting at step %d", self._limit, trainer.global_step
            )
            stop_training(trainer)
