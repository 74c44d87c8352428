# SPDX-License-Identifier: Apache-2.0
"""What all ranks must do at the same step: save, or leave."""

from typing import Any

import lightning.pytorch as pl
import torch


def any_rank(trainer: pl.Trainer, pl_module: Any, value: int) -> int:
    """Give all ranks the highest value of any, at steps whose figures are logged, when ranks wait anyway.

    At the other steps of several ranks the answer is 0: nothing is decided.
    """
    if trainer.world_size == 1:
        return value
    if trainer.global_step % pl_module.trainer_config.log_every_n_steps:
        return 0
    return int(trainer.strategy.reduce(torch.tensor(value, device=pl_module.device), reduce_op="max"))
