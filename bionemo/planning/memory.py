# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one GPU during a training step, in bytes.

The formulas count the tensors that autograd saves in bionemo/megatron and bionemo/models, and the temporary tensors
at the moments that can be the peak. tests/planning compares them with real steps. torch.compile, the CUDA context,
NCCL's buffers and fragmentation are not included.

Symbols: D hidden size, P size of all heads together, F hidden size of the MLP, V vocabulary entries of a rank, e bytes
of an element between matrix products. The residual stream is fp32.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from bionemo.planning.layouts import Layout, Stage
from bionemo.planning.step import Attention, BlockType, Shape, Stack, Step, layer_matrix_parameters, stage_parameters

_WINDOW = 32  # tokens that the copies in megatron/cpu_attention.py have beyond the packed batch


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in bytes.

    Attributes:
        weights: fp32 weights.
        gradients: Megatron's fp32 gradient buffer.
        moments: AdamW's two fp32 moments, or this replica's share.
        copies: half-precision copies of weights made by autocast.
        activations: tensors saved for the backward pass, of all micro-batches in flight.
        working: temporary tensors.
    """

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    copies: int = 0
    activations: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(astuple(self))


def fullest_stage(step: Step, layout: Layout) -> tuple[Stage, Memory]:
    """Return the pipeline stage with the highest peak memory, and its memory."""
    return max(((stage, stage_memory(step, layout, stage)) for stage in layout.stages), key=lambda each: each[1].total)


def stage_memory(step: Step, layout: Layout, stage: Stage) -> Memory:
    """Return the peak memory of a stage, for the largest micro-batch of a run."""
    peak = max(candidate_peaks(step.with_largest_micro_batch(layout.rows), layout, stage), key=sum)
    return replace(state_memory(step.shape, layout, stage), **peak._asdict())


def state_memory(shape: Shape, layout: Layout, stage: Stage) -> Memory:
    """Return fp32 weights, gradients and two moments: 4 + 4 + 8 bytes per parameter.

    ZeRO-1 divides the moments over the replicas (Rajbhandari et al. 2020).
    """
    parameters = sum(stage_parameters(shape, layout, stage).values())
    shards = layout.data if layout.sharded else 1
    return Memory(weights=4 * parameters, gradients=4 * parameters, moments=8 * parameters // shards)


# Saved activations ---------------------------------------------------------------------------------------------------


def saved_bytes(step: Step, layout: Layout, stage: Stage, stack: Stack) -> int:
    """Return the bytes saved per micro-batch by a stack on a stage, except those of `saved_after_layers`."""
    shape, layers = step.shape, layout.layers(step.shape.layers)
    saved = _embedding_bytes(step, layout, stack) if stage.first else 0
    if shape.rotary:
        saved += 2 * step.element * shape.head_size * stack.tokens.count(layout.rows)  # cosines and sines
    if stack.source and (not step.half or layout.recompute in ("uniform", "block")):
        saved += _residual_bytes(step, layout, stack.source.count(layout.rows))  # else each layer saves a cast copy
    if layout.recompute == "selective":
        recomputed = sum(_core_intermediates(step, layout, each) for each in stack.attentions(layout.rows))
        return saved + layers * (layer_bytes(step, layout, stack) - recomputed)
    inputs = layout.saved_inputs(shape.layers) * _residual_bytes(step, layout, stack.tokens.count(layout.rows))
    return saved + layout.plain_layers(shape.layers) * layer_bytes(step, layout, stack) + inputs


def saved_after_layers(step: Step, layout: Layout, stage: Stage, stack: Stack) -> int:
    """Return the bytes saved after the last layer: final norm and head, or the output for the next stage."""
    tokens = stack.tokens.count(layout.rows)
    if not stage.last:
        return _residual_bytes(step, layout, tokens)
    return tokens * (4 * step.shape.hidden + 8) // layout.sequence + head_bytes(step, layout, stack)


def _recomputed_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Return the bytes that recomputation in the last layers of a stack adds at its peak.

    Attention is recomputed after the tensors of the following sublayers are freed. The input of recomputed layers is
    saved already.
    """
    if layout.recompute == "selective":
        peak, freed = 0, _mlp_bytes(step, layout, stack)
        for attention in reversed(stack.attentions(layout.rows)):
            recomputed = _core_intermediates(step, layout, attention)
            peak = max(peak, recomputed - freed)
            freed += _attention_bytes(step, layout, stack, attention) - recomputed
        return peak
    layers = layout.recomputed_layers(step.shape.layers)
    saved = _residual_bytes(step, layout, stack.tokens.count(layout.rows)) if layers else 0
    return layers * layer_bytes(step, layout, stack) - saved


