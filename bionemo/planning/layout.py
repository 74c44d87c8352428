# SPDX-License-Identifier: Apache-2.0
"""How a run is laid out over GPUs, and what a step consists of."""

from dataclasses import dataclass
from typing import Literal

from bionemo.common.errors import UserError
from bionemo.config.check import micro_batches
from bionemo.config.schema import RunConfig

Recompute = Literal["none", "selective", "uniform", "block"]


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, from 0."""

    number: int
    of: int

    @property
    def first(self) -> bool:
        """Whether it embeds tokens."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it computes the loss."""
        return self.number == self.of - 1


@dataclass(frozen=True)
class Layout:
    """How the work of a step is divided.

    Attributes:
        tensor: GPUs that share every layer.
        pipeline: stages that the layers are dealt to.
        data: replicas of the model, each with its own rows.
        node: GPUs of a machine.
        rows: of a micro-batch.
        micro_batches: of a replica in a step.
        sequence_parallel: norms, residuals and dropout are divided over the tensor ranks too.
        sharded: each replica keeps its share of the optimizer's moments (ZeRO-1).
        recompute: which activations are computed again in the backward pass; see megatron/spec.py.
        stretch: uniform: layers between two kept inputs; block: layers that keep their input alone.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    node: int = 8
    rows: int = 1
    micro_batches: int = 1
    sequence_parallel: bool = False
    sharded: bool = False
    recompute: Recompute = "none"
    stretch: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.tensor * self.pipeline * self.data

    @property
    def global_rows(self) -> int:
        """Rows of a step, over all replicas."""
        return self.rows * self.micro_batches * self.data

    @property
    def sequence(self) -> int:
        """Parts into which the tokens of norms, residuals and dropout are divided."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def stages(self) -> list[Stage]:
        """The stages of the pipeline."""
        return [Stage(number, self.pipeline) for number in range(self.pipeline)]

    def layers(self, whole: int) -> int:
        """Layers of a stage, where the model has so many."""
        return whole // self.pipeline

    def plain_layers(self, whole: int) -> int:
        """Layers of a stage that keep all that their backward pass needs."""
        layers = self.layers(whole)
        return {"uniform": 0, "block": max(layers - self.stretch, 0)}.get(self.recompute, layers)

    def kept_inputs(self, whole: int) -> int:
        """Inputs that a stage keeps to compute the other layers again."""
        again = self.layers(whole) - self.plain_layers(whole)
        return -(-again // self.stretch) if self.recompute == "uniform" else again

    def recomputed_layers(self, whole: int) -> int:
        """Layers by which a backward pass holds more than what was kept: those of a stretch; plain ones make room."""
        layers = self.layers(whole)
        stretch = {"uniform": min(self.stretch, layers), "block": 1}.get(self.recompute, 0)
        return max(stretch - self.plain_layers(whole), 0)

    def in_flight(self, stage: Stage) -> int:
        """Micro-batches whose activations a stage holds at once.

        One forward, one backward (Narayanan et al. 2019): a stage runs as many forward passes as there are stages from
        it to the end before its first backward pass.
        """
        return min(self.pipeline - stage.number, self.micro_batches)


def layout_of(cfg: RunConfig) -> Layout:
    """Read the layout off a configuration.

    Raises:
        UserError: when the number of GPUs is not given, or cannot be divided so.
    """
    model, trainer = cfg.model, cfg.trainer
    node = _devices(trainer.devices)
    gpus, ways = node * trainer.num_nodes, model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if gpus % ways:
        raise UserError(f"{gpus} GPUs are not divisible by tensor x pipeline parallel size {ways}")
    granularity = model.activations_checkpoint_granularity
    method: Recompute = "block" if model.activations_checkpoint_method == "block" else "uniform"
    return Layout(
        tensor=model.tensor_model_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        data=gpus // ways,
        node=node,
        rows=model.micro_batch_size,
        micro_batches=micro_batches(model, trainer, gpus),
        sequence_parallel=model.sequence_parallel and model.tensor_model_parallel_size > 1,
        sharded=model.optim.name == "distributed_fused_adam",
        recompute=method if granularity == "full" else granularity or "none",
        stretch=model.activations_checkpoint_num_layers or 1,
    )


def _devices(given: int | str | list[int]) -> int:
    """GPUs of a machine, as Lightning reads `trainer.devices`."""
    if isinstance(given, list):
        return len(given)
    if given in ("auto", "-1", -1):
        raise UserError(
            f"trainer.devices is {given}, which only the machine itself can tell: give a number to plan with"
        )
    if isinstance(given, str):
        indices = [index for index in given.split(",") if index.strip()]
        return len(indices) if "," in given else int(given)
    return given
