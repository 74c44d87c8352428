# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a step over all GPUs: 2 for each multiplication of a matrix product, nothing else counts."""

from dataclasses import dataclass

from bionemo.planning.activations import Step
from bionemo.planning.layout import Layout
from bionemo.planning.lengths import Tokens
from bionemo.planning.sizes import Shape, layer_matrices


@dataclass(frozen=True)
class Flops:
    """FLOPs of a row's forward pass; the backward pass costs twice that, a gradient for each factor.

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


def of_row(shape: Shape, tokens: Tokens) -> Flops:
    """2 a weight and token; 4P for each of the tokens that a token attends to; 2 a weight of the head and asked token.

    Kaplan et al. 2020 count 6 a parameter and token for forward and backward; attention adds 12 LP times the length
    attended. Filler is computed like any other token, but attends to nothing.
    """
    return Flops(
        matrices=2 * shape.layers * layer_matrices(shape) * tokens.row,
        attention=4 * shape.layers * shape.attention * tokens.attended * tokens.filled * tokens.row,
        head=2 * (shape.hidden**2 + shape.hidden * shape.words) * tokens.asked_in_row,
    )


def of_update(step: Step, layout: Layout) -> float:
    """FLOPs of an update that training calls for."""
    return of_row(step.shape, step.tokens).useful * layout.global_rows


def on_hardware(step: Step, layout: Layout) -> float:
    """FLOPs of an update with those that recomputation adds: another forward pass of some layers, or of attention.

    It stops at the last thing that the backward pass needs: unless dropout follows, before a stretch's last product.
    """
    shape, row = step.shape, of_row(step.shape, step.tokens)
    if layout.recompute == "selective":
        again = row.attention
    else:
        share = 1 - layout.plain_layers(shape.layers) / layout.layers(shape.layers)
        last = 0 if shape.hidden_dropout else 2 * shape.hidden * shape.ffn * step.tokens.row
        again = share * (row.matrices + row.attention) - layout.pipeline * layout.kept_inputs(shape.layers) * last
    return (row.useful + again) * layout.global_rows
