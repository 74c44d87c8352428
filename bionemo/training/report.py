# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself: before, at the end, and in files."""

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.utilities import rank_zero_only

from bionemo.common.files import write_atomic
from bionemo.common.redaction import redact_text, redact_tree
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import compact
from bionemo.training.progress import step_of


@rank_zero_only
def announce(cfg: RunConfig, trainer: pl.Trainer, num_parameters: int, precision: str, start: Path | None) -> None:
    """One line on what is about to happen."""
    model = cfg.model
    ways = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    rows = model.micro_batch_size * (cfg.trainer.accumulate_grad_batches or 1) * (trainer.world_size // ways)
    step = f"{rows:,} sequences" if compact(model.data) else f"{rows * model.seq_length:,} tokens"
    device = trainer.strategy.root_device.type
    origin = f"continuing from {start}" if start else "from the beginning"
    say(
        f"{cfg.name}: {num_parameters:,} parameters, {precision} on {trainer.world_size} x {device}, "
        f"{step} a step, {origin}"
    )


@rank_zero_only
def conclude(trainer: pl.Trainer, module: Any, references: dict[str, float], directory: Path) -> None:
    """The result, beside what there is to compare it with."""
    loss = trainer.callback_metrics.get("val_loss")
    result = [step_of(trainer)]
    if loss is not None:
        result.append(f"validation loss {float(loss):.4f}")
    result += [f"{name} {value:.4f}" for name, value in references.items()]
    say(", ".join(result))
    say(f"logs, checkpoints and the loss curve are in {directory}")


@rank_zero_only
def conclude_test(trainer: pl.Trainer) -> None:
    """The result on the test set."""
    loss, perplexity = (float(trainer.callback_metrics[f"test_{name}"]) for name in ("loss", "perplexity"))
    say(f"test loss {loss:.4f}, test perplexity {perplexity:.3f}")


@rank_zero_only
def save_config(cfg: RunConfig, trainer: pl.Trainer, directory: Path) -> None:
    """Write the whole configuration as it was resolved, and give it to the loggers (hparams.yaml among them)."""
    resolved: Any = redact_tree(asdict(cfg))
    write_atomic(directory / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
    for logger in trainer.loggers:
        logger.log_hyperparams(resolved)
        logger.save()


def say(line: str) -> None:
    """Print to the user, and to the log files."""
    print(redact_text(line), file=sys.stderr, flush=True)
    logging.getLogger("bionemo").info(line)
