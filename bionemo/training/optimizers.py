# SPDX-License-Identifier: Apache-2.0
"""Optimizers and their parameter groups."""

from collections.abc import Sequence

import torch
from torch import nn

from bionemo.config.schema import OptimConfig
from bionemo.megatron.step import Part


def parameter_groups(parts: Sequence[Part], weight_decay: float) -> list[dict[str, object]]:
    """Two groups, as the predecessor's: biases and all norm parameters are never decayed, the rest is."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for part in parts:
        vector = len(part.place.shape) == 1 or part.place.name.endswith("bias")
        (plain if vector else decayed).append(part.parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(config: OptimConfig, parts: Sequence[Part]) -> torch.optim.Optimizer:
    """Make the optimizer, its update in one fused kernel.

    `adam` adds the decay to the gradient, the others are AdamW (Loshchilov and Hutter 2019).
    """
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    groups = parameter_groups(parts, config.weight_decay)
    return kind(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)
