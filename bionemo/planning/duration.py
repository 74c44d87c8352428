# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: an estimate. None of its constants has been measured yet; compare layouts with it, not runs.

Not modelled: waiting for data, validation and checkpoints, what pipeline stages send each other, slow machines,
torch.compile.
"""

from dataclasses import dataclass, replace

from bionemo.planning.activations import head, layer
from bionemo.planning.devices import Device
from bionemo.planning.flops import of_update, on_hardware
from bionemo.planning.layout import Layout
from bionemo.planning.moments import copies
from bionemo.planning.sizes import attentions, stage_parameters
from bionemo.planning.step import Step

_PRODUCTS = 0.6  # share of the peak that matrix products of a transformer reach
_STREAMS = 0.8  # share of the bandwidth that everything else reaches
_PASSES = 8  # times that a kept byte crosses the memory bus: written, read twice, gradient written and read, casts
_LAUNCHES = 1e-3  # seconds in which Python issues the kernels of a layer, forward and backward, uncompiled
_EACH_SEQUENCE = {"sequences": 1e-4, "probabilities": 3e-4}  # seconds more for each, where attention takes them singly
_ACCUMULATE = 18  # bytes a parameter and micro-batch: a gradient written, read and added to the buffer
_UPDATE = 52  # bytes a parameter and update: AdamW's, and passes that zero, measure, scale and clip gradients


@dataclass(frozen=True)
class Duration:
    """Seconds of an update, by what they are spent on.

    Attributes:
        compute: the passes of one replica's micro-batches, if a pipeline is never empty.
        tensor: what tensor ranks send each other meanwhile.
        bubble: a pipeline filling and emptying.
        data: gradients and weights between replicas that no computation hides.
        update: of the optimizer.
    """

    compute: float
    tensor: float
    bubble: float
    data: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.tensor + self.bubble + self.data + self.update


def duration(step: Step, layout: Layout, device: Device, mfu: float | None = None) -> Duration:
    """Estimate an update; where the share of the peak that is reached is known, `mfu` takes the place of all that."""
    peak = 1e12 * (device.half if step.half else device.single)
    if mfu is not None:
        return Duration(of_update(step, layout) / (peak * mfu * layout.gpus), 0.0, 0.0, 0.0, 0.0)
    layers = layout.layers(step.shape.layers)
    parameters = max(sum(stage_parameters(step.shape, layout, stage).values()) for stage in layout.stages)
    stream = _STREAMS * 1e9 * device.bandwidth

    products = on_hardware(step, layout) / (layout.gpus * layout.micro_batches) / (_PRODUCTS * peak)
    plain = replace(layout, recompute="none")
    again = on_hardware(step, layout) / on_hardware(step, plain)
    kept, issued, weights = 0, 0.0, _ACCUMULATE * parameters
    for stack in step.stacks:
        count = attentions(stack.kind)
        kept += layer(step, plain, stack)
        weights += 3 * layers * copies(step, layout, stack.kind)
        sequences = layout.rows * stack.tokens.sequences
        issued += _LAUNCHES * (1 + count) / 2 + count * sequences * _EACH_SEQUENCE.get(step.kernel, 0.0)
    logits = head(step, layout, step.stacks[-1]) / layout.pipeline
    passes = (_PASSES * (kept * layers * again + logits) + weights) / stream
    micro_batch = max(products + passes, layers * again * issued)
    sent = layers * again * _between_tensor_ranks(step, layout, device)
    one = micro_batch + sent
    return Duration(
        compute=layout.micro_batches * micro_batch,
        tensor=layout.micro_batches * sent,
        bubble=(layout.pipeline - 1) * one,
        data=_between_replicas(layout, device, 4 * parameters, hidden=one * 2 / 3),
        update=_UPDATE * parameters / (layout.data if layout.sharded else 1) / stream,
    )


def _between_tensor_ranks(step: Step, layout: Layout, device: Device) -> float:
    """Seconds a layer and micro-batch: sums over the ranks of the output of each attention and MLP and of gradients.

    A ring moves 2 (n - 1) / n of the data (Patarasuk and Yuan 2009); nothing is computed meanwhile. With sequence
    parallelism each sum is a scatter and a gather, which move as much. What a decoder attends to has a gradient, too.
    """
    tokens = 0
    for stack in step.stacks:
        tokens += 2 * (attentions(stack.kind) + 1) * stack.tokens.count(layout.rows)
        tokens += stack.memory.count(layout.rows) if stack.memory else 0
    size = step.element * step.shape.hidden * tokens
    rate = 1e9 * (device.link if layout.tensor <= layout.node else device.network)
    return 2 * (layout.tensor - 1) / layout.tensor * size / rate


def _between_replicas(layout: Layout, device: Device, size: float, hidden: float) -> float:
    """Seconds an update that remain of summing gradients, when the last backward pass hides some.

    Between machines, rings leave through the network cards of all replicas that a machine holds. Sharded, gradients
    are scattered, half the way, and the weights gathered at the end, which nothing hides.
    """
    together = max(1, min(layout.data, layout.node // layout.tensor))
    rate = 1e9 * (device.link if together == layout.data else min(device.link, together * device.network))
    whole = 2 * (layout.data - 1) / layout.data * size / rate
    if layout.sharded:
        return max(0.0, whole / 2 - hidden) + whole / 2
    return max(0.0, whole - hidden)
