# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts: how the work of a run is divided over GPUs."""

from dataclasses import dataclass
from typing import Literal

from bionemo.common.errors import UserError
from bionemo.config.check import divide_batch
from bionemo.config.schema import RunConfig

Recompute = Literal["none", "selective", "uniform", "block"]


@dataclass(frozen=True)
class Stage:
    """Pipeline stage `number`, counted from 0, of `count` stages."""

    number: int
    count: int

    @property
    def first(self) -> bool:
        """Whether the stage computes the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.number == self.count - 1


@dataclass(frozen=True)
class Layout:
    """Division of a training step over GPUs."""

    tensor: int = 1  # tensor-parallel size
    pipeline: int = 1  # pipeline-parallel size
    data: int = 1  # data-parallel size
    gpus_per_node: int = 8  # GPUs of one node
    micro_batch_size: int = 1  # rows of a micro-batch
    num_micro_batches: int = 1  # micro-batches per step and replica
    sequence_parallel: bool = False  # sequence parallelism is enabled
    sharded: bool = False  # the optimizer is sharded over the replicas (ZeRO-1)
    recompute: Recompute = "none"  # activation checkpointing, see megatron/layer_spec.py
    recompute_layers: int = 1  # layers per recomputed block (uniform), or recomputed layers of a stage (block)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch_size(self) -> int:
        """Rows per step of all replicas."""
        return self.micro_batch_size * self.num_micro_batches * self.data

    @property
    def stages(self) -> list[Stage]:
        """The pipeline stages."""
        return [Stage(number, self.pipeline) for number in range(self.pipeline)]

    def layers(self, total: int) -> int:
        """Return the number of layers of a stage if the model has `total` layers per stack."""
        return total // self.pipeline

    def plain_layers(self, total: int) -> int:
        """Return the number of layers of a stage that are not recomputed."""
        layers = self.layers(total)
        return {"uniform": 0, "block": max(layers - self.recompute_layers, 0)}.get(self.recompute, layers)

    def saved_inputs(self, total: int) -> int:
        """Return the number of inputs that a stage saves for the recomputation of layers."""
        recomputed = self.layers(total) - self.plain_layers(total)
        return -(-recomputed // self.recompute_layers) if self.recompute == "uniform" else recomputed

    def recomputed_layers(self, total: int) -> int:
        """Return the number of layers that recomputation adds at the peak: one block, less the plain layers."""
        layers = self.layers(total)
        block = {"uniform": min(self.recompute_layers, layers), "block": 1}.get(self.recompute, 0)
        return max(block - self.plain_layers(total), 0)

    def in_flight(self, stage: Stage) -> int:
        """Return the number of micro-batches whose activations a stage holds at once.

        With the 1F1B schedule (Narayanan et al. 2019), a stage runs as many forward passes before its first backward
        pass as there are stages from it to the end.
        """
        return min(self.pipeline - stage.number, self.num_micro_batches)


def read_layout(cfg: RunConfig) -> Layout:
    """Return the layout of a configuration.

    Raises:
        UserError: if the number of GPUs is unknown or not divisible by the parallel sizes.
    """
    model, trainer = cfg.model, cfg.trainer
    gpus_per_node = trainer.device_count
    if gpus_per_node is None:
        raise UserError(f"trainer.devices={trainer.devices} depends on the machine: give a number to plan with")
    gpus = gpus_per_node * trainer.num_nodes
    model_parallel = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if gpus % model_parallel:
        raise UserError(f"{gpus} GPUs are not divisible by tensor x pipeline parallel size {model_parallel}")
    micro_batches = divide_batch(model, trainer, gpus, on_gpu=True)
    granularity = model.activations_checkpoint_granularity
    method: Recompute = "block" if model.activations_checkpoint_method == "block" else "uniform"
    return Layout(
        tensor=model.tensor_model_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        data=gpus // model_parallel,
        gpus_per_node=gpus_per_node,
        micro_batch_size=micro_batches.size,
        num_micro_batches=micro_batches.count,
        sequence_parallel=model.sequence_parallel and model.tensor_model_parallel_size > 1,
        sharded=model.optim.name == "distributed_fused_adam",
        recompute=method if granularity == "full" else granularity or "none",
        recompute_layers=model.activations_checkpoint_num_layers or 1,
    )


def layout_overrides(layout: Layout, requested: Layout, automatic: bool = False) -> list[str]:
    """Return the overrides that change the requested layout into another one.

    `automatic`: the configuration has `model.micro_batch_size=auto`. Then micro-batch size and accumulation are set
    together, because accumulation alone would change the number of rows of a step.
    """
    before, after = _keys(requested), _keys(layout)
    changed = {key for key, value in after.items() if before[key] != value}
    batch = {"model.micro_batch_size", "trainer.accumulate_grad_batches"}
    if automatic and changed & batch:
        changed |= batch
    return [f"{key}={value}" for key, value in after.items() if key in changed]


def _keys(layout: Layout) -> dict[str, object]:
    full = layout.recompute in ("uniform", "block")
    return {
        "model.tensor_model_parallel_size": layout.tensor,
        "model.sequence_parallel": layout.sequence_parallel,
        "model.pipeline_model_parallel_size": layout.pipeline,
        "model.micro_batch_size": layout.micro_batch_size,
        "trainer.accumulate_grad_batches": layout.num_micro_batches,
        "model.optim.name": "distributed_fused_adam" if layout.sharded else "fused_adam",
        "model.activations_checkpoint_granularity": "full" if full else layout.recompute.replace("none", "null"),
        "model.activations_checkpoint_method": layout.recompute if full else "null",
        "model.activations_checkpoint_num_layers": layout.recompute_layers,
    }
