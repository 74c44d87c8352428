# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedules of NeMo and BioNeMo v1, as functions of the step.

The step counts optimizer updates from 0, without those that loss scaling skipped.
"""

import math
from collections.abc import Callable

from bionemo.common.errors import UserError
from bionemo.config.schema import SchedConfig

Schedule = Callable[[int], float]


def build_schedule(config: SchedConfig | None, lr: float, max_steps: int) -> Schedule:
    """Return the schedule named in the configuration.

    Args:
        config: `model.optim.sched`; None: constant learning rate.
        lr: `model.optim.lr`.
        max_steps: number of training steps, for schedules without `max_steps`.

    Raises:
        UserError: if a required key is missing or contradicts another one.
    """
    if config is None:
        return lambda step: lr
    steps, min_lr = config.end(max_steps), config.min_lr or 0.0
    warmup = config.warm_up(steps)
    match config.name:
        case "CosineAnnealing" if config.constant_steps:
            return _cosine_with_constant(lr, min_lr, warmup, int(config.constant_steps), steps)
        case "CosineAnnealing":
            return _warm_up(lr, min_lr, warmup, steps, lambda s: _cosine(lr, min_lr, s - warmup, steps - warmup))
        case "WarmupAnnealDecayHold":
            max_lr, hold = _require(config, "max_lr"), _require(config, "anneal_percentage")
            return _warmup_decay_hold(_require(config, "min_lr"), max_lr, hold, warmup, steps)
        case "InverseSquareRootAnnealing":
            return _warm_up(lr, min_lr, warmup, steps, lambda s: lr / math.sqrt((s + 1) / (warmup + 1)))
        case "NoamAnnealing":
            return _noam(lr, min_lr, int(_require(config, "d_model")), warmup)
        case "WarmupAnnealing":
            slope = (min_lr - lr) / max(steps - warmup, 1)
            return _warm_up(lr, min_lr, warmup, steps, lambda s: lr + slope * (s - warmup))
    raise UserError(f"model.optim.sched.name={config.name}: unknown schedule")


def _cosine(lr: float, min_lr: float, step: int, steps: int) -> float:
    """Fall from lr at step 0 to min_lr after `steps` steps."""
    return min_lr + 0.5 * (1 + math.cos(math.pi * step / max(steps, 1))) * (lr - min_lr)


def _cosine_with_constant(lr: float, min_lr: float, warmup: int, constant: int, max_steps: int) -> Schedule:
    """Linear warm-up from 0, cosine decay to min_lr, then min_lr for the last `constant` steps."""
    decay = max_steps - warmup - constant

    def rate(step: int) -> float:
        if warmup and step <= warmup:
            return lr * step / warmup
        if step >= warmup + decay:
            return min_lr
        return _cosine(lr, min_lr, step - warmup, decay)

    return rate


def _warm_up(lr: float, min_lr: float, warmup: int, max_steps: int, decay: Schedule) -> Schedule:
    """Linear warm-up from lr / (warmup + 1), then `decay` until max_steps, then min_lr. max_steps < 1: no end."""

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / (warmup + 1)
        return min_lr if step > max(max_steps, warmup) and max_steps > 0 else decay(step)

    return rate


def _warmup_decay_hold(min_lr: float, max_lr: float, hold: float, warmup: int, max_steps: int) -> Schedule:
    """Linear warm-up from min_lr to max_lr, then linear decay to 0 at max_steps, at least hold * max_lr and min_lr."""

    def rate(step: int) -> float:
        if step < warmup:
            return min_lr + (max_lr - min_lr) * step / warmup
        return max(max_lr * (1 - (step - warmup) / max(max_steps - warmup, 1)), max_lr * hold, min_lr)

    return rate


def _noam(scale: float, min_lr: float, d_model: int, warmup: int) -> Schedule:
    """Scale * d^-0.5 * min(s^-0.5, s * w^-1.5), s from 1 (Vaswani et al. 2017), at least min_lr after warm-up."""
    if scale < min_lr:
        raise UserError(
            f"model.optim.lr={scale} is below model.optim.sched.min_lr={min_lr}: with NoamAnnealing lr is a multiplier"
        )

    def rate(step: int) -> float:
        s = max(step, 1)
        value = scale * d_model**-0.5 * min(s**-0.5, s * max(warmup, 1) ** -1.5)
        return max(value, min_lr) if s > warmup else value

    return rate


def _require(config: SchedConfig, key: str) -> float:
    if (value := getattr(config, key)) is None:
        raise UserError(f"model.optim.sched.{key} is not set: {config.name} requires it")
    return float(value)
