# SPDX-License-Identifier: Apache-2.0
"""Estimates of a plan: number of GPUs, automatic micro-batches, and effects on the duration."""

from dataclasses import replace

import pytest

from bionemo.common.errors import UserError
from bionemo.common.gpus import DEVICES, find_device
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import RunConfig
from bionemo.planning.layouts import Layout, read_layout
from bionemo.planning.measure import measure_step
from bionemo.planning.report import Duration, estimate_duration, make_plan, make_step
from tests.planning.simulated_rank import config

H100 = DEVICES["h100"]
PEAK = 989e12


def duration(layout: Layout, **changes: object) -> Duration:
    step = make_step(config("esm2nv", **changes), "bf16-mixed", H100)
    return estimate_duration(measure_step(step, layout, 0), layout, H100, PEAK, sharded=False)


def test_effects_on_the_duration() -> None:
    """The base has large layers, whose kernels take longer than their launch."""
    size = {"hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16, "seq_length": 1024}
    layout = Layout(1, 1, 8, 8, MicroBatches(4, 1))
    base = duration(layout, **size)
    full = {"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform"}
    assert 1.15 < duration(layout, **size, **full).compute / base.compute < 4 / 3
    twice = duration(replace(layout, micro_batches=MicroBatches(4, 2)), **size)
    assert twice.compute == pytest.approx(2 * base.compute, rel=0.03)
    stages = replace(layout, pipeline=2, data=4, micro_batches=MicroBatches(4, 6))
    staged = duration(stages, **size, pipeline_model_parallel_size=2, gpus=8)
    assert staged.bubble == pytest.approx(staged.compute / 6)
    divided = replace(layout, tensor=2, data=4)
    near = duration(divided, **size, tensor_model_parallel_size=2, gpus=8)
    far = duration(replace(divided, gpus_per_node=1), **size, tensor_model_parallel_size=2, gpus=8)
    assert far.tensor > near.tensor > base.tensor == 0


def test_an_automatic_micro_batch_is_halved_until_it_fits() -> None:
    cfg = config("esm2nv", micro_batch_size="auto", replica_batch_size=12)
    whole = make_plan(cfg, read_layout(cfg), H100)
    assert whole.layout.micro_batches == MicroBatches(12, 1)
    needed = whole.memory.total / 2**20 / 0.92
    small = make_plan(cfg, read_layout(cfg), replace(H100, memory=int(needed) - 1))
    assert small.layout.micro_batches == MicroBatches(6, 2)
    assert small.fits
    assert small.flops == pytest.approx(whole.flops, rel=0.001)


@pytest.mark.parametrize(("devices", "count"), [(4, 4), ("4", 4), ("0,1", 2), ("3,", 1), ([0, 1, 5], 3)])
def test_devices_are_counted_as_by_lightning(devices: object, count: int) -> None:
    assert read_layout(with_devices(devices, num_nodes=2)).gpus == 2 * count


def with_devices(devices: object, **changes: object) -> RunConfig:
    cfg = config("esm2nv")
    return replace(cfg, trainer=replace(cfg.trainer, devices=devices, **changes))


def test_errors() -> None:
    with pytest.raises(UserError, match="depends on the machine"):
        read_layout(with_devices("auto"))
    with pytest.raises(UserError, match="16-mixed"):
        find_device("v100", "bf16-mixed")
    with pytest.raises(UserError, match="h100"):
        find_device("h1000", "32")
