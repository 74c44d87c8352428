# SPDX-License-Identifier: Apache-2.0
"""FLOPs and estimated duration of a training step.

The constants of the duration have not been measured: use it to compare layouts. Data loading, validation,
checkpoints, communication between pipeline stages and torch.compile are not modelled.
"""

from dataclasses import dataclass, replace

from bionemo.planning.devices import Device
from bionemo.planning.layouts import Layout
from bionemo.planning.memory import head_bytes, layer_bytes, layer_copies
from bionemo.planning.step import Step, attentions_per_layer, stage_parameters

_MATMUL_EFFICIENCY = 0.6  # fraction of the peak FLOP/s that matrix products of a transformer reach
_MEMORY_EFFICIENCY = 0.8  # fraction of the memory bandwidth that everything else reaches
_PASSES = 8  # transfers of a saved byte: written, read twice, gradient written and read, casts
_LAUNCH_SECONDS = 1e-3  # time in which Python launches the kernels of a layer, forward and backward, uncompiled
_SECONDS_PER_SEQUENCE = {"sequences": 1e-4, "probabilities": 3e-4}  # added if attention loops over the sequences
_ACCUMULATE_BYTES = 18  # per parameter and micro-batch: a gradient is written, read and added to the buffer
_UPDATE_BYTES = 52  # per parameter and update: AdamW, and passes that zero, measure, scale and clip gradients


@dataclass(frozen=True)
class Flops:
    """FLOPs of the forward pass of a micro-batch; the backward pass needs twice as many. Only matrix products count.

    Attributes:
        matrices: products with the weights of the layers.
        attention: products of queries with keys and of probabilities with values.
        head: dense layer and output matrix, at the target positions.
    """

    matrices: float
    attention: float
    head: float

    @property
    def useful(self) -> float:
        """Forward and backward pass without recomputation (Narayanan et al. 2021)."""
        return 3 * (self.matrices + self.attention + self.head)


def micro_batch_flops(step: Step, layout: Layout, masked: bool = False) -> Flops:
    """Return the FLOPs of a micro-batch over all its GPUs: 2 per weight and token (Kaplan et al. 2020).

    Attention needs 4P per pair of tokens, including those hidden by a causal mask if `masked`. Padding counts in
    products with weights, but attends to nothing.
    """
    shape, matrices, attention, targets = step.shape, 0.0, 0.0, 0.0
    for stack in step.stacks:
        matrices += 2 * 2 * shape.hidden * shape.ffn * stack.tokens.count(layout.rows)
        for each in stack.attentions(layout.rows):
            matrices += 2 * 2 * shape.hidden * shape.attention * (each.queries + each.keys)
            attention += 4 * shape.attention * (each.pairs if masked else each.unmasked_pairs)
        targets += stack.tokens.targets(layout.rows)
    head = 2 * shape.hidden * (shape.dense * shape.hidden + shape.vocabulary_size)
    return Flops(shape.layers * matrices, shape.layers * attention, head * targets)


def useful_flops(step: Step, layout: Layout) -> float:
    """Return the FLOPs of an update over all GPUs, without recomputation and masked pairs."""
    return micro_batch_flops(step, layout).useful * layout.micro_batches * layout.data


def computed_flops(step: Step, layout: Layout) -> float:
    """Return the FLOPs of an update that the GPUs execute, including masked pairs that the kernel does not skip.

    Recomputation repeats the forward pass of some layers, or of attention. It stops at the last tensor that the
    backward pass needs: without dropout, before the last product of a block.
    """
    shape = step.shape
    once = micro_batch_flops(step, layout, masked=step.kernel in ("probabilities", "tiles"))
    if layout.recompute == "selective":
        repeated = once.attention
    else:
        fraction = 1 - layout.plain_layers(shape.layers) / layout.layers(shape.layers)
        tokens = sum(stack.tokens.count(layout.rows) for stack in step.stacks)
        last = 0 if shape.hidden_dropout else 2 * shape.hidden * shape.ffn * tokens
        blocks = layout.pipeline * layout.saved_inputs(shape.layers)
        repeated = fraction * (once.matrices + once.attention) - blocks * last
    return (once.useful + repeated) * layout.micro_batches * layout.data


