# SPDX-License-Identifier: Apache-2.0
"""Optimizers and their parameter groups."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bionemo.config.schema import OptimConfig
from bionemo.megatron.train_step import OptimizerShard


def parameter_groups(
    shards: Sequence[OptimizerShard], weight_decay: float, learning_rate_factor: Callable[[str], float]
) -> list[dict[str, object]]:
    """Return parameter groups by weight decay and learning rate; biases and norm parameters have no decay, as in v1.

    Args:
        shards: parameters that this process updates.
        weight_decay: weight decay of the other parameters.
        learning_rate_factor: learning rate of a parameter name as a multiple of the run's; `rate` of its group.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for each in shards:
        no_decay = len(each.shard.shape) == 1 or each.shard.name.endswith("bias")
        groups[0.0 if no_decay else weight_decay, learning_rate_factor(each.shard.name)].append(each.parameter)
    return [{"params": params, "weight_decay": decay, "rate": rate} for (decay, rate), params in groups.items()]


def build_optimizer(
    config: OptimConfig, shards: Sequence[OptimizerShard], learning_rate_factor: Callable[[str], float]
) -> torch.optim.Optimizer:
    """Build the fused optimizer: Adam with L2 decay for "adam", else AdamW (Loshchilov and Hutter 2019)."""
    optimizer_class = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    groups = parameter_groups(shards, config.weight_decay, learning_rate_factor)
    return optimizer_class(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)
