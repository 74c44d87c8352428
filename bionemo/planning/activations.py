# SPDX-License-Identifier: Apache-2.0
"""Bytes that the forward pass of a micro-batch leaves for the backward pass, on one process.

Every formula counts what autograd keeps in our own modules (megatron/spec.py, attention.py, models/), tensor by
tensor; tests/planning hold them against what is really alive. What torch.compile would save is not here.

Letters stand for sizes: D hidden, P all heads together, F ffn, d one head. `e` is the bytes of an element between
matrix products; the residual stream is always fp32.
"""

from bionemo.planning.layout import Layout, Stage
from bionemo.planning.sizes import Shape
from bionemo.planning.step import Attention, Stack, Step

_WINDOW = 32  # tokens beyond a pack that cpu_attention.py's copies have


def activations(step: Step, layout: Layout, stage: Stage, stack: Stack) -> int:
    """Bytes that a micro-batch keeps of a stack on a stage, less what stands behind its last layer: see `end`."""
    shape, layers = step.shape, layout.layers(step.shape.layers)
    kept = embedding(step, layout, stack) if stage.first else 0
    if shape.rotary:
        kept += 2 * step.element * shape.head_size * stack.tokens.count(layout.rows)  # cosines and sines
    if stack.memory and (not step.half or layout.recompute in ("uniform", "block")):
        kept += stream(step, layout, stack.memory.count(layout.rows))  # unless each layer has a cast of it
    if layout.recompute == "selective":
        back = sum(recomputed(step, layout, each) for each in stack.attentions(layout.rows))
        return kept + layers * (layer(step, layout, stack) - back)
    inputs = layout.kept_inputs(shape.layers) * stream(step, layout, stack.tokens.count(layout.rows))
    return kept + layout.plain_layers(shape.layers) * layer(step, layout, stack) + inputs


def end(step: Step, layout: Layout, stage: Stage, stack: Stack) -> int:
    """What stands behind the last layer of a stack on a stage: its final norm, if it says something the head too."""
    tokens = stack.tokens.count(layout.rows)
    if not stage.last:
        return stream(step, layout, tokens)  # what was sent on
    norm = tokens * (4 * step.shape.hidden + 8) // layout.sequence
    return norm + head(step, layout, stack)


def again(step: Step, layout: Layout, stack: Stack) -> int:
    """Bytes that recomputation in a stack adds at its fullest moment.

    Recomputed attention comes back when what is behind it in the layer is done with; the input of recomputed layers is
    there.
    """
    if layout.recompute == "selective":
        most, behind = 0, mlp(step, layout, stack)
        for attention in reversed(stack.attentions(layout.rows)):
            back = recomputed(step, layout, attention)
            most = max(most, back - behind)
            behind += sublayer(step, layout, stack, attention) - back
        return most
    layers = layout.recomputed_layers(step.shape.layers)
    kept = stream(step, layout, stack.tokens.count(layout.rows)) if layers else 0
    return layers * layer(step, layout, stack) - kept


def layer(step: Step, layout: Layout, stack: Stack) -> int:
    """What one layer keeps of a micro-batch: each attention and the MLP, with what stands around them."""
    attentions = sum(sublayer(step, layout, stack, each) for each in stack.attentions(layout.rows))
    return attentions + mlp(step, layout, stack)


def sublayer(step: Step, layout: Layout, stack: Stack, attention: Attention) -> int:
    """What an attention keeps: its surroundings, its core and the input of proj (P).

    Where the keys are the encoder's, the residual stream is cast for the product that gives them (2D).
    """
    output = step.element * step.shape.attention * attention.queries // layout.tensor
    cast = 2 * step.shape.hidden * attention.keys // layout.sequence if attention.cross and step.half else 0
    return around(step, layout, stack) + cast + core(step, layout, attention) + output


def mlp(step: Step, layout: Layout, stack: Stack) -> int:
    """What the MLP keeps: its surroundings and the inputs of GELU and fc2 (2F), divided over the tensor ranks."""
    inside = 2 * step.element * step.shape.ffn
    return around(step, layout, stack) + inside * stack.tokens.count(layout.rows) // layout.tensor


