# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: memory, FLOPs and time of a step, as JSON or text.

The CUDA context, NCCL's buffers, fragmentation and torch.compile are not included in the memory. The duration does not
include data loading, validation, checkpoints and communication between pipeline stages. Its constants are fitted to
steps on one H100 and one H200 (scripts/benchmark/RESULTS.md). The duration on several GPUs has not been measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from bionemo.common.gpus import USABLE, Device
from bionemo.config.schema import RunConfig
from bionemo.planning.layouts import Layout
from bionemo.planning.lengths import Tokens, estimate_tokens
from bionemo.planning.measure import Costs, Step, estimate_step, measure_model, measure_step

GIB = 2**30
_MATMUL_EFFICIENCY = 0.76  # fraction of the peak FLOP/s that matrix products of a transformer reach
_ATTENTION_EFFICIENCY = 0.28  # the same for the products of attention
_SCORE_FLOPS = 1300  # FLOPs at the peak that take as long as the other operations on a score, such as its exponential
_MEMORY_EFFICIENCY = 0.8  # fraction of the memory bandwidth that everything else reaches
_PASSES = 3  # transfers of a result: written once, read twice
_LAUNCH_SECONDS = 1.2e-5  # time to launch a kernel from Python, without torch.compile
_UPDATE_BYTES = 40  # per parameter and update: AdamW, and passes that zero and measure gradients


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in bytes."""

    weights: int  # fp32 weights
    gradients: int  # Megatron's fp32 gradient buffer
    moments: int  # AdamW's two fp32 moments, or this replica's share
    activations: int  # activations, half-precision copies of weights and temporary tensors at the peak

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(astuple(self))


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
        return sum(astuple(self))


@dataclass(frozen=True)
class Plan:
    """All estimates for a run."""

    name: str  # name of the experiment
    device: Device  # GPU
    precision: str  # precision of matrix products
    layout: Layout  # parallel layout
    tokens: tuple[Tokens, ...]  # tokens of a row, for each transformer block
    parameters: dict[str, int]  # number of parameters of the whole model, by part
    memory: Memory  # of the GPU that needs most
    flops: float  # FLOPs of an update, without recomputation
    duration: Duration  # of an update
    mfu: float  # model FLOPs utilization: useful FLOPs as a fraction of the peak
    steps: int | None  # number of steps of the run; None if the configuration does not limit it

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.memory.total <= self.device.usable

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second without padding; for two stacks, those of the encoder."""
        return self.layout.global_batch_size * self.tokens[0].unpadded(1) / self.duration.total


def make_step(cfg: RunConfig, precision: str, device: Device) -> Step:
    """Return the step of a run."""
    half, deterministic = precision not in ("32", "32-true"), cfg.trainer.deterministic is True
    return Step(cfg.model, estimate_tokens(cfg.model), half, deterministic, triton=device.bf16)