def layer_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Return the bytes saved per micro-batch by one layer."""
    attentions = sum(_attention_bytes(step, layout, stack, each) for each in stack.attentions(layout.rows))
    return attentions + _mlp_bytes(step, layout, stack)


def _attention_bytes(step: Step, layout: Layout, stack: Stack, attention: Attention) -> int:
    """Return the bytes of attention and its norm: core attention and the input of the projection (P).

    With autocast, cross-attention also saves the cast encoder output (2D).
    """
    output = step.element * step.shape.attention * attention.queries // layout.tensor
    cast = 2 * step.shape.hidden * attention.keys // layout.sequence if attention.cross and step.half else 0
    return _norm_bytes(step, layout, stack) + cast + _core_bytes(step, layout, attention) + output


def _mlp_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Return the bytes of an MLP and its norm: the inputs of GELU and fc2 (2F)."""
    inputs = 2 * step.element * step.shape.ffn
    return _norm_bytes(step, layout, stack) + inputs * stack.tokens.count(layout.rows) // layout.tensor


def _norm_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Return the bytes of a layer norm: input (4D), mean and deviation, and the input of the first product (eD)."""
    per_token = (4 + step.element) * step.shape.hidden + 8
    return per_token * stack.tokens.count(layout.rows) // layout.sequence


def _core_bytes(step: Step, layout: Layout, attention: Attention) -> int:
    """Return the bytes of core attention without its output.

    On GPUs it saves the output of the QKV projection, of which the values are a view, rotated queries and keys, and:

    * flash: the log-sum-exp of each query and head (4 bytes);
    * sequences (PyTorch's attention per sequence): the same, and the outputs before concatenation (P);
    * probabilities: for each pair of tokens and head, fp32 probabilities (4), dropout mask (1) and product (e), and
      for each pair a causal mask (1).

    On CPUs (tiles) it saves contiguous copies of queries, keys and values, and the log-sum-exp.
    """
    queries, keys = attention.queries, attention.keys
    size, heads = step.shape.attention // layout.tensor, step.shape.heads // layout.tensor
    if step.kernel == "tiles":
        return step.tiles * size * (queries + 2 * keys + 3 * _WINDOW) + 4 * heads * (queries + _WINDOW)
    saved: float = _qkv_bytes(step, layout, attention) + step.shape.rotary * step.element * size * (queries + keys)
    if step.kernel == "probabilities":
        return round(saved + ((4 + 1 + step.element) * heads + attention.causal) * attention.pairs)
    concatenated = step.element * size if step.kernel == "sequences" else 0
    return round(saved + (4 * heads + concatenated) * queries)


def _core_intermediates(step: Step, layout: Layout, attention: Attention) -> int:
    """Return the bytes of core attention except queries, keys and values; not saved if attention is recomputed."""
    return _core_bytes(step, layout, attention) - _qkv_bytes(step, layout, attention)


def _qkv_bytes(step: Step, layout: Layout, attention: Attention) -> int:
    return step.element * step.shape.attention * (attention.queries + 2 * attention.keys) // layout.tensor


def _residual_bytes(step: Step, layout: Layout, tokens: int) -> int:
    return 4 * step.shape.hidden * tokens // layout.sequence


def _embedding_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Dropout keys, visible tokens, indices into a position table with an offset, and the input of a layer norm."""
    shape = step.shape
    dropout = shape.hidden_dropout or shape.attention_dropout
    norm = (4 * shape.hidden + 8) * shape.embedding_norm
    per_token = 8 * dropout + 4 * shape.token_dropout + 4 * (shape.position_offset > 0) + norm
    return per_token * stack.tokens.count(layout.rows)


def head_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Return the bytes saved per micro-batch by head and loss at the target positions.

    Inputs of dense layer, GELU and layer norm (fp32 on GPUs), input of the projection, and fp32 log-probabilities.
    With a sharded vocabulary also which targets belong to other ranks.
    """
    shape, element = step.shape, step.element
    dense = (2 * element + (element if step.tiles else 4)) * shape.hidden + 8 if shape.dense else 0
    indices = 9 if layout.tensor > 1 else 0
    per_target = dense + element * shape.hidden + 4 * _logits_per_target(shape, layout) + indices
    return round(stack.tokens.targets(layout.rows) * per_target)


def _logits_per_target(shape: Shape, layout: Layout) -> int:
    """Return the number of logits of a rank; only a head that is not sharded omits the padding of the vocabulary."""
    return shape.vocabulary_size if layout.tensor == 1 else shape.table_rows // layout.tensor


# Candidates for the peak ---------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """Bytes in use at one moment; see Memory."""

    copies: int
    activations: int
    working: int = 0


def candidate_peaks(step: Step, layout: Layout, stage: Stage) -> Iterator[Peak]:
    """Yield the memory at each moment that can be the peak of a stage.

    In order: the end of the forward pass, when autocast still has copies of all weights; the loss and the gradient of
    the output matrix; for each stack, the MLP of its last layer in the backward pass, and attention if it computes
    probabilities; the embedding in the backward pass.
    """
    stacks, in_flight, last = step.stacks, layout.in_flight(stage), len(step.stacks) - 1
    layers, plain = layout.layers(step.shape.layers), layout.plain_layers(step.shape.layers)
    saved = [saved_bytes(step, layout, stage, stack) for stack in stacks]
    after = [saved_after_layers(step, layout, stage, stack) for stack in stacks]
    copies = [layer_copies(step, layout, stack.block) for stack in stacks]
    others = (in_flight - 1) * (sum(saved) + sum(after)) + _sent_gradient(step, layout, stage)
    other_copies = (in_flight - 1) * plain * sum(copies)
    sent = 0 if stage.last else after[last]

    graph_copies = other_copies + plain * sum(copies)
    end = Peak(graph_copies + head_copies(step, layout, stage), others + sum(saved) + sum(after))
    yield end._replace(copies=end.copies + (layers - plain) * sum(copies))
    if stage.last:
        yield end._replace(working=_loss_bytes(step, layout, stacks[last]))
        head = head_bytes(step, layout, stacks[last])
        yield Peak(graph_copies, end.activations - head, _output_matrix_bytes(step, layout, stacks[last]))
    for number, stack in enumerate(stacks):
        present = Peak(
            other_copies
            + plain * sum(copies[: number + 1])
            + layout.recomputed_layers(step.shape.layers) * copies[number],
            others + sum(saved[: number + 1]) + sum(after[:number]) + _recomputed_bytes(step, layout, stack) + sent,
        )
        waiting = _waiting_gradients(step, layout, stage, number)
        yield present._replace(working=waiting + _mlp_backward_bytes(step, layout, stack))
        if step.kernel == "probabilities":
            yield present._replace(working=waiting + _probability_bytes(step, layout, stack))
    if stage.first:
        yield Peak(other_copies, others + sent, _embedding_backward_bytes(step, layout, stage))


def layer_copies(step: Step, layout: Layout, block: BlockType) -> int:
    """Return the bytes of a layer's weights that autocast copies to half precision while the graph exists.

    Autocast's cache ends with the forward pass, so each micro-batch in flight has copies of its own. Megatron's
    sharded layers keep no copies.
    """
    return 2 * layer_matrix_parameters(step.shape, block) if step.half and layout.tensor == 1 else 0


def head_copies(step: Step, layout: Layout, stage: Stage) -> int:
    """Return the same for the head, which never uses Megatron's layers."""
    shape = step.shape
    weights = shape.hidden * (shape.dense * shape.hidden + _logits_per_target(shape, layout))
    return 2 * weights if step.half and stage.last else 0


def _sent_gradient(step: Step, layout: Layout, stage: Stage) -> int:
    """Gradient of the previous micro-batch, which was sent to the previous stage and is not freed yet."""
    if stage.first or layout.micro_batches == 1:
        return 0
    return _residual_bytes(step, layout, step.stacks[0].tokens.count(layout.rows))


def _loss_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Temporary tensors of the loss: in the backward pass, two fp32 gradients of the logits (8V).

    With a sharded vocabulary most operations are in place. The forward pass can need more: logits with and without
    masked padding (2eV, while none are saved), and hidden states of all tokens and of the target positions (4D).
    """
    shape, tokens, targets = step.shape, stack.tokens.count(layout.rows), stack.tokens.targets(layout.rows)
    logits = targets * _logits_per_target(shape, layout)
    if layout.tensor == 1:
        return round(8 * logits)
    hidden_states = tokens + step.half * targets + (tokens / layout.sequence if layout.sequence > 1 else 0)
    return round(max((2 * step.element - 4) * logits + 4 * shape.hidden * hidden_states, 2 * logits))


def _output_matrix_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Gradients of the head's input (4D) and of its matrix (DV), in half precision and fp32, with padding."""
    element = 8 if layout.tensor == 1 else 6 if step.half else 4
    matrix = element * _logits_per_target(step.shape, layout)
    return round(step.shape.hidden * (4 * stack.tokens.targets(layout.rows) + matrix))


def _waiting_gradients(step: Step, layout: Layout, stage: Stage, number: int) -> int:
    """Gradients of embeddings to which others will be added: of a tied head, and of a decoder's embeddings."""
    later = number < len(step.stacks) - 1
    tied = step.shape.tied and stage.first and stage.last
    rows = (step.shape.table_rows // layout.tensor if tied or later else 0) + (step.shape.positions if later else 0)
    return 4 * step.shape.hidden * rows


def _embedding_backward_bytes(step: Step, layout: Layout, stage: Stage) -> int:
    """Gradients of the word embedding: a new one, a waiting one and their sum; and those of the embedding's output."""
    tables = 3 if _waiting_gradients(step, layout, stage, 0) else 1
    output = _residual_bytes(step, layout, step.stacks[0].tokens.count(layout.rows)) * (1 if stage.last else 2)
    return 4 * tables * step.shape.hidden * step.shape.table_rows // layout.tensor + output


def _mlp_backward_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Gradients in the backward pass of an MLP, the peak of a layer.

    Of the residual stream (4D), cast for fc2 or after dropout (eD), of the output of GELU (eF), and of the weight of
    fc1 in half precision and fp32. With sequence parallelism also the gathered gradient of fc2's output, and
    Megatron's buffer for gathered inputs.
    """
    shape, tokens, element = step.shape, stack.tokens.count(layout.rows), step.element
    residual = (4 + (element if step.half or shape.hidden_dropout else 0)) * shape.hidden * tokens // layout.sequence
    gathered = 2 * element * shape.hidden * tokens if layout.sequence > 1 else 0
    weight = (6 if step.half else 4) * shape.hidden * shape.ffn // layout.tensor
    return residual + gathered + element * shape.ffn * tokens // layout.tensor + weight


def _probability_bytes(step: Step, layout: Layout, stack: Stack) -> int:
    """Temporary tensors when the probabilities of the longest sequence are computed, less what is saved later.

    Scores (4) and unscaled probabilities (4); with autocast also scaled probabilities (4) before the cast (2), less
    what is saved, and those of the previous sequence (4).
    """
    last = stack.attentions(layout.rows)[-1]
    later = _mlp_bytes(step, layout, stack) + step.element * step.shape.attention * last.queries // layout.tensor
    previous = min(last.max_pairs, last.pairs - last.max_pairs) if step.half else 0
    heads = step.shape.heads // layout.tensor
    return round(heads * ((10 if step.half else 8) * last.max_pairs + 4 * previous)) - later
