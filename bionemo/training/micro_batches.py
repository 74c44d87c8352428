# SPDX-License-Identifier: Apache-2.0
"""Trial of a micro-batch on a GPU: its size is halved until a forward and backward pass fits the memory."""

from typing import Any

import torch

from bionemo.common.errors import RankError
from bionemo.config.micro_batches import MicroBatches
from bionemo.data.data_module import SequenceData
from bionemo.megatron.train_step import ParallelModel


def fit_micro_batches(parallel: ParallelModel, data: SequenceData, device: torch.device) -> MicroBatches:
    """Return the micro-batches of `data`, of half the size, or of a quarter and so on: the first that fit this GPU.

    Each trial computes the gradients of the first training micro-batch and does not communicate with other ranks.

    Args:
        parallel: the model.
        data: data of the run.
        device: the GPU.

    Raises:
        RankError: if a single row does not fit.
    """
    micro_batches = data.micro_batches
    while not _fits(parallel, data, micro_batches, device):
        if micro_batches.size == 1:
            raise RankError(
                "the GPU has not enough memory for a micro-batch of one row: choose a parallel layout that fits "
                "(`bionemo plan` estimates its memory), or end other programs that use the GPU"
            )
        micro_batches = micro_batches.limit(micro_batches.size // 2)
    return micro_batches


def _fits(parallel: ParallelModel, data: SequenceData, micro_batches: MicroBatches, device: torch.device) -> bool:
    step = next(iter(data.training_steps(MicroBatches(micro_batches.size, 1))), None)
    if step is None:  # the run resumes after its last step
        return True
    moments: Any = None
    try:
        # the first update of a new run will allocate the optimizer state
        moments = [torch.empty(2, each.gradient.numel(), device=device) for each in parallel.optimizer_shards]
        parallel.try_micro_batch(step.micro_batches[0].to(device))
    except torch.OutOfMemoryError:
        return False
    finally:
        del moments
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True
