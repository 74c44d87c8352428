# SPDX-License-Identifier: Apache-2.0
"""`trainer`: arguments of Lightning's Trainer under Lightning's names. `optim`: optimizer and schedule."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.ranges import (
    DeviceCount,
    Dimension,
    Duration,
    Fraction,
    FractionAboveZero,
    FractionBelowOne,
    IntOrUnlimited,
    NodeCount,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StepCount,
    StepLimit,
)

Precision = Literal["32", "bf16-mixed", "16-mixed", "32-true", "bf16", "16"]


@dataclass(kw_only=True)
class TrainerConfig:
    """Hardware, length and frequency of a run; None selects Lightning's default.

    `strategy`, `plugins`, `callbacks`, `logger` and `model_registry` are missing: the command creates these objects.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda"]  # auto: GPUs if there are any
    devices: DeviceCount | str | list[NonNegativeInt]  # per node: a number, "auto", or indices of devices
    num_nodes: NodeCount  # machines
    precision: Literal["auto"] | Precision  # auto: bf16-mixed on GPUs, 16-mixed on GPUs without bf16, 32 on CPUs
    rank_timeout: Duration  # the run ends if a rank hangs for longer
    # length
    max_steps: StepLimit  # optimizer steps; -1: limited only by max_epochs or max_time
    max_epochs: IntOrUnlimited | None  # epochs; None or -1: no limit
    min_steps: StepCount | None = None  # minimum number of steps
    max_time: Duration | None = None  # DD:HH:MM:SS; the run ends after this time
    limit_train_batches: NonNegativeInt | Fraction | None = None  # batches of the run, or 1.0: all
    fast_dev_run: bool | NonNegativeInt | None = None  # run few batches of each kind without loggers and checkpoints
    # validation and test
    val_check_interval: PositiveInt | FractionAboveZero | None  # training batches, or a fraction of an epoch
    #: epochs of which val_check_interval is a fraction, if it is one
    check_val_every_n_epoch: PositiveInt | None = None
    limit_val_batches: NonNegativeInt | Fraction  # per validation; a count, or a fraction of the validation set
    limit_test_batches: NonNegativeInt | Fraction  # a count, or a fraction of the test set
    num_sanity_val_steps: IntOrUnlimited | None = None  # validation batches before the first step
    # optimization
    #: micro-batches per step; with model.micro_batch_size=auto, factor of model.replica_batch_size; 1 or None: derived
    #: from model.global_batch_size, if that is set
    accumulate_grad_batches: PositiveInt | None
    gradient_clip_val: NonNegativeFloat | None  # maximum norm over all gradients
    # reporting
    log_every_n_steps: PositiveInt  # steps between logged values
    enable_progress_bar: bool | None = None  # print the progress
    enable_model_summary: bool | None = None  # print a table of the modules
    profiler: Literal["simple", "advanced", "pytorch"] | None = None  # Lightning's profiler, for debugging
    default_root_dir: str | None = None  # directory for Lightning's files; exp_manager sets all others
    # other
    benchmark: bool | None  # let cuDNN select the fastest algorithms by measurement
    deterministic: bool | Literal["warn"] | None = None  # use deterministic algorithms only; warn: if they exist
    inference_mode: bool | None = None  # validate in inference mode
    detect_anomaly: bool | None = None  # find the operation that produced NaN; slow

    @property
    def device_count(self) -> int | None:
        """Number of devices per node; None if it depends on the machine. Lightning reads "0,1" as two indices."""
        if isinstance(self.devices, list):
            return len(self.devices)
        text = str(self.devices)
        if text in ("auto", "-1"):
            return None
        return len([index for index in text.split(",") if index.strip()]) if "," in text else int(text)

    @property
    def epochs(self) -> int | None:
        """Number of epochs; None without a limit."""
        return None if self.max_epochs == -1 else self.max_epochs


@dataclass(kw_only=True)
class SchedConfig:
    """A learning-rate schedule; its name determines which keys are used."""

    name: Literal[
        "CosineAnnealing", "WarmupAnnealDecayHold", "InverseSquareRootAnnealing", "NoamAnnealing", "WarmupAnnealing"
    ]  # name of the schedule
    warmup_steps: StepCount | None = None  # steps of the linear warm-up
    warmup_ratio: Fraction | None = None  # of max_steps; alternative to warmup_steps
    constant_steps: StepCount | None = None  # CosineAnnealing: steps at min_lr before max_steps
    #: last rate, which also follows max_steps; None: 0; WarmupAnnealDecayHold: first and lowest rate
    min_lr: NonNegativeFloat | None = None
    max_lr: PositiveFloat | None = None  # WarmupAnnealDecayHold: peak; replaces optim.lr
    max_steps: StepLimit | None = None  # end of the schedule; None or -1: trainer.max_steps
    anneal_percentage: Fraction | None = None  # WarmupAnnealDecayHold: final learning rate as a fraction of max_lr
    d_model: Dimension | None = None  # NoamAnnealing: hidden size

    def end(self, trainer_steps: int) -> int:
        """Return the last step of the schedule, given trainer.max_steps; below 1: none."""
        return trainer_steps if self.max_steps in (None, -1, 0) else int(self.max_steps)

    def warm_up(self, end: int) -> int:
        """Return the number of steps of the warm-up, given the last step of the schedule."""
        return int((self.warmup_ratio or 0.0) * end if self.warmup_steps is None else self.warmup_steps)


@dataclass(kw_only=True)
class OptimConfig:
    """An optimizer. `adam` adds weight decay to the gradient; the others are AdamW.

    distributed_fused_adam divides its state over the data-parallel ranks (ZeRO-1). muon updates the matrices of the
    transformer layers with Muon and everything else with AdamW.
    """

    name: Literal["fused_adam", "distributed_fused_adam", "adamw", "adam", "muon"]  # name of the optimizer
    lr: PositiveFloat  # highest learning rate; NoamAnnealing: factor of the schedule
    weight_decay: NonNegativeFloat  # adam: L2 regularization; otherwise decoupled from the gradient
    betas: list[FractionBelowOne]  # decay rates of the first and second moment
    eps: PositiveFloat  # added to the root of the second moment
    sched: SchedConfig  # learning rate by step