def make_plan(cfg: RunConfig, layout: Layout, device: Device, other: Plan | None = None) -> Plan:
    """Compute all estimates for a configuration and its layout.

    With `model.micro_batch_size=auto`, the micro-batch is halved until it fits, as in a run. `other` is a plan with
    the same model, GPUs and rows of a step: parameters and FLOPs are the same, and the costs are those of
    `estimate_step`, unless layers are recomputed.

    Raises:
        UserError: if the model cannot be measured.
    """
    precision = str(cfg.trainer.precision)
    if precision == "auto":
        precision = "bf16-mixed" if device.bf16 else "16-mixed"
    step, sharded = make_step(cfg, precision, device), cfg.model.optim.name == "distributed_fused_adam"
    estimate = other and cfg.model.activations_checkpoint_granularity is None
    costs, memory = _measure_fullest(step, layout, sharded, estimate_step if estimate else measure_step)
    while cfg.model.micro_batch_size == "auto" and layout.micro_batches.size > 1 and memory.total > device.usable:
        layout = replace(layout, micro_batches=layout.micro_batches.limit(layout.micro_batches.size // 2))
        costs, memory = _measure_fullest(step, layout, sharded)
    peak = 1e12 * (device.half if step.half else device.single)
    duration = estimate_duration(costs, layout, device, peak, sharded)
    if other:
        mfu = other.mfu * other.duration.total / duration.total
        return replace(other, layout=layout, memory=memory, duration=duration, mfu=mfu)
    parameters, forward = measure_model(step, layout.micro_batches.size)
    # The backward pass needs twice as many FLOPs as the forward pass (Narayanan et al. 2021).
    flops = 3 * forward * layout.micro_batches.count * layout.data
    return Plan(
        name=cfg.name,
        device=device,
        precision=precision,
        layout=layout,
        tokens=step.tokens,
        parameters=parameters,
        memory=memory,
        flops=flops,
        duration=duration,
        mfu=flops / (duration.total * peak * layout.gpus),
        steps=cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None,
    )


def _measure_fullest(
    step: Step, layout: Layout, sharded: bool, measure: Callable[[Step, Layout, int], Costs] = measure_step
) -> tuple[Costs, Memory]:
    """Return costs and peak memory of the first or the last pipeline stage, whichever needs more memory.

    Stages between them hold fewer micro-batches than the first, and neither embedding nor head.
    """
    ends = dict.fromkeys((0, layout.tensor * (layout.pipeline - 1)))
    measured = [measure(step, layout, rank) for rank in ends]
    return max(((costs, _memory(costs, layout, sharded)) for costs in measured), key=lambda each: each[1].total)


def _memory(costs: Costs, layout: Layout, sharded: bool) -> Memory:
    """Weights, gradients and moments have 4 + 4 + 8 bytes per parameter; ZeRO-1 divides the moments over replicas."""
    parameters = costs.parameters
    moments = 8 * parameters // (layout.data if sharded else 1)
    return Memory(4 * parameters, 4 * parameters, moments, costs.peak)


def estimate_duration(costs: Costs, layout: Layout, device: Device, peak: float, sharded: bool) -> Duration:
    """Estimate the duration of an update from the costs of one rank; `peak` is in FLOP/s.

    A micro-batch needs the time of its arithmetic and memory transfers, or that of launching its kernels if it is
    longer. Communication between tensor ranks is a ring, which transfers (n - 1) / n of the data, twice for an
    all-reduce (Patarasuk and Yuan 2009).
    """
    bandwidth = _MEMORY_EFFICIENCY * 1e9 * device.bandwidth
    matmul = (costs.flops - costs.attention_flops) / _MATMUL_EFFICIENCY
    arithmetic = (matmul + costs.attention_flops / _ATTENTION_EFFICIENCY + _SCORE_FLOPS * costs.scores) / peak
    computed = arithmetic + _PASSES * costs.written / bandwidth
    micro_batch = max(computed, _LAUNCH_SECONDS * costs.kernels) / costs.micro_batches
    link = device.link if layout.tensor <= layout.gpus_per_node else device.network
    sent = costs.sent / costs.micro_batches * (layout.tensor - 1) / layout.tensor / (1e9 * link)
    return Duration(
        compute=layout.micro_batches.count * micro_batch,
        tensor=layout.micro_batches.count * sent,
        bubble=(layout.pipeline - 1) * (micro_batch + sent),
        data=_data_seconds(layout, device, 4 * costs.parameters, sharded, hidden=(micro_batch + sent) * 2 / 3),
        update=_UPDATE_BYTES * costs.parameters / (layout.data if sharded else 1) / bandwidth,
    )


def _data_seconds(layout: Layout, device: Device, size: float, sharded: bool, hidden: float) -> float:
    """Time per update of the gradient all-reduce that the last backward pass does not hide.

    Between nodes, rings use the network interfaces of all replicas on a node. With ZeRO-1, gradients are
    reduce-scattered (half of the transfer) and weights are gathered at the end, which nothing hides.
    """
    replicas = max(1, min(layout.data, layout.gpus_per_node // layout.tensor))
    rate = 1e9 * (device.link if replicas == layout.data else min(device.link, replicas * device.network))
    seconds = 2 * (layout.data - 1) / layout.data * size / rate
    if sharded:
        return max(0.0, seconds / 2 - hidden) + seconds / 2
    return max(0.0, seconds - hidden)


def as_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values for JSON: bytes, seconds, FLOPs."""
    return asdict(plan) | {
        "fits": plan.fits,
        "total_memory": plan.memory.total,
        "seconds": plan.duration.total,
        "tokens_per_second": plan.tokens_per_second,
    }


def as_text(plan: Plan) -> str:
    """Return the plan as text."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    layout, micro_batches = plan.layout, plan.layout.micro_batches
    yield f"{plan.name}: {sum(plan.parameters.values()):,} parameters"
    yield "  " + ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items() if count)
    yield (
        f"{layout.gpus} x {plan.device.name}: data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}"
        f", {plan.precision}"
    )
    row = "row" if plan.tokens[0].multiple == 1 else "sequence"
    per_row = " + ".join(f"{each.row:,.0f}" for each in plan.tokens)
    yield (
        f"  a step: {layout.global_batch_size:,} {row}s of {per_row} tokens; on each replica, {micro_batches.count} x "
        f"{micro_batches.size} {row}s"
    )
    yield f"  {plan.tokens[0].source}"

    yield "peak memory per GPU"
    for name, size in asdict(plan.memory).items():
        yield f"  {name:12} {size / GIB:8.2f} GiB"
    total, available = plan.memory.total / GIB, plan.device.memory / 1024
    yield (
        f"  {'total':12} {total:8.2f} GiB of {available:.1f}: {'fits' if plan.fits else 'does NOT fit'} "
        f"({total / available:.0%} of the device; at most {USABLE:.0%} can be used)"
    )

    parts = ", ".join(f"{name} {value:.3g}" for name, value in asdict(plan.duration).items() if value)
    speed, seconds = plan.tokens_per_second, plan.duration.total
    is_measured = plan.device.name.startswith(("H100", "H200"))
    accuracy = "steps on one GPU took 0.93 to 1.05 of it" if is_measured else "not measured on this GPU"
    yield f"time, an estimate; {accuracy}"
    if layout.gpus > 1:
        yield (
            f"  between GPUs {plan.device.link:g} GB/s in a node of {layout.gpus_per_node}, {plan.device.network:g} "
            "GB/s per GPU between nodes: assumed, not measured"
        )
    yield f"  {plan.flops:.3g} FLOPs per step, without recomputation"
    yield f"  {seconds:.3g} s per step ({parts}), {speed:,.0f} tokens per second, MFU {plan.mfu:.0%}"
    if plan.steps:
        total_seconds = seconds * plan.steps
        yield f"  {plan.steps:,} steps: {_format_count(speed * total_seconds)} tokens, {format_time(total_seconds)}"


def format_time(seconds: float) -> str:
    """Format a time with three digits, in minutes, hours or days."""
    unit, name = (86400, "days") if seconds >= 86400 else (3600, "hours") if seconds >= 3600 else (60, "minutes")
    return f"{seconds / unit:.3g} {name}"


def _format_count(number: float) -> str:
    """Format a number with three digits, such as 100 billion."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"
