# SPDX-License-Identifier: Apache-2.0
"""Division of the rows of a step into micro-batches."""

from dataclasses import dataclass

from bionemo.config.schema import ModelConfig, TrainerConfig


@dataclass(frozen=True)
class MicroBatches:
    """Division of a model replica's rows of a step."""

    size: int  # rows of a micro-batch
    count: int  # micro-batches per step

    def limit(self, size: int) -> "MicroBatches":
        """Return the division of the same rows into micro-batches with the largest size that is not above `size`."""
        rows = self.size * self.count
        largest = next(each for each in range(max(1, min(size, rows)), 0, -1) if rows % each == 0)
        return MicroBatches(largest, rows // largest)


def divide_batch(model: ModelConfig, trainer: TrainerConfig, world_size: int, on_gpu: bool) -> MicroBatches:
    """Return the micro-batches of a configuration that `check_layout` accepts.

    With `model.micro_batch_size=auto`, a GPU starts with one micro-batch of all rows, which the caller divides if it
    does not fit. CPUs and model-parallel layouts have at most `model.replica_batch_size` rows.
    """
    replicas, accumulated = model.data_parallel_size(world_size), trainer.accumulate_grad_batches
    if model.micro_batch_size == "auto":
        rows = model.replica_batch_size * (accumulated or 1)
        if model.global_batch_size is not None:
            rows = model.global_batch_size // replicas
        one = on_gpu and model.model_parallel_size == 1
        return MicroBatches(rows, 1).limit(rows if one else model.replica_batch_size)
    rows = model.micro_batch_size * replicas
    if accumulated in (None, 1):
        accumulated = (model.global_batch_size or rows) // rows
    return MicroBatches(model.micro_batch_size, accumulated)
