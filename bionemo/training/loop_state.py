# SPDX-License-Identifier: Apache-2.0
"""Lightning's idea of how far training is, made from the one number that says it."""

from typing import Any

import lightning.pytorch as pl


def loops_at(trainer: pl.Trainer, step: int) -> dict[str, Any]:
    """State of Lightning's loops when exactly `step` batches were trained on, and validated where that was due.

    One batch is one update, and all batches belong to one epoch, so the step determines every counter. The counters
    that Lightning would save depend on the moment of saving instead: a callback at the end of a batch finds them one
    behind, and a run that goes on from there validates a step late for ever.
    """
    fit: dict[str, Any] = trainer.fit_loop.state_dict()
    for scope in ("total", "current"):
        for counters in (fit["epoch_loop.batch_progress"], fit["epoch_loop.manual_optimization.optim_step_progress"]):
            counters[scope].update(dict.fromkeys(counters[scope], step))
        fit["epoch_progress"][scope].update(ready=1, started=1, processed=0, completed=0)
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    others = {name: getattr(trainer, name).state_dict() for name in ("validate_loop", "test_loop", "predict_loop")}
    return {"fit_loop": fit, **others}
