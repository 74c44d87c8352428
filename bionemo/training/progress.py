# SPDX-License-Identifier: Apache-2.0
"""Progress of a run on the console: messages at start and end, and a progress bar, or log lines without a terminal."""

import logging
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from bionemo.checkpoint import load_manifest
from bionemo.common.console import notify
from bionemo.common.files import write_atomic
from bionemo.common.redaction import redact_text, redact_tree
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData, pads_dynamically
from bionemo.megatron.attention import (
    MAX_HEAD_SIZE,
    fastest_gpu_attention,
    gpu_has_flash_attention,
    gpu_kernel,
)
from bionemo.megatron.precision import Precision
from bionemo.training import loss_curve

_ATTENTION = {
    "FA2": "FlashAttention 2",
    "FA3": "FlashAttention 3",
    "FA4": "FlashAttention 4",
    "cuDNN": "attention of cuDNN",
    "triton": "Triton attention",
    "sequences": "attention one sequence at a time",
}
log = logging.getLogger(__name__)
_SHOWN_METRICS = ("val_", "dwnstr_task_", "test_")  # test_: test split of a downstream task


@rank_zero_only
def print_start(
    cfg: RunConfig,
    trainer: pl.Trainer,
    num_parameters: int,
    precision: Precision,
    compiled: bool,
    data: SequenceData,
    resume_path: Path | None,
) -> None:
    """Print model size, precision, kernels, devices, batch size, and the checkpoint from which the run resumes."""
    batch_size, device = data.global_batch_size(trainer.world_size), trainer.strategy.root_device.type
    tokens = f"{batch_size * cfg.model.seq_length:,} tokens"
    size = f"{batch_size:,} sequences" if pads_dynamically(cfg.model.data) else tokens
    how = f"precision {precision.name}"
    sched, steps = cfg.model.optim.sched, cfg.trainer.max_steps
    constant = (sched.constant_steps or 0) if sched is not None and sched.name == "CosineAnnealing" else 0
    if sched is not None and 0 < steps <= (sched.warmup_steps or 0):
        log.warning(
            f"the run ends during the warm-up, at a low learning rate (trainer.max_steps={steps}, "
            f"model.optim.sched.warmup_steps={sched.warmup_steps}): set warmup_steps to about a tenth of the steps"
        )
    elif constant and sched.warm_up(end := sched.end(steps)) + constant >= end:
        log.warning(
            f"the learning rate falls to min_lr directly after the warm-up: warm-up and model.optim.sched."
            f"constant_steps={constant} leave no decay in {end} steps; set constant_steps to about a tenth of them"
        )
    if resume_path and 0 < steps <= read_step(resume_path):
        log.warning(
            f"the run has reached trainer.max_steps={steps} before, so nothing is trained: set a larger number to "
            "continue, or another exp_manager.exp_dir to train again"
        )
    if device == "cuda":
        exact = cfg.model.attention_dropout > 0 or torch.are_deterministic_algorithms_enabled()  # set by the trainer
        kernel = gpu_kernel(cfg.model.head_size, precision.name != "32", exact)
        if kernel == "sequences":
            _warn_of_slow_attention(cfg)
        how += f", {_ATTENTION[fastest_gpu_attention(cfg.model.head_size) if kernel == 'flash' else kernel]}"
        device = torch.cuda.get_device_name()
    start = f"weights from {cfg.restore_from_path}" if cfg.restore_from_path else "starting from the beginning"
    _print_and_log(
        f"{cfg.name}: {num_parameters:,} parameters, {how}{', compiled' if compiled else ''} on "
        f"{trainer.world_size} x {device}, {size} per step, "
        + (f"resuming from {resume_path}" if resume_path else start)
    )


