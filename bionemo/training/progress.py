# SPDX-License-Identifier: Apache-2.0
"""How far the run is, for people: a live bar on a terminal, a line now and then in a log file."""

import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn


def step_of(trainer: pl.Trainer) -> str:
    """Say how far the run is; without trainer.max_steps nobody knows how far it goes."""
    return f"step {trainer.global_step:,}" + (f" of {trainer.max_steps:,}" if trainer.max_steps > 0 else "")


_TOLD = ("val_", "dwnstr_task_", "test_")  # the last of a downstream task: its test split


class TrainingProgress(ProgressBar):
    """Loss, learning rate, useful tokens a second and the time left; reads only what was logged anyway."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._enabled = True
        self._started, self._first_step = time.monotonic(), 0

    def disable(self) -> None:
        """Keep quiet; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Speak again."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Open the bar."""
        self._started, self._first_step = time.monotonic(), trainer.global_step
        if self._enabled and self._console.is_terminal:
            columns = (
                SpinnerColumn(), TextColumn("{task.fields[step]}"), BarColumn(),
                TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            total = trainer.max_steps if trainer.max_steps > 0 else None
            self._task = self._bar.add_task("", total=total, completed=trainer.global_step, step=step_of(trainer))
            self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Advance; show figures when the module has read new ones."""
        if not self._enabled:
            return
        fresh = trainer.global_step % pl_module.trainer_config.log_every_n_steps == 0
        if self._bar is not None:
            figures = self._figures(trainer, pl_module) if fresh else None
            self._bar.update(self._task, completed=trainer.global_step, description=figures, step=step_of(trainer))
        elif fresh and self._due(trainer, pl_module):
            print(f"{step_of(trainer)}  {self._figures(trainer, pl_module)}", file=sys.stderr, flush=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Print what a validation told, above the bar if there is one."""
        told = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(_TOLD)}
        if self._enabled and told and not trainer.sanity_checking:
            figures = [f"val_loss {told.pop('val_loss'):.4f}", *(f"{name} {v:.3f}" for name, v in told.items())]
            self._console.print(f"step {trainer.global_step:,}  {'  '.join(figures)}", highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Close the bar before the error is printed."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _due(self, trainer: pl.Trainer, pl_module: Any) -> bool:
        """About a hundred lines a run, at most one per logging step."""
        every = max(trainer.max_steps // 100, 1)
        interval = pl_module.trainer_config.log_every_n_steps
        return trainer.global_step % (-(-every // interval) * interval) == 0

    def _figures(self, trainer: pl.Trainer, pl_module: Any) -> str:
        report = pl_module.report
        figures = (
            f"loss {report['reduced_train_loss']:.4f}  lr {report['lr']:.2e}  "
            f"{report['tokens_per_second']:,.0f} tokens/s"
        )
        if trainer.max_steps < 0:
            return figures
        done = trainer.global_step - self._first_step
        left = (time.monotonic() - self._started) / max(done, 1) * (trainer.max_steps - trainer.global_step)
        return f"{figures}  {timedelta(seconds=int(left))} left"
