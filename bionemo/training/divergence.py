# SPDX-License-Identifier: Apache-2.0
"""Ends a run that computes NaN or infinity, before that state takes the place of a checkpoint."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.megatron.finite import not_finite
from bionemo.megatron.sharded_state_dict import optimizer_pieces, weight_pieces


def refuse_not_finite(module: Any, figures: Mapping[str, float], state: bool = True) -> None:
    """See that a run's state and its figures are finite numbers; all ranks call it, and decide the same.

    Args:
        module: the TrainingModule.
        figures: what else has to be finite, the same on all ranks: losses and metrics by their names.
        state: look at the weights and the optimizer state too; otherwise only when a figure is not finite.

    Raises:
        UserError: naming what is not finite, the step, what to do, and the checkpoint that is left.
    """
    wrong = {name: value for name, value in figures.items() if not math.isfinite(value)}
    if wrong or state:
        parts = not_finite(_state(module), module.device)
        if wrong or parts:
            said = [f"{name} is {value:.4g}" for name, value in wrong.items()]
            raise diverged(module, ", ".join(said + [f"{name} not finite" for name in parts]))


def diverged(module: Any, what: str) -> UserError:
    """The error of a run whose training has diverged."""
    trainer = module.trainer
    if trainer.state.fn != "fit":
        return UserError(f"{what}: test another checkpoint, or set trainer.precision=32")
    key = f"{module.model.optim_key}.lr"
    todo = [f"lower {key}"]
    if module.trainer_config.gradient_clip_val is None:
        todo.append("set trainer.gradient_clip_val")
    if module.precision.needs_scaling:
        todo.append("set trainer.precision=bf16-mixed")
    trainer.strategy.saver.wait()  # for the newest checkpoint
    saved = module.saved()
    if saved:
        left = f", and resume from {saved[0]} (step {checkpoint.manifest_of(saved[0])['step']})"
    else:
        left = "; no checkpoint has been saved before"
    return UserError(
        f"step {trainer.global_step}: {what}: training has diverged, and this step is not saved; "
        f"{' or '.join(todo)}{left}"
    )


def _state(module: Any) -> dict[str, Iterable[Tensor]]:
    """What this rank would write."""
    optimizers = module.trainer.strategy.optimizers
    slots = optimizer_pieces(module.parallel, optimizers[0]) if optimizers else []
    return {
        "the weights are": [piece.values for piece in weight_pieces(module.parallel)],
        "the optimizer state is": [piece.values for piece in slots],
    }
