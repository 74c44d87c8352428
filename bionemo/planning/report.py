# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: all estimates for its layout, a comparison with other layouts, as JSON or text."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import gcd
from typing import Any

from bionemo.config.check import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.planning.devices import USABLE, Device
from bionemo.planning.estimate import (
    Duration,
    Memory,
    computed_flops,
    estimate_duration,
    fullest_stage,
    stage_parameters,
    useful_flops,
)
from bionemo.planning.layouts import Layout, Recompute, Stage, layout_overrides
from bionemo.planning.lengths import estimate_tokens
from bionemo.planning.measure import StepProfiler

_GIB = 2**30
_JSON_NAMES = {"profiler": "step", "micro_batch_size": "rows", "num_micro_batches": "micro_batches"}
_MAX_SHOWN = 12
_FULL = 0.995
_MAX_ROWS = 1 << 16
_PARALLEL_SIZES = (1, 2, 4, 8)
_ATTENTION = {
    "flash": "FlashAttention over all sequences at once",
    "triton": "attention over all sequences at once with dropout, in fp32 or deterministic, by a Triton kernel",
    "sequences": "attention one sequence at a time",
    "probabilities": "attention one sequence at a time, keeping its probabilities for their dropout",
}


@dataclass(frozen=True)
class Choice:
    """A layout with its estimates."""

    layout: Layout  # parallel layout
    memory: int  # bytes of the fullest GPU
    fits: bool  # the device has enough memory
    speed: float  # estimated tokens per second


def evaluate_layout(profiler: StepProfiler, layout: Layout, device: Device) -> Choice:
    """Estimate memory and speed of a layout."""
    memory = fullest_stage(profiler, layout)[1].total
    speed = _tokens_per_second(profiler, layout, estimate_duration(profiler, layout, device))
    return Choice(layout, memory, memory <= device.usable, speed)


def _tokens_per_second(profiler: StepProfiler, layout: Layout, duration: Duration) -> float:
    """Tokens per second without padding; for two stacks, those of the encoder."""
    return layout.global_batch_size * profiler.tokens[0].unpadded(1) / duration.total


def compare_layouts(profiler: StepProfiler, requested: Layout, device: Device) -> list[Choice]:
    """Return all layouts for the same GPUs: the fastest that fit first, then those that do not fit, smallest first."""
    found = [evaluate_layout(profiler, layout, device) for layout in alternative_layouts(profiler, requested)]
    return sorted(found, key=lambda each: (not each.fits, -each.speed if each.fits else each.memory))