def read_step(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int((load_manifest(path) or {}).get("step", 0))


def _warn_of_slow_attention(cfg: RunConfig) -> None:
    reason = "Triton is not installed" if gpu_has_flash_attention() else "the GPU has a compute capability below 8.0"
    if cfg.model.head_size > MAX_HEAD_SIZE:
        reason = f"a head has {cfg.model.head_size} channels, more than {MAX_HEAD_SIZE}"
    log.warning("attention is computed one sequence at a time, which is slow, because %s", reason)


@rank_zero_only
def print_result(
    cfg: RunConfig,
    trainer: pl.Trainer,
    reference_losses: dict[str, float],
    directory: Path,
    resume_path: Path | None,
    validated: int | None,
) -> None:
    """Print the last step, the loss of the last validation, at step `validated`, and where the files are."""
    trained = resume_path is None or trainer.global_step > read_step(resume_path)
    if not (trained or trainer.should_stop or cfg.trainer.epochs is None or trainer.global_step == trainer.max_steps):
        notify(
            f"the run has reached trainer.max_epochs={cfg.trainer.epochs} before, so nothing is trained: set a larger "
            "number to continue, or another exp_manager.exp_dir to train again"
        )
    if trainer.global_step < trainer.max_steps and not trainer.should_stop and cfg.trainer.epochs is None:
        limit = cfg.trainer.limit_train_batches
        ended, remedy = "data ended", "set model.data.train.use_upsampling=True to repeat them"
        if isinstance(limit, int):
            ended, remedy = f"ended after trainer.limit_train_batches={limit}", "set a larger number, or null"
        notify(f"the training {ended} before trainer.max_steps={trainer.max_steps}: {remedy}")
    loss = trainer.callback_metrics.get("val_loss")
    at = "" if validated in (None, trainer.global_step) else f" (of step {validated})"
    losses = ["no validation loss" if loss is None else f"validation loss {float(loss):.4f}{at}"]
    losses += [f"{name} {value:.4f}" for name, value in reference_losses.items()]
    _print_and_log(", ".join([_format_step(trainer), *losses]))
    has_curve = (directory / loss_curve.FILE_NAME).exists()  # not before the first validation or logged step
    module: Any = trainer.lightning_module
    newest = next(iter(module.list_checkpoints()), None)
    if newest and newest.is_relative_to(directory):
        newest = newest.relative_to(directory)
    _print_and_log(
        f"logs{', checkpoints and the loss curve' if has_curve else ' and checkpoints'} are in {directory}"
        + (f"; the newest checkpoint is {newest}" if newest else "")
    )


def final_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Return the last metrics of validation and test."""
    metrics = trainer.callback_metrics.items()
    return {name: float(value) for name, value in metrics if name.startswith(("val_", "test_"))}


@rank_zero_only
def print_test_result(trainer: pl.Trainer) -> None:
    """Print the loss on the test split and, if the model has one, the perplexity."""
    metrics = trainer.callback_metrics
    if "test_loss" not in metrics:  # trainer.limit_test_batches=0
        return
    perplexity = f", test perplexity {metrics['test_perplexity']:.3f}" if "test_perplexity" in metrics else ""
    _print_and_log(f"test loss {metrics['test_loss']:.4f}{perplexity}")


@rank_zero_only
def save_config(cfg: RunConfig, trainer: pl.Trainer, directory: Path) -> None:
    """Write the resolved configuration to config.yaml, and pass it to the loggers, which write hparams.yaml."""
    resolved: Any = redact_tree(asdict(cfg))
    saved = resolved | {"exp_manager": _relative_directories(resolved["exp_manager"])}
    write_atomic(directory / "config.yaml", yaml.safe_dump(saved, sort_keys=False))
    for logger in trainer.loggers:
        logger.log_hyperparams(resolved)
        logger.save()


def _relative_directories(manager: dict[str, Any]) -> dict[str, Any]:
    """Return exp_manager with directories inside exp_dir relative to it: a copy with another exp_dir writes there."""

    def relative(path: str | None) -> str | None:
        if not (path and manager["exp_dir"] and Path(path).is_relative_to(manager["exp_dir"])):
            return path
        return "/".join(["${exp_manager.exp_dir}", *Path(path).relative_to(manager["exp_dir"]).parts])

    params = manager["checkpoint_callback_params"]
    params = params | {"dirpath": relative(params["dirpath"])}
    return manager | {
        "explicit_log_dir": relative(manager["explicit_log_dir"]), "checkpoint_callback_params": params,
    }  # fmt: skip


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
            metrics = {"val_loss": metrics.pop("val_loss"), **metrics}
            shown = [f"{name} {v:.{4 if name.startswith('val_loss') else 3}f}" for name, v in metrics.items()]
            self._console.print(f"step {trainer.global_step:,}  {'  '.join(shown)}", highlight=False, soft_wrap=True)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
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
        if "mfu" in metrics:
            text += f"  {metrics['mfu']:.0%} MFU"
        if trainer.max_steps < 0:
            return text
        seconds_per_step = (time.monotonic() - self._started) / max(trainer.global_step - self._first_step, 1)
        remaining = seconds_per_step * (trainer.max_steps - trainer.global_step)
        return f"{text}  {timedelta(seconds=int(remaining))} left"
