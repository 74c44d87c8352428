# SPDX-License-Identifier: Apache-2.0
"""Detection of NaN and infinity in metrics, weights and optimizer state, before they are saved."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.megatron.finite import find_non_finite
from bionemo.megatron.sharded_state_dict import optimizer_pieces, weight_pieces


def check_finite(module: Any, metrics: Mapping[str, float], state: bool = True) -> None:
    """Check that metrics and training state are finite; all ranks must call it and reach the same result.

    Args:
        module: the TrainingModule.
        metrics: losses and other metrics, equal on all ranks.
        state: check weights and optimizer state, too; otherwise only to complete the message about a metric.

    Raises:
        UserError: if a value is not finite; names it, the step, a remedy and the newest checkpoint.
    """
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if wrong or state:
        parts = find_non_finite(_training_state(module), module.device)
        if wrong or parts:
            descriptions = [f"{name} is {value:.4g}" for name, value in wrong.items()]
            raise divergence_error(module, ", ".join(descriptions + [f"{name} not finite" for name in parts]))


def divergence_error(module: Any, reason: str) -> UserError:
    """Return the error of a run that has diverged."""
    trainer = module.trainer
    if trainer.state.fn != "fit":
        return UserError(f"{reason}: test another checkpoint, or set trainer.precision=32")
    remedies = [f"lower {module.model.optimizer_key}.lr"]
    if module.trainer_config.gradient_clip_val is None:
        remedies.append("set trainer.gradient_clip_val")
    if module.precision.needs_scaling:
        remedies.append("set trainer.precision=bf16-mixed")
    trainer.strategy.checkpoint_writer.wait()
    newest = "; no checkpoint has been saved"
    if checkpoints := module.list_checkpoints():
        newest = f", and resume from {checkpoints[0]} (step {checkpoint.load_manifest(checkpoints[0])['step']})"
    return UserError(
        f"step {trainer.global_step}: {reason}: training has diverged, and this step is not saved; "
        f"{' or '.join(remedies)}{newest}"
    )


def _training_state(module: Any) -> dict[str, Iterable[Tensor]]:
    optimizers = module.trainer.strategy.optimizers
    optimizer_state = optimizer_pieces(module.parallel, optimizers[0]) if optimizers else []
    return {
        "the weights are": [piece.values for piece in weight_pieces(module.parallel)],
        "the optimizer state is": [piece.values for piece in optimizer_state],
    }
