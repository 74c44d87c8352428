# SPDX-License-Identifier: Apache-2.0
"""The edge to Weights & Biases: a run there for a run here, with no secret in it."""

import logging
from dataclasses import asdict
from pathlib import Path

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_tree
from bionemo.config.schema.exp_manager import WandbLoggerConfig

log = logging.getLogger(__name__)
_USED = ("settings", "dir", "save_dir")  # to log in and to write; W&B itself shows neither key nor password


def start_wandb(config: WandbLoggerConfig, directory: Path) -> WandbLogger:
    """Start a run, on the first rank alone; offline, it is written to disk and needs neither network nor account.

    Raises:
        UserError: when it cannot be started.
    """
    arguments = {key: value for key, value in asdict(config).items() if value is not None}
    arguments |= redact_tree({key: value for key, value in arguments.items() if key not in _USED})
    if config.offline:
        arguments["mode"] = "offline"
    try:
        logger = WandbLogger(**({"save_dir": str(directory)} | arguments))
        _start(logger)
    except (wandb.Error, ValueError, TypeError) as error:
        raise UserError(
            f"exp_manager.create_wandb_logger=True: {error}; log in with `wandb login`, or set "
            "exp_manager.wandb_logger_kwargs.offline=True and upload the run later with `wandb sync`"
        ) from error
    return logger


@rank_zero_only
def _start(logger: WandbLogger) -> None:
    """Start it and say where it is to be seen; W&B itself is silenced."""
    wandb.setup()  # reads WANDB_SILENT; its first warnings would come before it does
    if url := logger.experiment.url:
        log.warning("this run on Weights & Biases: %s", url)
