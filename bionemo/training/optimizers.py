# SPDX-License-Identifier: Apache-2.0
"""Optimizers and their parameter groups."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bionemo.config.schema import OptimConfig
from bionemo.megatron.train_step import Part


def parameter_groups(
    parts: Sequence[Part], weight_decay: float, rate_of: Callable[[str], float]
) -> list[dict[str, object]]:
    """Groups by decay, as the predecessor's, and by rate: biases and all norm parameters are never decayed.

    Args:
        parts: what this process updates.
        weight_decay: of the rest.
        rate_of: learning rate of a name, as a multiple of the run's; `rate` of its group.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for part in parts:
        vector = len(part.place.shape) == 1 or part.place.name.endswith("bias")
        groups[0.0 if vector else weight_decay, rate_of(part.place.name)].append(part.parameter)
    return [{"params": params, "weight_decay": decay, "rate": rate} for (decay, rate), params in groups.items()]


def build_optimizer(
    config: OptimConfig, parts: Sequence[Part], rate_of: Callable[[str], float]
) -> torch.optim.Optimizer:
    """Make the optimizer, its update in one fused kernel.

    `adam` adds the decay to the gradient, the others are AdamW (Loshchilov and Hutter 2019).
    """
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    groups = parameter_groups(parts, config.weight_decay, rate_of)
    return kind(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)
