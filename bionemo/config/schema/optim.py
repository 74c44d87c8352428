# SPDX-License-Identifier: Apache-2.0
"""`optim`: the optimizer and its learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal

from bionemo.config.schema.ranges import NotNegativeFloat, PositiveFloat, Share, ShareBelowOne, StepLimit, Steps, Width


@dataclass(kw_only=True)
class SchedConfig:
    """A learning-rate schedule; which keys it reads depends on its name."""

    name: Literal[
        "CosineAnnealing", "WarmupAnnealDecayHold", "InverseSquareRootAnnealing", "NoamAnnealing", "WarmupAnnealing"
    ]
    warmup_steps: Steps | None = None
    warmup_ratio: Share | None = None  # warm-up as a share of max_steps, instead of warmup_steps
    constant_steps: Steps | None = None  # CosineAnnealing: steps at min_lr at the end
    min_lr: NotNegativeFloat | None = None
    max_lr: PositiveFloat | None = None  # WarmupAnnealDecayHold: the peak; it replaces optim.lr
    max_steps: StepLimit | None = None  # None: trainer.max_steps
    anneal_percentage: Share | None = None  # WarmupAnnealDecayHold: share of max_lr that is held at the end
    d_model: Width | None = None  # NoamAnnealing: hidden size
    last_epoch: StepLimit | None = None  # schedule step to go on from, -1 for the first


@dataclass(kw_only=True)
class OptimConfig:
    """An optimizer: adam is Adam with the decay in the gradient, the others are AdamW.

    distributed_fused_adam gives each data-parallel rank a share of its state (ZeRO-1).
    """

    name: Literal["fused_adam", "distributed_fused_adam", "adamw", "adam"]
    lr: PositiveFloat
    weight_decay: NotNegativeFloat
    betas: list[ShareBelowOne]
    eps: PositiveFloat
    sched: SchedConfig
