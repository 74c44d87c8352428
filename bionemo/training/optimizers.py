# SPDX-License-Identifier: Apache-2.0
"""Optimizers."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bionemo.config.schema import OptimConfig
from bionemo.megatron.train_step import OptimizerShard
from bionemo.training.muon import Muon


def build_optimizer(
    config: OptimConfig, shards: Sequence[OptimizerShard], learning_rate_factor: Callable[[str], float]
) -> torch.optim.Optimizer:
    """Build the fused optimizer.

    It is Adam with L2 decay for "adam", Muon for "muon", and else AdamW (Loshchilov and Hutter 2019). Muon updates the
    matrices of the transformer layers; the other parameters have AdamW.

    Args:
        config: `model.optim`. Biases and norm parameters have no weight decay, as in v1.
        shards: parameters that this process updates.
        learning_rate_factor: learning rate of a parameter name as a multiple of the run's; `rate` of its group.
    """
    parameters: dict[tuple[bool, float, float], list[nn.Parameter]] = defaultdict(list)
    for each in shards:
        name, dimensions = each.shard.name, len(each.shard.shape)
        decay = 0.0 if dimensions == 1 or name.endswith("bias") else config.weight_decay
        is_matrix = dimensions == 2 and ".layers." in name
        parameters[is_matrix, decay, learning_rate_factor(name)].append(each.parameter)
    matrices, others = (
        [
            {"params": each, "weight_decay": decay, "rate": rate}
            for (is_matrix, decay, rate), each in parameters.items()
            if is_matrix == kind
        ]
        for kind in (True, False)
    )
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    if config.name == "muon":
        return Muon(matrices, others, **options)
    optimizer_class = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return optimizer_class(matrices + others, fused=True, **options)
