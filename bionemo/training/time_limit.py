# SPDX-License-Identifier: Apache-2.0
"""Runs that must end at a given time, because the machine is lent for no longer."""

import logging
import time
from typing import Any

import lightning.pytorch as pl

from bionemo.config.durations import seconds
from bionemo.training.rank_consistency import any_rank

log = logging.getLogger(__name__)


class TimeLimit(pl.Callback):
    """Ends a run after `exp_manager.max_time_per_run`, between two steps; every start has the whole time again."""

    def __init__(self, limit: str | None) -> None:
        self._limit, self._seconds = limit, seconds("exp_manager.max_time_per_run", limit) if limit else None
        self._started = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Stop all ranks when the time of one is over; training/checkpointing.py saves at the end."""
        if self._seconds is None or trainer.should_stop:
            return
        if any_rank(trainer, pl_module, time.monotonic() - self._started >= self._seconds):
            log.warning(
                "exp_manager.max_time_per_run=%s is over: leaving at step %d", self._limit, trainer.global_step
            )
            trainer.should_stop = True