@dataclass(frozen=True)
class Duration:
    """Seconds of an update.

    Attributes:
        compute: forward and backward passes of one replica's micro-batches.
        tensor: communication between tensor ranks.
        bubble: time in which the pipeline fills and empties.
        data: communication of gradients and weights between replicas that computation does not hide.
        update: optimizer step.
    """

    compute: float
    tensor: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.compute + self.tensor + self.bubble + self.data + self.update


def estimate_duration(step: Step, layout: Layout, device: Device, mfu: float | None = None) -> Duration:
    """Estimate the duration of an update; a known model FLOPs utilization `mfu` replaces the model of the duration."""
    peak = 1e12 * (device.half if step.half else device.single)
    if mfu is not None:
        return Duration(useful_flops(step, layout) / (peak * mfu * layout.gpus))
    layers = layout.layers(step.shape.layers)
    parameters = max(sum(stage_parameters(step.shape, layout, stage).values()) for stage in layout.stages)
    bandwidth = _MEMORY_EFFICIENCY * 1e9 * device.bandwidth

    plain, flops = replace(layout, recompute="none"), computed_flops(step, layout)
    repetition = flops / computed_flops(step, plain)
    saved, launches, weights = 0, 0.0, _ACCUMULATE_BYTES * parameters
    for stack in step.stacks:
        attentions = attentions_per_layer(stack.block)
        sequences = attentions * layout.rows * stack.tokens.sequences
        saved += layer_bytes(step, plain, stack)
        weights += 3 * layers * layer_copies(step, layout, stack.block)
        launches += _LAUNCH_SECONDS * (1 + attentions) / 2 + sequences * _SECONDS_PER_SEQUENCE.get(step.kernel, 0.0)
    logits = head_bytes(step, layout, step.stacks[-1]) / layout.pipeline
    products = flops / (layout.gpus * layout.micro_batches) / (_MATMUL_EFFICIENCY * peak)
    transfers = (_PASSES * (saved * layers * repetition + logits) + weights) / bandwidth
    micro_batch = max(products + transfers, layers * repetition * launches)
    communication = layers * repetition * _tensor_seconds(step, layout, device)
    both = micro_batch + communication
    return Duration(
        compute=layout.micro_batches * micro_batch,
        tensor=layout.micro_batches * communication,
        bubble=(layout.pipeline - 1) * both,
        data=_data_seconds(layout, device, 4 * parameters, hidden=both * 2 / 3),
        update=_UPDATE_BYTES * parameters / (layout.data if layout.sharded else 1) / bandwidth,
    )


def _tensor_seconds(step: Step, layout: Layout, device: Device) -> float:
    """Time per layer and micro-batch of the all-reduces of outputs and gradients of each attention and MLP.

    A ring transfers 2 (n - 1) / n of the data (Patarasuk and Yuan 2009). Reduce-scatter and all-gather of sequence
    parallelism transfer as much. The encoder output that a decoder attends to has a gradient, too.
    """
    tokens = 0
    for stack in step.stacks:
        tokens += 2 * (attentions_per_layer(stack.block) + 1) * stack.tokens.count(layout.rows)
        tokens += stack.source.count(layout.rows) if stack.source else 0
    size = step.element * step.shape.hidden * tokens
    rate = 1e9 * (device.link if layout.tensor <= layout.gpus_per_node else device.network)
    return 2 * (layout.tensor - 1) / layout.tensor * size / rate


def _data_seconds(layout: Layout, device: Device, size: float, hidden: float) -> float:
    """Time per update of the gradient all-reduce that the last backward pass does not hide.

    Between nodes, rings use the network interfaces of all replicas on a node. With ZeRO-1, gradients are
    reduce-scattered (half of the transfer) and weights are gathered at the end, which nothing hides.
    """
    replicas = max(1, min(layout.data, layout.gpus_per_node // layout.tensor))
    rate = 1e9 * (device.link if replicas == layout.data else min(device.link, replicas * device.network))
    seconds = 2 * (layout.data - 1) / layout.data * size / rate
    if layout.sharded:
        return max(0.0, seconds / 2 - hidden) + seconds / 2
    return max(0.0, seconds - hidden)
