# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest layout and micro-batch that fit, with the same GPUs and rows of a step."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from typing import Literal

from bionemo.config.check import check_config
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.planning.layouts import read_layout
from bionemo.planning.report import GIB, Plan, format_time, make_plan

KEYS = (  # what a search changes
    "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.sequence_parallel",
    "model.activations_checkpoint_granularity", "model.activations_checkpoint_method",
    "model.activations_checkpoint_num_layers", "model.micro_batch_size", "model.global_batch_size",
    "model.optim.name", "trainer.accumulate_grad_batches",
)  # fmt: skip
_EQUAL = 1.03  # times of the fastest layout


def search_layouts(cfg: RunConfig, requested: Plan) -> tuple[list[tuple[Plan, RunConfig]], str]:
    """Return plans and configurations of layouts that fit, the fastest first, and, if there are none, the limit.

    Of layouts whose estimated times differ from the fastest by less than the estimate is worth, the simplest is first.
    A replica has at most twice as many GPUs as in the fastest layout with fewer. If there are several replicas, they
    divide the moments of AdamW, which does not change the updates. Layers are recomputed if no row fits otherwise.
    """
    found: list[tuple[Plan, RunConfig]] = []
    limits: list[tuple[float, str]] = []
    gpus, per_node = requested.layout.gpus, requested.layout.gpus_per_node
    sizes = [(t, p) for t, p in product(range(1, gpus + 1), repeat=2) if gpus % (t * p) == 0 and per_node % t == 0]
    for tensor, pipeline in sorted(sizes, key=lambda each: each[0] * each[1]):
        if found and tensor * pipeline > 2 * gpus // found[0][0].layout.data:
            break
        fitting = [*_grow(cfg, requested, tensor, pipeline, None, limits)]
        fitting += [] if fitting else _grow(cfg, requested, tensor, pipeline, "full", limits)
        found = sorted([*found, *fitting], key=lambda each: each[0].duration.total)
    equal = [each for each in found if each[0].duration.total <= _EQUAL * found[0][0].duration.total]
    equal.sort(key=lambda each: each[0].layout.tensor * each[0].layout.pipeline)
    found[: len(equal)] = equal
    return found, "" if found else min(limits, key=lambda each: each[0])[1]


def _grow(
    cfg: RunConfig, requested: Plan, tensor: int, pipeline: int, recompute: Literal["full"] | None,
    limits: list[tuple[float, str]],
) -> Iterator[tuple[Plan, RunConfig]]:  # fmt: skip
    """Yield layouts with a growing micro-batch, until one is slower or does not fit; add its limit to `limits`."""
    rows, data, fastest = requested.layout.global_batch_size, requested.layout.gpus // (tensor * pipeline), inf
    optim, whole = cfg.model.optim, MicroBatches(rows // data, 1)
    if data > 1 and optim.name in ("fused_adam", "adamw"):
        optim = replace(optim, name="distributed_fused_adam")
    for size in dict.fromkeys(whole.limit(2**n).size for n in range(whole.size.bit_length() or 1)):
        model = replace(
            cfg.model,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            sequence_parallel=tensor > 1,
            activations_checkpoint_granularity=recompute,
            activations_checkpoint_method=recompute and "uniform",
            activations_checkpoint_num_layers=1 if recompute else cfg.model.activations_checkpoint_num_layers,
            micro_batch_size=size,
            global_batch_size=rows,
            optim=optim,
        )
        changed = replace(cfg, model=model, trainer=replace(cfg.trainer, accumulate_grad_batches=1))
        layout = f"data {data} x tensor {tensor} x pipeline {pipeline} with micro-batches of {size} rows"
        if problems := check_config(changed):
            limits.append((inf, f"{layout}: {problems[0]}"))
            return
        plan = make_plan(changed, read_layout(changed), requested.device, requested)
        needed, usable = plan.memory.total / GIB, f"{plan.device.usable / GIB:.1f} GiB of {plan.device.name}"
        limits.append((needed, f"{layout} needs {needed:.1f} GiB per GPU, but {usable} can be used"))
        if not plan.fits or plan.duration.total >= fastest:
            return
        fastest = plan.duration.total
        yield plan, changed


def as_table(found: list[tuple[Plan, RunConfig]]) -> Iterator[str]:
    """Yield the lines of a table of layouts."""
    yield "layouts with the same rows of a step that fit: the simplest of the fastest (within 3 %), then by time"
    heads = "  data  tensor  pipeline  micro-batches  optimizer               recompute     memory  s per step"
    yield f"{heads}          run"
    for plan, cfg in found:
        layout, seconds = plan.layout, plan.duration.total
        yield (
            f"{layout.data:6}{layout.tensor:8}{layout.pipeline:10}"
            f"{f'{layout.micro_batches.count} x {layout.micro_batches.size}':>15}  {cfg.model.optim.name:22}  "
            f"{cfg.model.activations_checkpoint_granularity or 'nothing':9}{plan.memory.total / GIB:7.1f} GiB"
            f"{seconds:12.3g}{format_time(seconds * plan.steps) if plan.steps else '':>13}"
        )
