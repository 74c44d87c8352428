# SPDX-License-Identifier: Apache-2.0
"""Changes to private parts of Lightning, verified with 2.5.6 and 2.6.6; tests/training/test_patches.py checks them.

* `subprocess_script._launch_process_observer`: kills all processes of the host, including the caller, when one ends;
  the health monitor reports the cause instead.
* `_broadcast_sigterm_tensor` of one trainer: an all-reduce before every step, for which the host waits.
* `_original_handlers` of one trainer: the SIGTERM handler that Lightning restores after training.
* `limit_val_batches` and the minimum numbers of steps and epochs of one trainer, when a run ends early.
* The state of the loops of one trainer.
* `fit_loop.run` of one trainer, to begin with a validation that was interrupted.
* `_TunerExitException`, which ends a run in the middle of a validation.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities.exceptions import _TunerExitException


@contextmanager
def disable_process_observer() -> Iterator[None]:
    """Do not let Lightning kill all processes when one ends."""
    original = subprocess_script._launch_process_observer
    subprocess_script._launch_process_observer = lambda child_processes: None
    try:
        yield
    finally:
        subprocess_script._launch_process_observer = original


def disable_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Disable the all-reduce of received signals before every step; the checkpoint callback does it less often."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def ignore_sigterm_after_training(trainer: pl.Trainer) -> None:
    """Ignore SIGTERM after training, when a launcher ends all ranks because the first one has exited."""
    trainer._signal_connector._original_handlers[signal.SIGTERM] = signal.SIG_IGN


def end_run() -> NoReturn:
    """Leave `fit` from any hook, with the teardown of a completed run; no other hook is called."""
    raise _TunerExitException


def stop_training(trainer: pl.Trainer) -> None:
    """End training after this step, without a validation and even before `trainer.min_steps`."""
    trainer.should_stop = True
    trainer.limit_val_batches = 0
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


def validate_first(trainer: pl.Trainer) -> None:
    """Begin `fit` with a validation, even if the run has no step left."""
    run = trainer.fit_loop.run

    def validate_and_run() -> None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        run()

    trainer.fit_loop.run = validate_and_run  # type: ignore[method-assign]


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
