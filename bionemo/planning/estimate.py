# SPDX-License-Identifier: Apache-2.0
"""Memory, FLOPs and duration of a training step, extrapolated from the measured layers to all layers.

torch.compile, the CUDA context, NCCL's buffers and fragmentation are not included in the memory. The duration does not
include data loading, validation, checkpoints and communication between pipeline stages. Its constants are not fitted
to measurements. On one GPU, measured steps took 1 (large models) to 2 times (small models) as long
(scripts/benchmark/RESULTS.md). The duration on several GPUs has not been measured.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from bionemo.planning.devices import Device
from bionemo.planning.layouts import Layout, Stage
from bionemo.planning.measure import DEPTH, StepProfiler

_FORWARD = "pre_forward", "forward", "post_forward"
_MATMUL_EFFICIENCY = 0.6  # fraction of the peak FLOP/s that matrix products of a transformer reach
_MEMORY_EFFICIENCY = 0.8  # fraction of the memory bandwidth that everything else reaches
_PASSES = 8  # transfers of a saved byte: written, read twice, gradient written and read, casts
_LAUNCH_SECONDS = 1.2e-5  # time to launch a kernel from Python, without torch.compile
_KERNELS_PER_SEQUENCE = {"sequences": 8, "probabilities": 25}  # of an attention, forward and backward
_ACCUMULATE_BYTES = 18  # per parameter and micro-batch: a gradient is written, read and added to the buffer
_UPDATE_BYTES = 40  # per parameter and update: AdamW, and passes that zero and measure gradients


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in bytes."""

    weights: int  # fp32 weights
    gradients: int  # Megatron's fp32 gradient buffer
    moments: int  # AdamW's two fp32 moments, or this replica's share
    copies: int  # half-precision copies of weights made by autocast
    activations: int  # tensors saved for the backward pass, of all micro-batches in flight
    working: int  # temporary tensors

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(astuple(self))


def stage_parameters(profiler: StepProfiler, layout: Layout, stage: Stage) -> int:
    """Return the number of parameters of one rank of a stage."""
    return sum(profiler.profile(layout, stage).count_parameters(layout.layers(profiler.model.num_layers)).values())


def fullest_stage(profiler: StepProfiler, layout: Layout) -> tuple[Stage, Memory]:
    """Return the pipeline stage with the highest peak memory, and its memory.

    It is the first or the last one: stages between them have fewer micro-batches in flight than the first, and
    neither embedding nor head.
    """
    ends = dict.fromkeys((layout.stages[0], layout.stages[-1]))
    return max(((stage, stage_memory(profiler, layout, stage)) for stage in ends), key=lambda each: each[1].total)


