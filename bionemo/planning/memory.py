# SPDX-License-Identifier: Apache-2.0
"""Memory of one process at the fullest moment of a step, in bytes, by kind.

Not here: the CUDA context, NCCL's buffers and fragmentation; devices.py leaves room for them.
"""

from dataclasses import asdict, astuple, dataclass, replace

from bionemo.planning.activations import Step, activations, element, head, logit_columns
from bionemo.planning.layout import Layout, Stage
from bionemo.planning.sizes import Shape, layer_matrices, stage_parameters


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
    """A stage's memory at its fullest moment.

    That is the end of a forward pass, when autocast still has its copy of every weight, or the backward pass of the
    last layers: what the head kept is gone then, and what is recomputed is there.
    """
    kept, again = activations(step, layout, stage)
    behind = head(step, layout) if stage.last else 0
    of_layer, of_head = copies(step, layout, stage)
    layers, plain = layout.layers(step.shape.layers), layout.plain_layers(step.shape.layers)
    flight = layout.in_flight(stage)
    forward = Memory(
        copies=flight * (plain * of_layer + of_head) + (layers - plain) * of_layer, activations=flight * kept
    )
    backward = Memory(
        copies=(flight * plain + layout.recomputed_layers(step.shape.layers)) * of_layer,
        activations=flight * kept - behind + again,
        working=working(step, layout),
    )
    fuller = max(forward, backward, key=lambda moment: moment.total)
    return replace(states(step.shape, layout, stage), **{k: v for k, v in asdict(fuller).items() if v})


def states(shape: Shape, layout: Layout, stage: Stage) -> Memory:
    """What stays from step to step: fp32 weights, gradients and two moments, 4 + 4 + 8 bytes a parameter.

    Sharded, the moments are divided over the replicas (ZeRO-1, Rajbhandari et al. 2020).
    """
    parameters = sum(stage_parameters(shape, layout, stage).values())
    share = layout.data if layout.sharded else 1
    return Memory(weights=4 * parameters, gradients=4 * parameters, moments=8 * parameters // share)


def copies(step: Step, layout: Layout, stage: Stage) -> tuple[int, int]:
    """Weights of a layer and of the head that autocast copies into half precision while a micro-batch's graph lives.

    Its cache ends with a forward pass, so that every micro-batch in flight has copies of its own. Megatron's divided
    layers keep none: they save the fp32 weight and cast it on each use.
    """
    if not step.half:
        return 0, 0
    shape = step.shape
    layer = 2 * layer_matrices(shape) if layout.tensor == 1 else 0
    return layer, 2 * (shape.hidden**2 + shape.hidden * logit_columns(shape, layout)) if stage.last else 0


def working(step: Step, layout: Layout) -> int:
    """Gradients while an MLP is computed backward, the fullest moment of a layer.

    Of the residual stream (4D), cast for fc2 (eD), and of GELU's output (eF; that of its input takes the place of what
    fc2 kept); and of fc1's weight, in half precision and cast to fp32. With sequence parallelism the
    gradient of fc2's output is whole, and there is Megatron's buffer in which stretches are gathered.
    """
    shape, tokens, e = step.shape, layout.rows * step.tokens.row, element(step)
    stream = (4 + (e if e == 2 else 0)) * shape.hidden * tokens // layout.sequence
    gathered = 2 * e * shape.hidden * tokens if layout.sequence > 1 else 0
    weight = (6 if step.half else 4) * shape.hidden * shape.ffn // layout.tensor
    return stream + gathered + e * shape.ffn * tokens // layout.tensor + weight
