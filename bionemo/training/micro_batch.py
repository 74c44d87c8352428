# SPDX-License-Identifier: Apache-2.0
"""Trial of a micro-batch on a GPU: the planned size is reduced until a forward and backward pass fits."""

from typing import Any

import torch

from bionemo.common.errors import RankError
from bionemo.config.check import MicroBatches
from bionemo.data.data_module import SequenceData
from bionemo.megatron.train_step import ParallelModel


def largest_fitting_micro_batches(
    parallel: ParallelModel, data: SequenceData, device: torch.device, has_moments: bool = False
) -> MicroBatches:
    """Return the largest micro-batches, at most as large as those of `data`, that fit the memory of this GPU.

    Each trial computes the gradients of the first training micro-batch and does not communicate with other ranks.

    Args:
        parallel: the model.
        data: data of the run.
        device: the GPU.
        has_moments: the optimizer has allocated its state; otherwise a trial allocates as much.

    Raises:
        RankError: if a single row does not fit.
    """
    micro_batches = data.micro_batches
    while not _fits(parallel, data, micro_batches, device, has_moments):
        if micro_batches.size == 1:
            raise RankError(
                "the GPU has not enough memory for a micro-batch of one row: use more GPUs or a parallel layout "
                "(`bionemo plan` lists those that fit), or end other programs that use the GPU"
            )
        micro_batches = micro_batches.limit(micro_batches.size - 1)
    return micro_batches


def _fits(
    parallel: ParallelModel, data: SequenceData, micro_batches: MicroBatches, device: torch.device, has_moments: bool
) -> bool:
    step = next(iter(data.training_steps(MicroBatches(micro_batches.size, 1))), None)
    if step is None:  # the run resumes after its last step
        return True
    moments: Any = None
    try:
        if not has_moments:
            moments = [torch.empty(2, each.gradient.numel(), device=device) for each in parallel.optimizer_shards]
        parallel.try_micro_batch(step.micro_batches[0].to(device))
    except torch.OutOfMemoryError:
        return False
    finally:
        del moments
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True
