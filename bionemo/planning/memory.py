# SPDX-License-Identifier: Apache-2.0
"""Memory of one process at the fullest moment of a step, in bytes, by kind.

Not here: the CUDA context, NCCL's buffers and fragmentation; devices.py leaves room for them.
"""

from dataclasses import astuple, dataclass, replace

from bionemo.planning.layout import Layout, Stage
from bionemo.planning.moments import moments
from bionemo.planning.sizes import Shape, stage_parameters
from bionemo.planning.step import Step


@dataclass(frozen=True)
class Memory:
    """Bytes by kind.

    Attributes:
        weights: fp32.
        gradients: Megatron's buffer, fp32.
        moments: AdamW's two, fp32, or this replica's share of them.
        copies: of weights in half precision, which autocast makes.
        activations: kept for the backward pass, of all micro-batches in flight.
        working: what comes and goes while one layer is computed backward.
    """

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    copies: int = 0
    activations: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(astuple(self))


def fullest(step: Step, layout: Layout) -> tuple[Stage, Memory]:
    """The stage that needs most memory, and how much."""
    needs = [(stage, memory(step, layout, stage)) for stage in layout.stages]
    return max(needs, key=lambda need: need[1].total)


def memory(step: Step, layout: Layout, stage: Stage) -> Memory:
    """A stage's memory at its fullest moment, in a micro-batch as large as they get."""
    fuller = max(moments(step.crowded(layout.rows), layout, stage), key=sum)
    return replace(states(step.shape, layout, stage), **fuller._asdict())


def states(shape: Shape, layout: Layout, stage: Stage) -> Memory:
    """What stays from step to step: fp32 weights, gradients and two moments, 4 + 4 + 8 bytes a parameter.

    Sharded, the moments are divided over the replicas (ZeRO-1, Rajbhandari et al. 2020).
    """
    parameters = sum(stage_parameters(shape, layout, stage).values())
    share = layout.data if layout.sharded else 1
    return Memory(weights=4 * parameters, gradients=4 * parameters, moments=8 * parameters // share)
