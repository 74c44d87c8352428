# SPDX-License-Identifier: Apache-2.0
"""Lightning's trainer from our configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from bionemo.common.errors import HostError, UserError
from bionemo.common.launcher_environment import check_master_address, this_process
from bionemo.config.check import layout, micro_batches
from bionemo.config.durations import seconds
from bionemo.config.schema import RunConfig
from bionemo.launch.lightning_environment import Launched
from bionemo.megatron.strategy import MegatronStrategy
from bionemo.training.determinism import require_determinism


@contextmanager
def one_line_mistakes() -> Iterator[None]:
    """Turn what Lightning has to say about `trainer.*` into a UserError."""
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(f"trainer: {error}") from error


def build_trainer(cfg: RunConfig, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Hand Lightning what is Lightning's, and keep what the training step does itself.

    Raises:
        HostError: when a GPU is asked for and there is none, or the host of rank 0 cannot be resolved.
        UserError: when a launcher has started other processes than the run was told, the devices cannot be divided as
            asked, or another argument cannot be.
    """
    config = cfg.trainer
    if config.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise HostError(f"trainer.accelerator={config.accelerator}: this machine has no GPU; use auto or cpu")
    if config.max_time is not None:
        seconds("trainer.max_time", config.max_time)
    if config.deterministic is True:
        require_determinism(config)
    behind = cfg.exp_manager.checkpoint_callback_params.async_save
    if behind is None:  # it pays where a copy of the model is made on other hardware than computes
        behind = config.accelerator != "cpu" and torch.cuda.is_available()
    arguments: dict[str, Any] = {key: value for key, value in asdict(config).items() if value is not None}
    ours = {
        "precision": "32-true",  # training/precision.py
        "accumulate_grad_batches": 1,  # a batch is a whole step
        "strategy": MegatronStrategy(
            cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size, save_behind=behind
        ),
        "callbacks": callbacks,
        "logger": False,  # exp_manager's
        "enable_checkpointing": False,  # training/checkpointing.py
        "enable_model_summary": config.enable_model_summary or False,
        "use_distributed_sampler": False,
        # The stream of steps is one epoch of Lightning's, however often it goes through the data. With more, Lightning
        # would begin a stream that has ended again.
        "max_epochs": 1,
    }
    if isinstance(config.val_check_interval, int):
        ours["check_val_every_n_epoch"] = None  # count steps, not epochs
    process = this_process()
    # Lightning is told in either case: by itself it takes a batch script of Slurm's for a process that srun started
    ours["plugins"] = [LightningEnvironment() if process is None else Launched(process)]
    for key in ("gradient_clip_val", "gradient_clip_algorithm", "rank_timeout"):
        arguments.pop(key, None)
    try:
        trainer = pl.Trainer(**(arguments | ours))
    except (MisconfigurationException, ValueError, TypeError) as error:  # TypeError: device indices on CPUs
        raise UserError(f"trainer: {error}") from error
    if process is not None:
        process.check(trainer.num_nodes, trainer.num_devices)
    check_master_address(process)
    for problem in layout(cfg.model, config, trainer.world_size):  # "auto" devices have now been counted
        raise UserError(problem)
    config.accumulate_grad_batches = micro_batches(cfg.model, config, trainer.world_size)
    # Lightning asks all ranks before every step whether a signal came, and waits for the device to answer.
    # training/checkpointing.py does that when figures are logged, so the device never waits for the host.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer
