# SPDX-License-Identifier: Apache-2.0
"""State of Lightning's loops, derived from the number of steps."""

from typing import Any

import lightning.pytorch as pl


def loop_state_at_step(trainer: pl.Trainer, step: int) -> dict[str, Any]:
    """Return the state of Lightning's loops after exactly `step` batches, including validations that were due.

    One batch is one update and all batches are one epoch, so the step determines every counter. The counters that
    Lightning saves depend on the hook that saves: at the end of a batch they are one behind, and every validation of
    a run that resumes from them would be one step late.
    """
    fit: dict[str, Any] = trainer.fit_loop.state_dict()
    for scope in ("total", "current"):
        for counters in (fit["epoch_loop.batch_progress"], fit["epoch_loop.manual_optimization.optim_step_progress"]):
            counters[scope].update(dict.fromkeys(counters[scope], step))
        fit["epoch_progress"][scope].update(ready=1, started=1, processed=0, completed=0)
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    others = {name: getattr(trainer, name).state_dict() for name in ("validate_loop", "test_loop", "predict_loop")}
    return {"fit_loop": fit, **others}