def alternative_layouts(profiler: StepProfiler, requested: Layout) -> Iterator[Layout]:
    """Yield the valid layouts for the same GPUs and rows per step, with micro-batches that are not larger."""
    model = profiler.model
    recomputes: tuple[Recompute, ...] = ("none", "uniform")
    # Pipeline stages exchange tensors of one size, of a single transformer block.
    supports_pipeline = len(profiler.tokens) == 1 and profiler.tokens[0].multiple == 1
    for tensor, pipeline in product(_PARALLEL_SIZES, _PARALLEL_SIZES):
        data, rest = divmod(requested.gpus, tensor * pipeline)
        if rest or requested.global_batch_size % data or (pipeline > 1 and not supports_pipeline):
            continue
        size = gcd(requested.micro_batch_size, requested.global_batch_size // data)
        sizes = model.num_attention_heads, model.ffn_hidden_size, profiler.table_rows
        sharded_sizes = *sizes, *(tokens.count(size) for tokens in profiler.tokens)
        if model.num_layers % pipeline or any(sharded_size % tensor for sharded_size in sharded_sizes):
            continue
        for sharded, recompute in product((False, True)[: 2 if data > 1 else 1], recomputes):
            yield replace(
                requested, tensor=tensor, pipeline=pipeline, data=data, micro_batch_size=size,
                num_micro_batches=requested.global_batch_size // data // size, sequence_parallel=tensor > 1,
                sharded=sharded, recompute=recompute, recompute_layers=1,
            )  # fmt: skip


def largest_micro_batch(profiler: StepProfiler, layout: Layout, device: Device) -> int:
    """Return the number of rows of the largest micro-batch that fits."""

    def memory(size: int) -> int:
        return fullest_stage(profiler, replace(layout, micro_batch_size=size))[1].total

    return bisect_right(range(1, _MAX_ROWS), device.usable, key=memory)


def divide_rows(profiler: StepProfiler, layout: Layout, device: Device) -> MicroBatches:
    """Divide a replica's rows of a step into the largest micro-batches that fit; `largest` is 0 if no row fits."""
    largest = largest_micro_batch(profiler, layout, device)
    if largest < layout.micro_batch_size:  # there will be more micro-batches, and the first stage holds one per stage
        count = max(layout.num_micro_batches, layout.pipeline)
        largest = largest_micro_batch(profiler, replace(layout, num_micro_batches=count), device)
    return replace(MicroBatches(layout.micro_batch_size, layout.num_micro_batches).limit(largest), largest=largest)


@dataclass(frozen=True)
class Plan:
    """All estimates for a run."""

    name: str  # name of the experiment
    profiler: StepProfiler  # model and data
    layout: Layout  # requested layout
    automatic: bool  # the micro-batch of the requested layout is that of `model.micro_batch_size=auto`
    device: Device  # GPU
    precision: str  # precision of matrix products
    parameters: dict[str, int]  # number of parameters of the whole model, by part
    # mean number of tokens that a token attends to, for each transformer block and attention of a layer
    attended: dict[str, list[float]]
    stage: Stage  # pipeline stage that needs most memory
    rank_parameters: int  # number of parameters of one rank of that stage
    memory: Memory  # memory of that rank
    flops: tuple[float, float]  # FLOPs of an update: without recomputation, and as computed
    duration: Duration  # duration of an update
    steps: int | None  # number of steps of the run; None if the configuration does not limit it
    requested: Choice  # estimates of the requested layout
    choices: list[Choice]  # all layouts for the same GPUs

    @property
    def best(self) -> Choice | None:
        """The fastest layout that fits."""
        return next((each for each in self.choices if each.fits), None)

    @property
    def advice(self) -> list[str]:
        """Overrides that select the fastest layout that fits."""
        return layout_overrides(self.best.layout, self.layout, self.automatic) if self.best else []

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: useful FLOPs as a fraction of the peak."""
        peak = 1e12 * (self.device.half if self.profiler.half else self.device.single) * self.layout.gpus
        return self.flops[0] / self.duration.total / peak


def make_profiler(cfg: RunConfig, precision: str, device: Device) -> StepProfiler:
    """Return a profiler for the steps of a run."""
    half, deterministic = precision not in ("32", "32-true"), cfg.trainer.deterministic is True
    return StepProfiler(cfg.model, estimate_tokens(cfg.model), half, deterministic, triton=device.bf16)


def make_plan(cfg: RunConfig, layout: Layout, device: Device, mfu: float | None = None) -> Plan:
    """Compute all estimates for a configuration and its layout.

    Raises:
        UserError: if the model cannot be measured.
    """
    precision = str(cfg.trainer.precision)
    if precision == "auto":
        precision = "bf16-mixed" if device.bf16 else "16-mixed"
    profiler = make_profiler(cfg, precision, device)
    automatic = cfg.model.micro_batch_size == "auto"
    if automatic:
        fitting = divide_rows(profiler, layout, device)
        layout = replace(layout, micro_batch_size=fitting.size, num_micro_batches=fitting.count)
    whole, (stage, needed) = profiler.profile(Layout()), fullest_stage(profiler, layout)
    return Plan(
        name=cfg.name,
        profiler=profiler,
        layout=layout,
        automatic=automatic,
        device=device,
        precision=precision,
        parameters=whole.count_parameters(cfg.model.num_layers),
        attended=whole.attended,
        stage=stage,
        rank_parameters=stage_parameters(profiler, layout, stage),
        memory=needed,
        flops=(useful_flops(profiler, layout), computed_flops(profiler, layout)),
        duration=estimate_duration(profiler, layout, device, mfu),
        steps=cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None,
        requested=evaluate_layout(profiler, layout, device),
        choices=compare_layouts(profiler, layout, device),
    )


def as_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values for JSON: bytes, seconds, FLOPs."""
    profiler, model = plan.profiler, plan.profiler.model
    shape = {
        "stacks": list(plan.attended),
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "head_size": model.head_size,
        "ffn": model.ffn_hidden_size,
        "vocab_size": profiler.vocabulary.vocab_size,
        "padded_vocab_size": profiler.table_rows,
    }
    step = {"shape": shape, **{name: getattr(profiler, name) for name in ("tokens", "half", "deterministic")}}
    data = asdict(replace(plan, profiler=step), dict_factory=_with_json_names)  # type: ignore[arg-type]
    return data | {
        "mfu": plan.mfu,
        "total_memory": plan.memory.total,
        "seconds": plan.duration.total,
        "tokens_per_second": _tokens_per_second(plan.profiler, plan.layout, plan.duration),
        "advice": plan.advice,
    }


def _with_json_names(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_JSON_NAMES.get(name, name): value for name, value in fields}


def as_text(plan: Plan, show_all: bool = False) -> str:
    """Return the plan as text; `show_all` lists all other layouts, not only the fastest."""
    paragraphs = (_model(plan), _layout(plan), _memory(plan), _time(plan), _comparison(plan, show_all))
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs)


