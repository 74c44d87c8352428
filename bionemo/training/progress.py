# SPDX-License-Identifier: Apache-2.0
"""Progress of a run on the console: messages at start and end, and a progress bar, or log lines without a terminal."""

import logging
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from bionemo.common.files import write_atomic
from bionemo.common.redaction import redact_text, redact_tree
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import pads_dynamically
from bionemo.training import loss_curve

_SHOWN_METRICS = ("val_", "dwnstr_task_", "test_")  # test_: test split of a downstream task


@rank_zero_only
def print_start(
    cfg: RunConfig,
    trainer: pl.Trainer,
    num_parameters: int,
    precision: str,
    resume_path: Path | None,
    batch_size: int,
) -> None:
    """Print model size, devices, batch size, and the checkpoint from which the run resumes."""
    tokens = f"{batch_size * cfg.model.seq_length:,} tokens"
    size = f"{batch_size:,} sequences" if pads_dynamically(cfg.model.data) else tokens
    _print_and_log(
        f"{cfg.name}: {num_parameters:,} parameters, precision {precision} on {trainer.world_size} x "
        f"{trainer.strategy.root_device.type}, {size} per step, "
        + (f"resuming from {resume_path}" if resume_path else "starting from the beginning")
    )


@rank_zero_only
def print_result(trainer: pl.Trainer, reference_losses: dict[str, float], directory: Path) -> None:
    """Print the last step, the validation loss and reference losses to compare it with."""
    loss = trainer.callback_metrics.get("val_loss")
    losses = ([] if loss is None else [("validation loss", float(loss))]) + list(reference_losses.items())
    _print_and_log(", ".join([_format_step(trainer), *(f"{name} {value:.4f}" for name, value in losses)]))
    has_curve = (directory / loss_curve.FILE_NAME).exists()  # not before the first validation or logged step
    _print_and_log(f"logs{', checkpoints and the loss curve' if has_curve else ' and checkpoints'} are in {directory}")


@rank_zero_only
def print_test_result(trainer: pl.Trainer) -> None:
    """Print the loss on the test split and, if the model has one, the perplexity."""
    metrics = trainer.callback_metrics
    perplexity = f", test perplexity {metrics['test_perplexity']:.3f}" if "test_perplexity" in metrics else ""
    _print_and_log(f"test loss {metrics['test_loss']:.4f}{perplexity}")


@rank_zero_only
def save_config(cfg: RunConfig, trainer: pl.Trainer, directory: Path, num_micro_batches: int) -> None:
    """Write the resolved configuration to config.yaml, and pass it to the loggers, which write hparams.yaml."""
    trainer_config = replace(cfg.trainer, accumulate_grad_batches=num_micro_batches)
    resolved: Any = redact_tree(asdict(replace(cfg, trainer=trainer_config)))
    write_atomic(directory / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
    for logger in trainer.loggers:
        logger.log_hyperparams(resolved)
        logger.save()


def _print_and_log(line: str) -> None:
    print(redact_text(line), file=sys.stderr, flush=True)
    logging.getLogger("bionemo").info(line)


def _format_step(trainer: pl.Trainer) -> str:
    return f"step {trainer.global_step:,}" + (f" of {trainer.max_steps:,}" if trainer.max_steps > 0 else "")


class TrainingProgress(ProgressBar):
    """Shows loss, learning rate, tokens per second and remaining time, all from values that are logged anyway."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._enabled = True
        self._started, self._first_step = time.monotonic(), 0

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start the bar."""
        self._started, self._first_step = time.monotonic(), trainer.global_step
        if self._enabled and self._console.is_terminal:
            columns = (
                SpinnerColumn(), TextColumn("{task.fields[step]}"), BarColumn(),
                TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            total = trainer.max_steps if trainer.max_steps > 0 else None
            self._task = self._bar.add_task("", total=total, completed=trainer.global_step, step=_format_step(trainer))
            self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Advance the bar, or print a line, about 100 per run and at most one per logged step."""
        if not self._enabled:
            return
        interval = pl_module.trainer_config.log_every_n_steps
        is_logged = trainer.global_step % interval == 0
        if self._bar is not None:
            metrics = self._format_metrics(trainer, pl_module) if is_logged else None
            self._bar.update(
                self._task, completed=trainer.global_step, description=metrics, step=_format_step(trainer)
            )
        elif is_logged:
            line_interval = -(-max(trainer.max_steps // 100, 1) // interval) * interval
            if trainer.global_step % line_interval == 0:
                line = f"{_format_step(trainer)}  {self._format_metrics(trainer, pl_module)}"
                print(line, file=sys.stderr, flush=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Print the validation metrics, above the bar if there is one."""
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith(_SHOWN_METRICS)}
        if self._enabled and metrics and not trainer.sanity_checking:
            shown = [f"val_loss {metrics.pop('val_loss'):.4f}", *(f"{name} {v:.3f}" for name, v in metrics.items())]
            self._console.print(f"step {trainer.global_step:,}  {'  '.join(shown)}", highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Remove the bar."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Remove the bar before the error is printed."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _format_metrics(self, trainer: pl.Trainer, pl_module: Any) -> str:
        metrics = pl_module.logged_metrics
        text = (
            f"loss {metrics['reduced_train_loss']:.4f}  lr {metrics['lr']:.2e}  "
            f"{metrics['tokens_per_second']:,.0f} tokens/s"
        )
        if trainer.max_steps < 0:
            return text
        seconds_per_step = (time.monotonic() - self._started) / max(trainer.global_step - self._first_step, 1)
        remaining = seconds_per_step * (trainer.max_steps - trainer.global_step)
        return f"{text}  {timedelta(seconds=int(remaining))} left"
