# SPDX-License-Identifier: Apache-2.0
"""Other layouts for the same number of GPUs: which fit, and which would be the fastest."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from bionemo.planning.devices import Device
from bionemo.planning.duration import duration
from bionemo.planning.layout import Layout, Recompute
from bionemo.planning.memory import fullest
from bionemo.planning.step import Step

_WAYS = (1, 2, 4, 8)
_MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Choice:
    """A layout, and what came out for it.

    Attributes:
        layout: how work is divided.
        memory: bytes of the fullest GPU.
        fits: whether the device has them.
        speed: tokens a second, an estimate.
    """

    layout: Layout
    memory: int
    fits: bool
    speed: float


def choice(step: Step, layout: Layout, device: Device) -> Choice:
    """Work out what a layout needs and gives."""
    _, needed = fullest(step, layout)
    seconds = duration(step, layout, device).total
    return Choice(layout, needed.total, needed.total <= device.usable, layout.global_rows * step.read / seconds)


def largest(step: Step, layout: Layout, device: Device) -> int:
    """Rows of the largest micro-batch that fits."""
    return bisect_right(
        range(1, _MOST_ROWS), device.usable, key=lambda rows: fullest(step, replace(layout, rows=rows))[1].total
    )


def choices(step: Step, asked: Layout, device: Device) -> list[Choice]:
    """All layouts for as many GPUs, the fastest that fit first, then those that do not, the smallest first."""
    found = [choice(step, layout, device) for layout in alternatives(step, asked)]
    return sorted(found, key=lambda each: (not each.fits, -each.speed if each.fits else each.memory))


def alternatives(step: Step, asked: Layout) -> Iterator[Layout]:
    """Every valid division of the GPUs that keeps the step as large as it is, with micro-batches no larger."""
    recomputes: tuple[Recompute, ...] = ("none", "uniform")
    for tensor, pipeline in ((tensor, pipeline) for tensor in _WAYS for pipeline in _WAYS):
        data, rest = divmod(asked.gpus, tensor * pipeline)
        if rest or asked.global_rows % data or not divides(step, tensor, pipeline):
            continue
        rows = gcd(asked.rows, asked.global_rows // data)
        sequence = tensor > 1 and not any(tokens.count(rows) % tensor for tokens in step.tokens)
        micro_batches = asked.global_rows // data // rows
        for sharded in (False, True)[: 2 if data > 1 else 1]:
            for recompute in recomputes:
                yield Layout(tensor, pipeline, data, asked.node, rows, micro_batches, sequence, sharded, recompute)


def divides(step: Step, tensor: int, pipeline: int) -> bool:
    """Whether a model can be cut so: heads, MLP and word table over the tensor ranks, layers over the stages.

    Stages send each other tensors of one size, of one stack.
    """
    shape = step.shape
    staged = len(step.tokens) == 1 and step.tokens[0].grain == 1
    return not (shape.heads % tensor or shape.ffn % tensor or shape.rows % tensor or shape.layers % pipeline) and (
        staged or pipeline == 1
    )


def overrides(layout: Layout, asked: Layout) -> list[str]:
    """What to type for a layout: the keys in which it differs from what was asked for."""
    before, after = _keys(asked), _keys(layout)
    return [f"{key}={value}" for key, value in after.items() if before[key] != value]


def _keys(layout: Layout) -> dict[str, object]:
    full = layout.recompute in ("uniform", "block")
    return {
        "model.tensor_model_parallel_size": layout.tensor,
        "model.sequence_parallel": layout.sequence_parallel,
        "model.pipeline_model_parallel_size": layout.pipeline,
        "model.micro_batch_size": layout.rows,
        "trainer.accumulate_grad_batches": layout.micro_batches,
        "model.optim.name": "distributed_fused_adam" if layout.sharded else "fused_adam",
        "model.activations_checkpoint_granularity": "full" if full else layout.recompute.replace("none", "null"),
        "model.activations_checkpoint_method": layout.recompute if full else "null",
        "model.activations_checkpoint_num_layers": layout.stretch,
    }
