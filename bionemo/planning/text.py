# SPDX-License-Identifier: Apache-2.0
"""How a plan is told."""

from collections.abc import Iterator
from dataclasses import asdict

from bionemo.planning.choices import largest
from bionemo.planning.devices import USABLE
from bionemo.planning.report import Plan
from bionemo.planning.sizes import NAMES

_GIB = 2**30
_SHOWN = 12
_FULL = 0.995
_ATTENTION = {
    "flash": "flash attention over all sequences at once",
    "sequences": "attention one sequence at a time",
    "probabilities": "attention one sequence at a time, keeping its probabilities for their dropout",
}


def as_text(plan: Plan, every: bool = False) -> str:
    """The plan for a reader; `every` tells all other layouts, not only the fastest."""
    paragraphs = (_model(plan), _layout(plan), _memory(plan), _time(plan), _others(plan, every))
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs)


def _model(plan: Plan) -> Iterator[str]:
    shape, parts = plan.step.shape, plan.parameters
    layers = " + ".join([f"{shape.layers}"] * len(shape.stacks))
    yield f"{plan.name}: {sum(parts.values()):,} parameters"
    yield "  " + ", ".join(f"{name} {count:,}" for name, count in parts.items() if count)
    yield f"  {layers} layers of size {shape.hidden:,}, {shape.heads} heads of {shape.head_size}"


def _layout(plan: Plan) -> Iterator[str]:
    layout, read = plan.layout, plan.step.tokens
    yield (
        f"{layout.gpus} x {plan.device.name}: data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}"
        f"{', sequence parallel' if layout.sequence_parallel else ''}, {plan.precision}"
    )
    each = " + ".join(f"{tokens.row:,.0f}" for tokens in read)
    yield (
        f"  a step: {_rows(plan, layout.global_rows)} of {each} tokens = {_tokens(plan):,.0f} tokens, as "
        f"{_many(layout.micro_batches, 'micro-batch')} of {_rows(plan, layout.rows)} a replica"
    )
    yield f"  {_ATTENTION[plan.step.kernel]}"
    yield f"  {read[0].source}"
    for stack in plan.step.stacks:
        seen = [f"{each.seen / stack.tokens.held(1):,.0f}" for each in stack.attentions(1)]
        filled = f"rows are {stack.tokens.filled:.0%} full, " if stack.tokens.filled < _FULL else ""
        yield f"  {NAMES[stack.kind]}: {filled}a token attends to {' + '.join(seen)} on average"


def _memory(plan: Plan) -> Iterator[str]:
    stage = f" (stage {plan.stage.number + 1} of {plan.stage.of})" if plan.stage.of > 1 else ""
    yield f"memory of the fullest GPU{stage}, {plan.held:,} parameters"
    if any(tokens.spread for tokens in plan.step.tokens):
        most = plan.step.crowded(plan.layout.rows).tokens
        yield f"  in a micro-batch of {' + '.join(f'{tokens.count(plan.layout.rows):,}' for tokens in most)} tokens"
    for name, size in asdict(plan.memory).items():
        yield f"  {name:12} {size / _GIB:8.2f} GiB"
    room = plan.device.memory / 1024
    verdict = "fits" if plan.asked.fits else "does NOT fit"
    yield (
        f"  {'total':12} {plan.memory.total / _GIB:8.2f} GiB of {room:.1f}: {verdict} "
        f"({USABLE:.0%} of the device may be filled, {plan.memory.total / _GIB / room:.0%} would be)"
    )
    rows = largest(plan.step, plan.layout, plan.device)
    yield f"  largest micro_batch_size that fits: {rows}" if rows else f"  not even {_rows(plan, 1)} fits"


def _time(plan: Plan) -> Iterator[str]:
    useful, done = plan.flops
    seconds, read = plan.duration.total, "tokens read" if len(plan.step.stacks) > 1 else "tokens"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in asdict(plan.duration).items() if value)
    yield "time, an estimate that has not been held against a GPU"
    yield f"  {useful:.3g} FLOPs a step" + (f", {done:.3g} computed" if done > useful * 1.01 else "")
    yield f"  {seconds:.3g} s a step ({parts}), {plan.tokens_per_second:,.0f} {read} a second, MFU {plan.mfu:.0%}"
    if plan.steps:
        days = seconds * plan.steps / 86400
        yield f"  {plan.steps:,} steps: {plan.steps * _tokens(plan):.3g} tokens, {days:.3g} days"


def _others(plan: Plan, every: bool) -> Iterator[str]:
    fit = [each for each in plan.choices if each.fits]
    shown = plan.choices if every else (fit or plan.choices)[:_SHOWN]
    size = f"a step of {_rows(plan, plan.layout.global_rows)} on {_many(plan.layout.gpus, 'GPU')}"
    yield f"layouts for {size}; speed: 1 is the one asked for"
    yield "  tensor  pipeline  data  micro-batches  optimizer  recompute     memory  fits  speed  largest micro-batch"
    for each in shown:
        layout = each.layout
        yield (
            f"  {layout.tensor:6}{layout.pipeline:10}{layout.data:6}{f'{layout.micro_batches} of {layout.rows}':>15}"
            f"  {'sharded' if layout.sharded else 'whole':9}  {'none' if layout.recompute == 'none' else 'full':9}"
            f"{each.memory / _GIB:6.1f} GiB  {'yes' if each.fits else 'no':4}{each.speed / plan.asked.speed:7.2f}"
            f"{largest(plan.step, layout, plan.device):21}"
        )
    if len(shown) < len(plan.choices):
        yield f"  {len(fit)} of {len(plan.choices)} fit; --all shows them all"
    if plan.best is None:
        yield "none fits: take more GPUs or larger ones, or a smaller model.micro_batch_size"
    elif not plan.advice:
        yield "the layout asked for is the fastest that fits"
    elif plan.asked.fits and plan.best.speed < 1.02 * plan.asked.speed:
        yield "the layout asked for is as fast as any that fits"
    else:
        yield f"recommended, with the rest as it is: {' '.join(plan.advice)}"


def _tokens(plan: Plan) -> float:
    """Tokens of a step, of all stacks."""
    return plan.layout.global_rows * sum(tokens.row for tokens in plan.step.tokens)


def _rows(plan: Plan, count: int) -> str:
    return _many(count, "row" if plan.step.tokens[0].grain == 1 else "sequence")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")
