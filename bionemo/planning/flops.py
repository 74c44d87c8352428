# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a step over all GPUs: 2 for each multiplication of a matrix product, nothing else counts."""

from dataclasses import dataclass

from bionemo.planning.activations import asked
from bionemo.planning.layout import Layout
from bionemo.planning.step import Step


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass; the backward pass costs twice that, a gradient for each factor.

    Attributes:
        matrices: weights of the layers.
        attention: products of queries with keys and of probabilities with values.
        head: dense and word table, at the asked positions alone.
    """

    matrices: float
    attention: float
    head: float

    @property
    def forward(self) -> float:
        """All of a forward pass."""
        return self.matrices + self.attention + self.head

    @property
    def useful(self) -> float:
        """Of an update: forward and backward (Narayanan et al. 2021 leave recomputation out, and so does this)."""
        return 3 * self.forward


def of_micro_batch(step: Step, layout: Layout, whole: bool = False) -> Flops:
    """2 a weight and token; 4P for each token that a token attends to; 2 a weight of the head and asked token.

    Kaplan et al. 2020 count 6 a parameter and token for forward and backward; attention adds 12 P a layer times the
    length attended. Filler is computed like any other token, but attends to nothing. What a causal mask hides is not
    computed, unless the `whole` is.
    """
    shape, matrices, attention, answers = step.shape, 0.0, 0.0, 0.0
    for stack in step.stacks:
        matrices += 2 * 2 * shape.hidden * shape.ffn * stack.tokens.count(layout.rows)
        for each in stack.attentions(layout.rows):
            matrices += 2 * 2 * shape.hidden * shape.attention * (each.queries + each.keys)
            attention += 4 * shape.attention * (each.pairs if whole else each.seen)
        answers += asked(layout, stack)
    head = 2 * shape.hidden * (shape.dense * shape.hidden + shape.words)
    return Flops(shape.layers * matrices, shape.layers * attention, head * answers)


def of_update(step: Step, layout: Layout) -> float:
    """FLOPs of an update that training calls for."""
    return of_micro_batch(step, layout).useful * layout.micro_batches * layout.data


def on_hardware(step: Step, layout: Layout) -> float:
    """FLOPs of an update as they are computed, with what causal masks hide, where the kernel does not skip it.

    Recomputation adds another forward pass of some layers, or of attention. It stops at the last thing that the
    backward pass needs: unless dropout follows, before a stretch's last product.
    """
    shape = step.shape
    once = of_micro_batch(step, layout, whole=step.kernel in ("probabilities", "tiles"))
    if layout.recompute == "selective":
        again = once.attention
    else:
        share = 1 - layout.plain_layers(shape.layers) / layout.layers(shape.layers)
        tokens = sum(stack.tokens.count(layout.rows) for stack in step.stacks)
        last = 0 if shape.hidden_dropout else 2 * shape.hidden * shape.ffn * tokens
        again = share * (once.matrices + once.attention) - layout.pipeline * layout.kept_inputs(shape.layers) * last
    return (once.useful + again) * layout.micro_batches * layout.data