def _model(plan: Plan) -> Iterator[str]:
    model, parts = plan.profiler.model, plan.parameters
    layers = " + ".join([f"{model.num_layers}"] * len(plan.attended))
    yield f"{plan.name}: {sum(parts.values()):,} parameters"
    yield "  " + ", ".join(f"{name} {count:,}" for name, count in parts.items() if count)
    yield f"  {layers} layers of size {model.hidden_size:,}, {model.num_attention_heads} heads of {model.head_size}"


def _layout(plan: Plan) -> Iterator[str]:
    layout, tokens = plan.layout, plan.profiler.tokens
    yield (
        f"{layout.gpus} x {plan.device.name}: data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}"
        f"{', sequence parallel' if layout.sequence_parallel else ''}, {plan.precision}"
    )
    per_row = " + ".join(f"{each.row:,.0f}" for each in tokens)
    batch, micro_batch = _rows(plan, layout.global_batch_size), _rows(plan, layout.micro_batch_size)
    micro_batches = f"{_plural(layout.num_micro_batches, 'micro-batch')} of {micro_batch} per replica"
    yield f"  a step: {batch} of {per_row} tokens = {_step_tokens(plan):,.0f} tokens, as {micro_batches}"
    yield f"  {_ATTENTION[plan.profiler.kernel]}"
    yield f"  {tokens[0].source}"
    for (name, attended), each in zip(plan.attended.items(), tokens, strict=True):
        filled = f"rows are {each.filled:.0%} full, " if each.filled < _FULL else ""
        counts = " + ".join(f"{count:,.0f}" for count in attended)
        yield f"  {name}: {filled}a token attends to {counts} on average"


def _memory(plan: Plan) -> Iterator[str]:
    stage = f"; stage {plan.stage.number + 1} of {plan.stage.count}" if plan.stage.count > 1 else ""
    yield f"peak memory per GPU (largest of all GPUs{stage}), {plan.rank_parameters:,} parameters"
    rows = plan.layout.micro_batch_size
    if any(tokens.row_deviation for tokens in plan.profiler.tokens):
        largest = " + ".join(f"{tokens.count(rows):,}" for tokens in plan.profiler.largest_tokens(rows))
        yield f"  in a micro-batch of {largest} tokens"
    for name, size in asdict(plan.memory).items():
        yield f"  {name:12} {size / _GIB:8.2f} GiB"
    total, available = plan.memory.total / _GIB, plan.device.memory / 1024
    yield (
        f"  {'total':12} {total:8.2f} GiB of {available:.1f}: {'fits' if plan.requested.fits else 'does NOT fit'} "
        f"({total / available:.0%} of the device; at most {USABLE:.0%} can be used)"
    )
    if fitting := largest_micro_batch(plan.profiler, plan.layout, plan.device):
        limit = " or more" if fitting == _MAX_ROWS - 1 else ""
        yield f"  largest micro_batch_size that fits: {fitting}{limit}"
        if 2 * rows <= fitting:
            yield "  a larger model.global_batch_size would use the device better; the time below is for this batch"
    else:
        yield f"  a micro-batch of {_rows(plan, 1)} does not fit"


