# SPDX-License-Identifier: Apache-2.0
"""Bytes that the forward pass of a micro-batch leaves for the backward pass, on one process.

Every formula counts what autograd keeps in our own modules (megatron/spec.py, attention.py, models/encoder.py), tensor
by tensor; tests/planning hold them against what is really alive. What torch.compile would save is not here.

Letters stand for sizes: D hidden, P all heads together, F ffn, d one head. `e` is the bytes of an element between
matrix products; the residual stream is always fp32.
"""

from dataclasses import dataclass
from typing import Literal

from bionemo.planning.layout import Layout, Stage
from bionemo.planning.lengths import Tokens
from bionemo.planning.sizes import Shape

Kernel = Literal["flash", "sequences", "probabilities", "tiles"]
_WINDOW = 32  # tokens beyond a pack that cpu_attention.py's copies have


@dataclass(frozen=True)
class Step:
    """What memory and FLOPs of a step depend on beside the layout.

    Attributes:
        shape: of the model.
        tokens: of a row.
        half: whether matrix products are in bf16 or fp16.
        deterministic: whether torch is told to be.
        tiles: bytes of the numbers in which cpu_attention.py computes; 0: on a GPU.
    """

    shape: Shape
    tokens: Tokens
    half: bool
    deterministic: bool = False
    tiles: int = 0


def activations(step: Step, layout: Layout, stage: Stage) -> tuple[int, int]:
    """Bytes that a micro-batch keeps on a stage, and what recomputation adds to them at its fullest moment.

    Recomputed attention comes back when the MLP behind it is done with; the input of recomputed layers is there.
    """
    shape, tokens, e = step.shape, layout.rows * step.tokens.row, element(step)
    layers, plain = layout.layers(shape.layers), layout.plain_layers(shape.layers)
    stream = 4 * shape.hidden * tokens // layout.sequence
    kept = embedding(step, layout) if stage.first else 0
    kept += head(step, layout) if stage.last else stream
    if shape.rotary:
        kept += 2 * e * shape.head_size * tokens  # cosines and sines, which all layers share
    if layout.recompute == "selective":
        inputs = 3 * e * shape.attention * tokens // layout.tensor
        back = attention_core(step, layout) - inputs
        return kept + layers * (layer(step, layout) - back), max(0, back - mlp(step, layout))
    kept += plain * layer(step, layout) + layout.kept_inputs(shape.layers) * stream
    again = layout.recomputed_layers(shape.layers)
    return kept, again * layer(step, layout) - (stream if again else 0)


def layer(step: Step, layout: Layout) -> int:
    """What one layer keeps of a micro-batch: in front of attention, attention, the input of proj (P), the MLP."""
    tokens = layout.rows * step.tokens.row
    output = element(step) * step.shape.attention * tokens // layout.tensor
    return sublayer(step, layout) + attention_core(step, layout) + output + mlp(step, layout)


def sublayer(step: Step, layout: Layout) -> int:
    """What stands around attention and around the MLP, divided over the sequence.

    The input of a norm (4D) with mean and deviation, and that of qkv or fc1 (eD); dropout keeps nothing.
    """
    each = (4 + element(step)) * step.shape.hidden + 8
    return each * layout.rows * step.tokens.row // layout.sequence


def mlp(step: Step, layout: Layout) -> int:
    """What the MLP keeps: its surroundings and the inputs of GELU and fc2 (2F), divided over the tensor ranks."""
    inputs = 2 * element(step) * step.shape.ffn
    return sublayer(step, layout) + inputs * layout.rows * step.tokens.row // layout.tensor


def attention_core(step: Step, layout: Layout) -> int:
    """What the core of attention keeps of a micro-batch in one layer, its output aside.

    On a GPU the output of qkv stays alive (3P), since values are a view of it; rotation makes new queries and keys
    (2P).

    * flash: a log-sum per token and head (4 bytes).
    * sequences: PyTorch's attention, one sequence at a time: the log-sum, and outputs before they are joined (P).
    * probabilities: those of every pair of tokens in fp32 (4), their mask (1) and what remains of them (2 or 4).
    * tiles, on a CPU: contiguous copies of queries, keys and values (3P) instead of views, and the log-sum.

    Where autocast casts fp32 queries, keys and values, the casts are kept in the place of all that led to them.
    """
    shape, tokens, e = step.shape, layout.rows * step.tokens.row, element(step)
    inside = 2 if step.half else 4
    p, heads = shape.attention // layout.tensor, shape.heads // layout.tensor
    which = kernel(step)
    if which == "tiles":
        return (3 * step.tiles * p + 4 * heads) * (tokens + _WINDOW)
    each: float = 3 * inside * p + (2 * e * p if shape.rotary and e == inside else 0)
    if which == "probabilities":
        each += (4 + 1 + inside) * heads * step.tokens.attended * step.tokens.filled
    else:
        each += 4 * heads + (inside * p if which == "sequences" else 0)
    return round(each * tokens)


def kernel(step: Step) -> Kernel:
    """Which attention a run computes with: see `attend` in megatron/attention.py."""
    if step.tiles:
        return "tiles"
    if step.shape.attention_dropout:
        return "probabilities"
    return "flash" if element(step) == 2 and not step.deterministic else "sequences"


def element(step: Step) -> int:
    """Bytes of an element between matrix products."""
    return 2 if step.half else 4


def embedding(step: Step, layout: Layout) -> int:
    """What the embedding keeps: which tokens are visible, or dropout's keys."""
    shape, tokens = step.shape, layout.rows * step.tokens.row
    return tokens * (8 if shape.hidden_dropout else 4)


def head(step: Step, layout: Layout) -> int:
    """What the last norm and the head keep: the head sees asked tokens alone, and is in half precision throughout.

    Inputs of the last norm; inputs of dense, GELU, norm (fp32 on a GPU) and projection; log-probabilities in fp32.
    """
    shape, e = step.shape, 2 if step.half else 4
    tokens, asked = layout.rows * step.tokens.row, layout.rows * step.tokens.asked_in_row
    norm = tokens * (4 * shape.hidden + 8) / layout.sequence
    inputs = (3 * e + (e if step.tiles else 4)) * shape.hidden
    return round(norm + asked * (inputs + 8 + 4 * logit_columns(shape, layout)))


def logit_columns(shape: Shape, layout: Layout) -> int:
    """Columns of the logits on each tensor rank: an undivided head leaves out the rows that only pad the table."""
    return shape.words if layout.tensor == 1 else shape.rows // layout.tensor
