# SPDX-License-Identifier: Apache-2.0
"""Runs that must end at a given time, because the machine is lent for no longer."""

import logging
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl

from bionemo.errors import UserError
from bionemo.training.agreement import any_rank

log = logging.getLogger(__name__)


def seconds(key: str, interval: str | dict[str, int] | None) -> float | None:
    """Read `DD:HH:MM:SS`, or the arguments of a timedelta.

    Raises:
        UserError: when it is neither; `key` is named.
    """
    try:
        if isinstance(interval, str):
            days, hours, minutes, rest = map(int, interval.split(":"))
            return timedelta(days, rest, minutes=minutes, hours=hours).total_seconds()
        return None if interval is None else timedelta(**interval).total_seconds()
    except (ValueError, TypeError) as error:
        raise UserError(f"{key}={interval} is not a time: write DD:HH:MM:SS, or {{hours: 1}}") from error


class TimeLimit(pl.Callback):
    """Ends a run after `exp_manager.max_time_per_run`, between two steps; every start has the whole time again."""

    def __init__(self, limit: str | None) -> None:
        self._limit, self._seconds = limit, seconds("exp_manager.max_time_per_run", limit)
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
