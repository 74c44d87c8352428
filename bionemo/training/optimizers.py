# SPDX-License-Identifier: Apache-2.0
"""Optimizers."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bionemo.config.schema import OptimConfig
from bionemo.megatron.train_step import OptimizerShard


def build_optimizer(
    config: OptimConfig, shards: Sequence[OptimizerShard], learning_rate_factor: Callable[[str], float]
) -> torch.optim.Optimizer:
    """Build the fused optimizer: Adam with L2 decay for "adam", else AdamW (Loshchilov and Hutter 2019).

    Args:
        config: `model.optim`. Biases and norm parameters have no weight decay, as in v1.
        shards: parameters that this process updates.
        learning_rate_factor: learning rate of a parameter name as a multiple of the run's; `rate` of its group.
    """
    parameters: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for each in shards:
        no_decay = len(each.shard.shape) == 1 or each.shard.name.endswith("bias")
        decay = 0.0 if no_decay else config.weight_decay
        parameters[decay, learning_rate_factor(each.shard.name)].append(each.parameter)
    groups = [{"params": each, "weight_decay": decay, "rate": rate} for (decay, rate), each in parameters.items()]
    optimizer_class = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return optimizer_class(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)
