# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that fit the memory of a GPU, according to the plan."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from bionemo.common.errors import HostError
from bionemo.config.check import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.planning.devices import Device
from bionemo.planning.estimate import Memory, fullest_stage
from bionemo.planning.layouts import Layout, layout_overrides, read_layout
from bionemo.planning.measure import StepProfiler
from bionemo.planning.report import compare_layouts, divide_rows, make_profiler

_GIB = 2**30
_MAX_GPUS = 1024


def fit_micro_batches(cfg: RunConfig, micro_batches: MicroBatches, precision: str, device: Device) -> MicroBatches:
    """Divide the rows of a step so that a micro-batch fits; an explicit `model.micro_batch_size` is not changed.

    Args:
        cfg: configuration of the run; `trainer.devices` is a number.
        micro_batches: micro-batches of the configuration.
        precision: precision of matrix products.
        device: GPU of this machine.

    Raises:
        HostError: if a micro-batch of one row does not fit, or with an explicit size, weights, gradients and optimizer
            state do not. The message names a layout that fits, if there is one.
    """
    if torch.distributed.is_initialized():  # by an earlier run of a sweep; the profile needs process groups of its own
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(fit_micro_batches, cfg, micro_batches, precision, device).result()
    profiler = make_profiler(cfg, precision, device)
    automatic = cfg.model.micro_batch_size == "auto"
    layout = replace(read_layout(cfg), micro_batch_size=micro_batches.size, num_micro_batches=micro_batches.count)
    if automatic and (fitting := divide_rows(profiler, layout, device)).largest:
        return fitting
    smallest = replace(layout, micro_batch_size=1, num_micro_batches=micro_batches.size * micro_batches.count)
    memory = fullest_stage(profiler, smallest)[1]
    if not automatic and _states(memory) <= device.memory * 2**20:
        return micro_batches
    raise HostError(_too_small(cfg, profiler, smallest, device, memory))


def _states(memory: Memory) -> int:
    return memory.weights + memory.gradients + memory.moments


def _too_small(cfg: RunConfig, profiler: StepProfiler, layout: Layout, device: Device, memory: Memory) -> str:
    """Return one line about the missing memory and the smallest number of GPUs on which a layout fits.

    `layout` has micro-batches of one row.
    """
    line = (
        f"{device.name} has {device.memory / 1024:.1f} GiB, but one row per step needs {memory.total / _GIB:.1f} GiB "
        f"according to `bionemo plan`, {_states(memory) / _GIB:.1f} of them for weights, gradients and optimizer: "
    )
    gpus, rows = layout.gpus, cfg.model.global_batch_size or 0
    while gpus <= _MAX_GPUS:
        larger = replace(layout, data=layout.data * gpus // layout.gpus)
        for choice in compare_layouts(profiler, larger, device):
            if choice.fits and rows % choice.layout.data == 0:
                overrides = " ".join(_overrides(cfg, choice.layout, layout))
                return line + f"on {gpus} GPU{'s' if gpus > 1 else ''}, this layout fits: {overrides}"
        gpus *= 2
    return line + "use a smaller model or larger GPUs"


def _overrides(cfg: RunConfig, layout: Layout, requested: Layout) -> Iterator[str]:
    """Yield the overrides for a layout; the rows of a step stay those of the configuration."""
    size, count = requested.micro_batch_size, requested.num_micro_batches
    yield from layout_overrides(replace(layout, micro_batch_size=size, num_micro_batches=count), requested)
    if cfg.model.micro_batch_size not in ("auto", 1):
        yield "model.micro_batch_size=1"
        yield f"trainer.accumulate_grad_batches={count if cfg.model.global_batch_size is None else 'null'}"