def _time(plan: Plan) -> Iterator[str]:
    useful, computed = plan.flops
    seconds, read = plan.duration.total, "encoder tokens" if len(plan.profiler.tokens) > 1 else "tokens"
    if plan.profiler.tokens[0].filled < _FULL:
        read += " without padding"
    speed = _tokens_per_second(plan.profiler, plan.layout, plan.duration)
    parts = ", ".join(f"{name} {value:.3g}" for name, value in asdict(plan.duration).items() if value)
    yield "time, an estimate; on one H100 or H200, steps took 1.0 (650M parameters) to 2.0 (8M) times as long"
    yield f"  {useful:.3g} FLOPs per step" + (f", {computed:.3g} computed" if computed > useful * 1.01 else "")
    yield f"  {seconds:.3g} s per step ({parts}), {speed:,.0f} {read} per second, MFU {plan.mfu:.0%}"
    if plan.steps:
        total = seconds * plan.steps
        yield f"  {plan.steps:,} steps: {speed * total:.3g} {read}, {total / 86400:.3g} days"


def _comparison(plan: Plan, show_all: bool) -> Iterator[str]:
    fitting = [each for each in plan.choices if each.fits]
    shown = plan.choices if show_all else (fitting or plan.choices)[:_MAX_SHOWN]
    size = f"a step of {_rows(plan, plan.layout.global_batch_size)} on {_plural(plan.layout.gpus, 'GPU')}"
    yield f"layouts for {size}; speed relative to the requested layout"
    yield "  tensor  pipeline  data  micro-batches  optimizer  recompute     memory  fits  speed  largest micro-batch"
    for each in shown:
        layout = each.layout
        micro_batches = f"{layout.num_micro_batches} of {layout.micro_batch_size}"
        yield (
            f"  {layout.tensor:6}{layout.pipeline:10}{layout.data:6}{micro_batches:>15}"
            f"  {'sharded' if layout.sharded else 'whole':9}  {'none' if layout.recompute == 'none' else 'full':9}"
            f"{each.memory / _GIB:6.1f} GiB  {'yes' if each.fits else 'no':4}{each.speed / plan.requested.speed:7.2f}"
            f"{largest_micro_batch(plan.profiler, layout, plan.device):21}"
            f"{'  requested' if layout == plan.layout else ''}"
        )
    if len(shown) < len(plan.choices):
        yield f"  {len(fitting)} of {len(plan.choices)} fit; --all lists all of them"
    if plan.best is None:
        smaller = "" if plan.automatic else " or model.micro_batch_size"
        yield f"no layout fits: use more or larger GPUs, or a smaller model{smaller}"
    elif not plan.advice:
        yield "recommended: the requested layout, the fastest that fits"
    elif plan.requested.fits and plan.best.speed < 1.02 * plan.requested.speed:
        yield "recommended: the requested layout; no other that fits is faster by 2 % or more"
    else:
        yield f"recommended overrides: {' '.join(plan.advice)}"


def _step_tokens(plan: Plan) -> float:
    return plan.layout.global_batch_size * sum(tokens.row for tokens in plan.profiler.tokens)


def _rows(plan: Plan, count: int) -> str:
    return _plural(count, "row" if plan.profiler.tokens[0].multiple == 1 else "sequence")


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")
