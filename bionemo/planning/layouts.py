# SPDX-License-Identifier: Apache-2.0
"""Parallel layout: how the work of a run is divided over GPUs."""

from dataclasses import dataclass

from bionemo.common.errors import UserError
from bionemo.config.micro_batches import MicroBatches, divide_batch
from bionemo.config.schema import RunConfig


@dataclass(frozen=True)
class Layout:
    """Division of a training step over GPUs."""

    tensor: int  # tensor-parallel size
    pipeline: int  # pipeline-parallel size
    data: int  # data-parallel size
    gpus_per_node: int  # GPUs of one node
    micro_batches: MicroBatches  # of a replica

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch_size(self) -> int:
        """Rows per step of all replicas."""
        return self.micro_batches.size * self.micro_batches.count * self.data


def read_layout(cfg: RunConfig) -> Layout:
    """Return the layout of a configuration.

    Raises:
        UserError: if the number of GPUs is unknown or not divisible by the parallel sizes.
    """
    model, trainer = cfg.model, cfg.trainer
    gpus_per_node = trainer.device_count
    if gpus_per_node is None:
        raise UserError(f"trainer.devices={trainer.devices} depends on the machine: give a number to plan with")
    gpus, ranks = gpus_per_node * trainer.num_nodes, model.model_parallel_size
    if gpus % ranks:
        raise UserError(f"{gpus} GPUs are not divisible by tensor x pipeline parallel size {ranks}")
    return Layout(
        model.tensor_model_parallel_size, model.pipeline_model_parallel_size, gpus // ranks, gpus_per_node,
        divide_batch(model, trainer, gpus, on_gpu=True),
    )  # fmt: skip
