# SPDX-License-Identifier: Apache-2.0
"""`optim`: the optimizer and its learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class SchedConfig:
    """A learning-rate schedule; which keys it reads depends on its name."""

    name: Literal[
        "CosineAnnealing", "WarmupAnnealDecayHold", "InverseSquareRootAnnealing", "NoamAnnealing", "WarmupAnnealing"
    ]
    warmup_steps: int | None = None
    warmup_ratio: float | None = None  # warm-up as a share of max_steps, instead of warmup_steps
    constant_steps: int | None = None  # CosineAnnealing: steps at min_lr at the end
    min_lr: float | None = None
    max_lr: float | None = None  # WarmupAnnealDecayHold: the peak; it replaces optim.lr
    max_steps: int | None = None  # None: trainer.max_steps
    anneal_percentage: float | None = None  # WarmupAnnealDecayHold: share of max_lr that is held at the end
    d_model: int | None = None  # NoamAnnealing: hidden size
    last_epoch: int | None = None  # schedule step to go on from, -1 for the first


@dataclass(kw_only=True)
class OptimConfig:
    """An optimizer: adam is Adam with the decay in the gradient, the others are AdamW.

    distributed_fused_adam gives each data-parallel rank a share of its state (ZeRO-1).
    """

    name: Literal["fused_adam", "distributed_fused_adam", "adamw", "adam"]
    lr: float
    weight_decay: float
    betas: list[float]
    eps: float
    sched: SchedConfig