def stage_memory(profiler: StepProfiler, layout: Layout, stage: Stage) -> Memory:
    """Return the peak memory of one rank of a stage, for the largest micro-batch of a run.

    Weights, gradients and moments have 4 + 4 + 8 bytes per parameter; ZeRO-1 divides the moments over the replicas
    (Rajbhandari et al. 2020).
    """
    parameters = stage_parameters(profiler, layout, stage)
    peak = map(round, max(_segment_peaks(profiler, layout, stage), key=sum))
    return Memory(4 * parameters, 4 * parameters, 8 * parameters // (layout.data if layout.sharded else 1), *peak)


def _segment_peaks(profiler: StepProfiler, layout: Layout, stage: Stage) -> Iterator[tuple[float, float, float]]:
    """Yield copies, activations and working memory at the peak of each segment of the step, with all layers.

    Layers that are not recomputed (`plain`) keep their activations, recomputed blocks their input. In the last layer,
    the activations of the recomputed block replace its input.
    """
    profile, total = profiler.profile(layout, stage, largest=True), profiler.model.num_layers
    layers, plain, inputs = layout.layers(total), layout.plain_layers(total), layout.saved_inputs(total)
    recomputed = layout.recomputed_layers(total)
    peaks, graph = [], (0.0, 0.0)
    for segment in profile.segments:
        copies, activations = segment.copies, segment.activations + segment.gradients
        in_use = segment.stack + (segment.phase not in ("pre_forward", "post_backward"))  # stacks with activations
        for stack, layer in enumerate(profile.layers[:in_use]):
            inside = recomputed if stack == segment.stack and segment.phase in ("forward", "backward") else 0
            activations += (plain + inside - DEPTH) * layer.activations + (inputs - (inside > 0)) * layer.input
            copies += (plain + inside - DEPTH) * layer.copies
            if segment.phase == "post_forward" or (segment.phase == "forward" and not inside):
                copies += (layers - plain) * layer.copies  # autocast keeps all copies until the forward pass ends
        if segment.phase == "loss":
            graph = copies, activations
        peaks.append((copies, activations, segment.working))
    others = layout.in_flight(stage) - 1
    # The gradient of the previous micro-batch, which was sent to the previous stage, is not freed yet.
    sent = 0 if stage.first or layout.num_micro_batches == 1 else profile.layers[0].input
    for copies, activations, working in peaks:
        # Without recomputation, all micro-batches share copies that are kept until the end of the step.
        total_copies = graph[0] if plain == layers else copies + others * graph[0]
        yield total_copies, activations + others * graph[1] + sent, working


def useful_flops(profiler: StepProfiler, layout: Layout) -> float:
    """Return the FLOPs of an update over all GPUs, without recomputation and masked pairs.

    The backward pass needs twice as many as the forward pass (Narayanan et al. 2021). Padding counts in matrix
    products, but attends to nothing.
    """
    profile, layers = profiler.profile(Layout(micro_batch_size=layout.micro_batch_size)), profiler.model.num_layers
    forward = sum(profile.total(quantity, layers, _FORWARD) for quantity in ("flops", "attention"))
    return 3 * forward * layout.num_micro_batches * layout.data


def computed_flops(profiler: StepProfiler, layout: Layout) -> float:
    """Return the FLOPs of an update that the GPUs execute, including masked pairs that the kernel does not skip.

    Recomputation repeats the forward pass of some layers, or of attention. It stops at the last tensor that the
    backward pass needs: without dropout, before the last product of a block.
    """
    model, profile = profiler.model, profiler.profile(Layout(micro_batch_size=layout.micro_batch_size))
    layers = model.num_layers
    attention, masked = (profile.total(quantity, layers, _FORWARD) for quantity in ("attention", "masked"))
    if layout.recompute == "selective":
        repeated = attention + masked
    else:
        fraction = 1 - layout.plain_layers(layers) / layout.layers(layers)
        products = layers * sum(layer.flops for layer in profile.layers)
        tokens = sum(each.count(layout.micro_batch_size) for each in profiler.tokens)
        last = 0 if model.hidden_dropout else 2 * model.hidden_size * model.ffn_hidden_size * tokens
        blocks = layout.pipeline * layout.saved_inputs(layers)
        repeated = fraction * (products + attention + masked) - blocks * last
    return useful_flops(profiler, layout) + (3 * masked + repeated) * layout.num_micro_batches * layout.data


@dataclass(frozen=True)
class Duration:
    """Seconds of an update."""

    compute: float  # forward and backward passes of one replica's micro-batches
    tensor: float = 0.0  # communication between tensor ranks
    bubble: float = 0.0  # time in which the pipeline fills and empties
    data: float = 0.0  # communication of gradients and weights between replicas that computation does not hide
    update: float = 0.0  # optimizer step

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.compute + self.tensor + self.bubble + self.data + self.update


def estimate_duration(profiler: StepProfiler, layout: Layout, device: Device, mfu: float | None = None) -> Duration:
    """Estimate the duration of an update; a known model FLOPs utilization `mfu` replaces the model of the duration.

    A stage needs the time of its arithmetic and memory transfers, or that of launching its kernels if it is longer.
    Communication between tensor ranks is a ring, which transfers (n - 1) / n of the data, twice for an all-reduce
    (Patarasuk and Yuan 2009).
    """
    peak = 1e12 * (device.half if profiler.half else device.single)
    if mfu is not None:
        return Duration(useful_flops(profiler, layout) / (peak * mfu * layout.gpus))
    parameters = max(stage_parameters(profiler, layout, stage) for stage in (layout.stages[0], layout.stages[-1]))
    bandwidth = _MEMORY_EFFICIENCY * 1e9 * device.bandwidth

    plain = replace(layout, recompute="none")
    profile, flops, layers = profiler.profile(plain), computed_flops(profiler, layout), profiler.model.num_layers
    repetition = flops / computed_flops(profiler, plain)
    loss = next(segment for segment in profile.segments if segment.phase == "loss")
    saved = loss.activations + (layers - DEPTH) * sum(layer.activations for layer in profile.layers)
    transfers = _PASSES * repetition * saved + 3 * layers * sum(layer.copies for layer in profile.layers)
    transferred = transfers / layout.pipeline + _ACCUMULATE_BYTES * parameters
    products = flops / (layout.gpus * layout.num_micro_batches) / (_MATMUL_EFFICIENCY * peak)
    per_sequence = layers * layout.micro_batch_size * _KERNELS_PER_SEQUENCE.get(profiler.kernel, 0)
    kernels = profile.total("kernels", layers)
    for tokens, attended in zip(profiler.tokens, profile.attended.values(), strict=True):
        kernels += per_sequence * len(attended) * tokens.sequences
    launches = _LAUNCH_SECONDS * repetition * kernels / layout.pipeline
    micro_batch = max(products + transferred / bandwidth, launches)
    sent = repetition * profile.total("sent", layers) / layout.pipeline * (layout.tensor - 1) / layout.tensor
    sent /= 1e9 * (device.link if layout.tensor <= layout.gpus_per_node else device.network)
    both = micro_batch + sent
    return Duration(
        compute=layout.num_micro_batches * micro_batch,
        tensor=layout.num_micro_batches * sent,
        bubble=(layout.pipeline - 1) * both,
        data=_data_seconds(layout, device, 4 * parameters, hidden=both * 2 / 3),
        update=_UPDATE_BYTES * parameters / (layout.data if layout.sharded else 1) / bandwidth,
    )


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
