# SPDX-License-Identifier: Apache-2.0
"""What comes and goes in a step, in bytes, at the moments when there may be most of it.

Letters stand for sizes as in activations.py: D hidden, F ffn, V words of a rank.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bionemo.planning.activations import activations, again, asked, end, head, logit_columns, mlp, stream
from bionemo.planning.layout import Layout, Stage
from bionemo.planning.sizes import Kind, layer_matrices
from bionemo.planning.step import Stack, Step


class Moment(NamedTuple):
    """Bytes by kind: see Memory."""

    copies: int
    activations: int
    working: int = 0


def moments(step: Step, layout: Layout, stage: Stage) -> Iterator[Moment]:
    """All that may be the fullest of a process on a stage.

    In order: the end of a forward pass, when autocast still has its copy of every weight; the loss, and the gradient
    of the head's table; the last layers of each stack, when what stands behind them is gone and what is recomputed is
    there, in the MLP and where attention makes probabilities; the first embedding.
    """
    stacks, flight, last = step.stacks, layout.in_flight(stage), len(step.stacks) - 1
    layers, plain = layout.layers(step.shape.layers), layout.plain_layers(step.shape.layers)
    kept = [activations(step, layout, stage, stack) for stack in stacks]
    ends = [end(step, layout, stage, stack) for stack in stacks]
    copied = [copies(step, layout, stack.kind) for stack in stacks]
    others = (flight - 1) * (sum(kept) + sum(ends)) + sent_back(step, layout, stage)
    others_copied = (flight - 1) * plain * sum(copied)
    sent_on = 0 if stage.last else ends[last]

    in_graph = others_copied + plain * sum(copied)
    whole = Moment(in_graph + head_copies(step, layout, stage), others + sum(kept) + sum(ends))
    yield whole._replace(copies=whole.copies + (layers - plain) * sum(copied))
    if stage.last:
        yield whole._replace(working=loss(step, layout, stacks[last]))
        behind = head(step, layout, stacks[last])
        yield Moment(in_graph, whole.activations - behind, table(step, layout, stacks[last]))
    for number, stack in enumerate(stacks):
        recomputed = layout.recomputed_layers(step.shape.layers) * copied[number]
        gone = Moment(
            others_copied + plain * sum(copied[: number + 1]) + recomputed,
            others + sum(kept[: number + 1]) + sum(ends[:number]) + again(step, layout, stack) + sent_on,
            waiting(step, layout, stage, number),
        )
        yield gone._replace(working=gone.working + backward(step, layout, stack))
        if step.kernel == "probabilities":
            yield gone._replace(working=gone.working + attention(step, layout, stack))
    if stage.first:
        yield Moment(others_copied, others + sent_on, embedding(step, layout, stage))


def copies(step: Step, layout: Layout, kind: Kind) -> int:
    """Weights of a layer that autocast copies into half precision while a micro-batch's graph lives.

    Its cache ends with a forward pass, so that every micro-batch in flight has copies of its own. Megatron's divided
    layers keep none: they save the fp32 weight and cast it on each use.
    """
    return 2 * layer_matrices(step.shape, kind) if step.half and layout.tensor == 1 else 0


def head_copies(step: Step, layout: Layout, stage: Stage) -> int:
    """The same of the head, which is never Megatron's."""
    shape = step.shape
    weights = shape.hidden * (shape.dense * shape.hidden + logit_columns(shape, layout))
    return 2 * weights if step.half and stage.last else 0


def sent_back(step: Step, layout: Layout, stage: Stage) -> int:
    """The gradient of the micro-batch before, which a stage has sent to the one before it, and still holds."""
    [first, *_] = step.stacks
    return 0 if stage.first or layout.micro_batches == 1 else stream(step, layout, first.tokens.count(layout.rows))


def loss(step: Step, layout: Layout, stack: Stack) -> int:
    """What there is beside that which is kept when the loss is computed, forward or backward.

    Backward, two gradients of the logits in fp32 (8V). Where tensor ranks share the words nearly all happens in one
    place: there may be more forward, in logits with and without those of padding (2eV, and nothing kept yet) and in
    the vectors that they are made from, all and those asked for (4D).
    """
    shape, tokens, count = step.shape, stack.tokens.count(layout.rows), asked(layout, stack)
    logits = count * logit_columns(shape, layout)
    if layout.tensor == 1:
        return round(8 * logits)
    vectors = tokens + step.half * count + (tokens / layout.sequence if layout.sequence > 1 else 0)
    return round(max((2 * step.element - 4) * logits + 4 * shape.hidden * vectors, 2 * logits))


def table(step: Step, layout: Layout, stack: Stack) -> int:
    """Gradients of the head's input (4D) and of its table (DV): that in half precision and fp32, then with padding."""
    each = 8 if layout.tensor == 1 else 6 if step.half else 4
    return round(step.shape.hidden * (4 * asked(layout, stack) + each * logit_columns(step.shape, layout)))


def waiting(step: Step, layout: Layout, stage: Stage, number: int) -> int:
    """Gradients of embeddings while others are to be added: to a tied head's, and to a decoder's its encoder's."""
    later = number < len(step.stacks) - 1
    tied = step.shape.tied and stage.first and stage.last
    rows = (step.shape.rows // layout.tensor if tied or later else 0) + (step.shape.positions if later else 0)
    return 4 * step.shape.hidden * rows


def embedding(step: Step, layout: Layout, stage: Stage) -> int:
    """Gradients while the first embedding is computed backward: its own and, if one waits, that one and their sum.

    Beside them that of its output, on a stage of several also as it was received.
    """
    [first, *_] = step.stacks
    tables = 3 if waiting(step, layout, stage, 0) else 1
    vectors = stream(step, layout, first.tokens.count(layout.rows)) * (1 if stage.last else 2)
    return 4 * tables * step.shape.hidden * step.shape.rows // layout.tensor + vectors


def backward(step: Step, layout: Layout, stack: Stack) -> int:
    """Gradients while an MLP is computed backward, the fullest moment of a layer.

    Of the residual stream (4D), cast for fc2 or thinned out by dropout (eD), and of GELU's output (eF; that of its
    input takes the place of what fc2 kept); and of fc1's weight, in half precision and cast to fp32. With sequence
    parallelism the gradient of fc2's output is whole, and there is Megatron's buffer in which stretches are gathered.
    """
    shape, tokens, e = step.shape, stack.tokens.count(layout.rows), step.element
    gradients = (4 + (e if step.half or shape.hidden_dropout else 0)) * shape.hidden * tokens // layout.sequence
    gathered = 2 * e * shape.hidden * tokens if layout.sequence > 1 else 0
    weight = (6 if step.half else 4) * shape.hidden * shape.ffn // layout.tensor
    return gradients + gathered + e * shape.ffn * tokens // layout.tensor + weight


def attention(step: Step, layout: Layout, stack: Stack) -> int:
    """What the longest sequence's probabilities need while they are made, less what the layer does not keep yet.

    Scores (4), and probabilities before they are scaled (4); in half precision those afterwards as well (4), before
    they are cast (2), and the same of the sequence before (4).
    """
    last = stack.attentions(layout.rows)[-1]
    later = mlp(step, layout, stack) + step.element * step.shape.attention * last.queries // layout.tensor
    before = min(last.longest, last.pairs - last.longest) if step.half else 0
    return round(step.shape.heads // layout.tensor * ((10 if step.half else 8) * last.longest + 4 * before)) - later