def around(step: Step, layout: Layout, stack: Stack) -> int:
    """What stands around an attention or an MLP, divided over the sequence.

    The input of a norm (4D) with mean and deviation, and that of the first product (eD); dropout keeps nothing.
    """
    each = (4 + step.element) * step.shape.hidden + 8
    return each * stack.tokens.count(layout.rows) // layout.sequence


def core(step: Step, layout: Layout, attention: Attention) -> int:
    """What the core of attention keeps of a micro-batch in one layer, its output aside.

    On a GPU the output of qkv stays alive (P a query, 2P a key), since values are a view of it; rotation makes new
    queries and keys (P each).

    * flash: a log-sum per query and head (4 bytes).
    * sequences: PyTorch's attention, one sequence at a time: the log-sum, and outputs before they are joined (P).
    * probabilities: those of every pair of tokens in fp32 (4), which are dropped (1) and what remains of them (2 or
      4); and for all heads together, which pairs look ahead (1).
    * tiles, on a CPU: contiguous copies of queries, keys and values instead of views, and the log-sum.
    """
    queries, keys = attention.queries, attention.keys
    p, heads = step.shape.attention // layout.tensor, step.shape.heads // layout.tensor
    if step.kernel == "tiles":
        return step.tiles * p * (queries + 2 * keys + 3 * _WINDOW) + 4 * heads * (queries + _WINDOW)
    kept: float = qkv(step, layout, attention) + step.shape.rotary * step.element * p * (queries + keys)
    if step.kernel == "probabilities":
        return round(kept + ((4 + 1 + step.element) * heads + attention.causal) * attention.pairs)
    joined = step.element * p if step.kernel == "sequences" else 0
    return round(kept + (4 * heads + joined) * queries)


def recomputed(step: Step, layout: Layout, attention: Attention) -> int:
    """What of the core is not kept where it is computed again from queries, keys and values."""
    return core(step, layout, attention) - qkv(step, layout, attention)


def qkv(step: Step, layout: Layout, attention: Attention) -> int:
    """Queries, keys and values: P each."""
    return step.element * step.shape.attention * (attention.queries + 2 * attention.keys) // layout.tensor


def stream(step: Step, layout: Layout, tokens: int) -> int:
    """The residual stream (4D), divided over the sequence."""
    return 4 * step.shape.hidden * tokens // layout.sequence


def embedding(step: Step, layout: Layout, stack: Stack) -> int:
    """What the embedding keeps.

    Dropout's keys; which tokens are visible; where in its table a position is, unless that is its number; the input of
    its norm (4D) with mean and deviation.
    """
    shape = step.shape
    drops = shape.hidden_dropout or shape.attention_dropout
    each = 8 * drops + 4 * shape.token_dropout + 4 * (shape.before > 0) + (4 * shape.hidden + 8) * shape.normed
    return each * stack.tokens.count(layout.rows)


def head(step: Step, layout: Layout, stack: Stack) -> int:
    """What the head keeps of the tokens that are asked for; it is in half precision throughout.

    Inputs of dense, GELU, norm (fp32 on a GPU); the input of the projection; log-probabilities in fp32. Where tensor
    ranks share the words, which of the answers are another's, and where the others are.
    """
    shape, e = step.shape, step.element
    inputs = (2 * e + (e if step.tiles else 4)) * shape.hidden + 8 if shape.dense else 0
    answers = 9 if layout.tensor > 1 else 0
    kept = inputs + e * shape.hidden + 4 * logit_columns(shape, layout) + answers
    return round(asked(layout, stack) * kept)


def asked(layout: Layout, stack: Stack) -> float:
    """Tokens of a micro-batch that the model is asked for."""
    return stack.tokens.held(layout.rows) * stack.tokens.asked


def logit_columns(shape: Shape, layout: Layout) -> int:
    """Columns of the logits on each tensor rank: an undivided head leaves out the rows that only pad the table."""
    return shape.words if layout.tensor == 1 else shape.rows // layout.tensor
