# SPDX-License-Identifier: Apache-2.0
"""`trainer`: the arguments of Lightning's Trainer that can be said in YAML, under Lightning's names."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.ranges import (
    Devices,
    Duration,
    Machines,
    NotNegative,
    NotNegativeFloat,
    Positive,
    Share,
    ShareAboveZero,
    StepLimit,
    Steps,
    Unlimited,
)

Precision = Literal["32", "bf16-mixed", "16-mixed", "32-true", "bf16", "16"]


@dataclass(kw_only=True)
class TrainerConfig:
    """How long, on what, how often; None leaves the choice to Lightning.

    Not here: `strategy`, `plugins`, `callbacks` and `model_registry`, which the command itself provides.
    """

    # where
    accelerator: Literal["auto", "cpu", "gpu", "cuda"]  # auto takes the GPU when there is one
    devices: Devices | str | list[NotNegative]  # per node: a number, "auto", or the devices' indices
    num_nodes: Machines
    precision: Precision
    rank_timeout: Duration  # DD:HH:MM:SS after which a rank that hangs is given up, and the run ends
    # how long
    max_steps: StepLimit  # optimizer steps; -1: bounded by max_epochs or max_time alone
    max_epochs: Unlimited | None
    min_steps: Steps | None = None
    min_epochs: NotNegative | None = None
    max_time: Duration | None = None  # DD:HH:MM:SS, or {hours: 4}
    limit_train_batches: NotNegative | Share | None = None  # a number of batches, or a share when a fraction
    fast_dev_run: bool | NotNegative | None = None  # this many batches of everything, without loggers or checkpoints
    overfit_batches: NotNegative | Share | None = None  # train on the same few batches again and again
    # validation and test
    val_check_interval: Positive | ShareAboveZero | None  # training batches, or a share of an epoch
    check_val_every_n_epoch: Positive | None = None
    limit_val_batches: NotNegative | Share  # batches per validation, or a share of the validation set
    limit_test_batches: NotNegative | Share
    limit_predict_batches: NotNegative | Share | None = None
    num_sanity_val_steps: Unlimited | None = None  # validation batches before the first step
    # optimization
    accumulate_grad_batches: Positive | None  # micro-batches per step; None: as many as make model.global_batch_size
    gradient_clip_val: NotNegativeFloat | None  # largest norm of all gradients together
    gradient_clip_algorithm: Literal["norm"] | None = None
    # reporting
    log_every_n_steps: Positive
    logger: bool  # exp_manager makes the loggers: leave this off
    enable_checkpointing: bool  # exp_manager makes the checkpoints: leave this off
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    default_root_dir: str | None = None
    # the rest
    use_distributed_sampler: bool  # our sampler deals samples to ranks itself: leave this off
    benchmark: bool | None  # let cuDNN time its algorithms
    deterministic: bool | Literal["warn"] | None = None
    inference_mode: bool | None = None
    detect_anomaly: bool | None = None
    barebones: bool | None = None  # measure raw speed: everything optional is off
    sync_batchnorm: bool | None = None
    reload_dataloaders_every_n_epochs: NotNegative | None = None
