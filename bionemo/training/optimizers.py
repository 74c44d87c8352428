# SPDX-License-Identifier: Apache-2.0
"""Optimizers and their parameter groups."""

import torch
from torch import nn

from bionemo.config.schema import OptimConfig
from bionemo.errors import UserError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups, as the predecessor's: biases and all norm parameters are never decayed, the rest is."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (plain if parameter.dim() == 1 or name.endswith("bias") else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer, its update in one fused kernel.

    Raises:
        UserError: on a name without an optimizer behind it.
    """
    kind = {"fused_adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}.get(config.name)
    if kind is None:
        raise UserError(f"model.optim.name={config.name} is not available: choose fused_adam (AdamW) or adam")
    groups = parameter_groups(model, config.weight_decay)
    return kind(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)
