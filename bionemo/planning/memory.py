# SPDX-License-Identifier: Apache-2.0
"""Memory of one process at the fullest moment of a step, in bytes, by kind.

Not here: the CUDA context, NCCL's buffers and fragmentation; devices.py leaves room for them.
"""

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace

from bionemo.planning.activations import activations, again, asked, end, logit_columns
from bionemo.planning.layout import Layout, Stage
from bionemo.planning.sizes import Kind, Shape, layer_matrices, stage_parameters
from bionemo.planning.step import Stack, Step


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
    """A stage's memory at its fullest moment."""
    fuller = max(moments(step, layout, stage), key=lambda moment: moment.total)
    return replace(states(step.shape, layout, stage), **{k: v for k, v in asdict(fuller).items() if v})


def moments(step: Step, layout: Layout, stage: Stage) -> Iterator[Memory]:
    """What comes and goes, when there may be most of it.

    * The end of a forward pass, when autocast still has its copy of every weight.
    * The gradient of the logits.
    * The backward pass of the last layers of each stack: what stands behind them is gone then, and what is recomputed
      is there.
    """
    stacks, flight = step.stacks, layout.in_flight(stage)
    layers, plain = layout.layers(step.shape.layers), layout.plain_layers(step.shape.layers)
    kept = [activations(step, layout, stage, stack) for stack in stacks]
    ends = [end(step, layout, stage, stack) for stack in stacks]
    copied = [copies(step, layout, stack.kind) for stack in stacks]
    of_head = head_copies(step, layout) if stage.last else 0
    others = (flight - 1) * (sum(kept) + sum(ends))
    in_graphs = flight * (plain * sum(copied) + of_head)

    yield Memory(copies=in_graphs + (layers - plain) * sum(copied), activations=others + sum(kept) + sum(ends))
    if stage.last:
        yield Memory(
            copies=in_graphs, activations=others + sum(kept) + sum(ends), working=of_logits(step, layout, stacks[-1])
        )
    for number, stack in enumerate(stacks):
        until = slice(number + 1)
        behind = sum(ends[:number]) + (0 if stage.last else ends[number])
        yield Memory(
            copies=flight * plain * sum(copied[until]) + layout.recomputed_layers(step.shape.layers) * copied[number],
            activations=others + sum(kept[until]) + behind + again(step, layout, stack),
            working=working(step, layout, stack) + waiting(step, layout, stage),
        )


def states(shape: Shape, layout: Layout, stage: Stage) -> Memory:
    """What stays from step to step: fp32 weights, gradients and two moments, 4 + 4 + 8 bytes a parameter.

    Sharded, the moments are divided over the replicas (ZeRO-1, Rajbhandari et al. 2020).
    """
    parameters = sum(stage_parameters(shape, layout, stage).values())
    share = layout.data if layout.sharded else 1
    return Memory(weights=4 * parameters, gradients=4 * parameters, moments=8 * parameters // share)


def copies(step: Step, layout: Layout, kind: Kind) -> int:
    """Weights of a layer that autocast copies into half precision while a micro-batch's graph lives.

    Its cache ends with a forward pass, so that every micro-batch in flight has copies of its own. Megatron's divided
    layers keep none: they save the fp32 weight and cast it on each use.
    """
    return 2 * layer_matrices(step.shape, kind) if step.half and layout.tensor == 1 else 0


def head_copies(step: Step, layout: Layout) -> int:
    """The same of the head, which is never Megatron's."""
    shape = step.shape
    return 2 * shape.hidden * (shape.dense * shape.hidden + logit_columns(shape, layout)) if step.half else 0


def of_logits(step: Step, layout: Layout, stack: Stack) -> int:
    """Gradients while the loss is computed backward."""
    return round(8 * asked(layout, stack) * logit_columns(step.shape, layout))


def waiting(step: Step, layout: Layout, stage: Stage) -> int:
    """The word table's gradient from the head, which waits for that from the embedding."""
    shared = step.shape.tied and stage.first and stage.last
    return 4 * step.shape.rows * step.shape.hidden // layout.tensor if shared else 0


def working(step: Step, layout: Layout, stack: Stack) -> int:
    """Gradients while an MLP is computed backward, the fullest moment of a layer.

    Of the residual stream (4D), cast for fc2 (eD), and of GELU's output (eF; that of its input takes the place of what
    fc2 kept); and of fc1's weight, in half precision and cast to fp32. With sequence parallelism the
    gradient of fc2's output is whole, and there is Megatron's buffer in which stretches are gathered.
    """
    shape, tokens, e = step.shape, stack.tokens.count(layout.rows), step.element
    stream = (4 + (e if e == 2 else 0)) * shape.hidden * tokens // layout.sequence
    gathered = 2 * e * shape.hidden * tokens if layout.sequence > 1 else 0
    weight = (6 if step.half else 4) * shape.hidden * shape.ffn // layout.tensor
    return stream + gathered + e * shape.ffn * tokens // layout.tensor + weight
