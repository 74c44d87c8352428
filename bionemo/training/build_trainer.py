# SPDX-License-Identifier: Apache-2.0
"""Construction of Lightning's trainer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import check_master_address, launched_process
from bionemo.config.check import check_layout
from bionemo.config.schema import RunConfig, TrainerConfig
from bionemo.launch.lightning_environment import LauncherEnvironment
from bionemo.megatron.gpu import use_gpu
from bionemo.megatron.strategy import MegatronStrategy
from bionemo.training.patches import disable_sigterm_broadcast

# NCCL algorithms that add in a fixed order; without a setting, NCCL chooses by timing.
_NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
_CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS is deterministic


@contextmanager
def misconfiguration_as_user_error() -> Iterator[None]:
    """Convert Lightning's MisconfigurationException to UserError."""
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(f"trainer: {error}") from error


def build_trainer(cfg: RunConfig, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Build the trainer from `trainer.*`.

    Raises:
        HostError: if the GPU is missing or cannot be used, or the host of rank 0 cannot be resolved.
        UserError: if the launcher started another number of processes than configured, the devices cannot be divided
            as configured, or an argument is invalid.
    """
    config = cfg.trainer
    gpu = use_gpu(config.accelerator)
    if config.deterministic is True:
        require_determinism(config)
    async_save = cfg.exp_manager.checkpoint_callback_params.async_save
    if async_save is None:  # by default only on GPUs: the copy in main memory does not compete with the training
        async_save = gpu
    # not arguments of Lightning here; its own time limit makes every step wait for the device
    own_keys = ("gradient_clip_val", "rank_timeout", "max_time")
    arguments = {key: value for key, value in asdict(config).items() if value is not None and key not in own_keys}
    process = launched_process()
    arguments |= {
        "precision": "32-true",  # see megatron/precision.py
        "accumulate_grad_batches": 1,  # one batch of the data loader holds all micro-batches of a step
        "strategy": MegatronStrategy(
            cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size, async_save=async_save
        ),
        "callbacks": callbacks,
        "logger": False,  # exp_manager adds loggers
        "enable_checkpointing": False,  # see checkpointing.py
        "enable_model_summary": config.enable_model_summary or False,
        "use_distributed_sampler": False,
        # All steps are one epoch of Lightning, however many epochs of the data: Lightning would restart the data
        # loader for a second one.
        "max_epochs": 1,
        # Always set: without a plugin, Lightning takes an sbatch script for a process that srun started.
        "plugins": [LightningEnvironment() if process is None else LauncherEnvironment(process)],
    }
    if isinstance(config.val_check_interval, int):
        arguments["check_val_every_n_epoch"] = None  # count steps, not epochs
    try:
        trainer = pl.Trainer(**arguments)
    except (MisconfigurationException, ValueError, TypeError) as error:  # TypeError: device indices on CPUs
        raise UserError(f"trainer: {error}") from error
    if process is not None:
        process.check(trainer.num_nodes, trainer.num_devices)
    check_master_address(process)
    for problem in check_layout(cfg.model, config, trainer.world_size):  # world_size is known for devices=auto, too
        raise UserError(problem)
    disable_sigterm_broadcast(trainer)
    return trainer


def require_determinism(config: TrainerConfig) -> None:
    """Set the environment variables that `trainer.deterministic=True` needs, before the device is used.

    The same command on the same devices then gives bitwise the same result, or an error. torch raises an error for
    operations without deterministic implementation, and attention on a GPU uses another implementation
    (megatron/attention.py). This function handles the settings that torch does not check.

    Raises:
        UserError: if a key or variable contradicts determinism.
    """
    if config.benchmark:
        raise UserError("trainer.benchmark=True chooses algorithms by timing: set it to False, or set "
                        "trainer.deterministic to False")  # fmt: skip
    _set_or_check("NCCL_ALGO", _NCCL_ALGORITHMS)
    _set_or_check("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACES)


def _set_or_check(variable: str, allowed: tuple[str, ...]) -> None:
    value = os.environ.setdefault(variable, allowed[0])
    if value not in allowed:
        raise UserError(
            f"{variable}={value} is not known to be deterministic: unset it, set it to one of {', '.join(allowed)}, "
            "or set trainer.deterministic to False"
        )
