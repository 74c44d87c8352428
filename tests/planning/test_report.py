# SPDX-License-Identifier: Apache-2.0
"""Alternative layouts are valid, fit if the plan says so, and are ordered by speed."""

from dataclasses import replace

import pytest
import yaml

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.planning.devices import DEVICES, find_device
from bionemo.planning.estimate import estimate_duration, fullest_stage, useful_flops
from bionemo.planning.layouts import Layout, layout_overrides, read_layout
from bionemo.planning.lengths import estimate_tokens
from bionemo.planning.measure import StepProfiler
from bionemo.planning.report import alternative_layouts, compare_layouts, evaluate_layout, largest_micro_batch
from tests.conftest import EXAMPLES
from tests.planning.simulated_rank import FAMILIES, config

H100 = DEVICES["h100"]


def load_3b(*arguments: str) -> RunConfig:
    return load("pretrain_esm2_3B", ["trainer.devices=8", *arguments], EXAMPLES / "esm2nv" / "conf")


@pytest.fixture(scope="module")
def cfg() -> RunConfig:
    return load_3b("trainer.precision=bf16-mixed", "model.micro_batch_size=4")


@pytest.fixture(scope="module")
def profiler(cfg: RunConfig) -> StepProfiler:
    return StepProfiler(cfg.model, estimate_tokens(cfg.model), half=True)


def test_alternative_layouts_of_eight_gpus(cfg: RunConfig, profiler: StepProfiler) -> None:
    requested = read_layout(cfg)
    found = list(alternative_layouts(profiler, requested))
    sizes = {(layout.tensor, layout.pipeline) for layout in found}
    assert sizes == {
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
        (1, 2),
        (2, 2),
        (4, 2),
        (1, 4),
        (2, 4),
    }  # 36 layers cannot be divided into 8 stages
    for layout in found:
        assert (layout.gpus, layout.global_batch_size) == (8, requested.global_batch_size)
        assert layout.micro_batch_size <= requested.micro_batch_size
        assert layout.sharded <= (layout.data > 1)


def test_overrides_select_the_layout(cfg: RunConfig, profiler: StepProfiler) -> None:
    requested = read_layout(cfg)
    assert layout_overrides(requested, requested) == []
    for layout in list(alternative_layouts(profiler, requested))[3::17]:
        typed = load_3b(
            "trainer.precision=bf16-mixed", "model.micro_batch_size=4", *layout_overrides(layout, requested)
        )
        assert read_layout(typed) == layout


@pytest.mark.parametrize("rows", ["model.replica_batch_size=12", "model.global_batch_size=48"])
def test_overrides_with_automatic_micro_batches(profiler: StepProfiler, rows: str) -> None:
    """The overrides select the layout and do not change the rows of a step, or leave the micro-batches automatic."""
    planned = replace(read_layout(load_3b("model.micro_batch_size=4")), num_micro_batches=3)  # 48 rows
    for layout in list(alternative_layouts(profiler, planned))[3::17]:
        typed = load_3b("trainer.precision=bf16-mixed", rows, *layout_overrides(layout, planned, automatic=True))
        found = read_layout(typed)
        if typed.model.micro_batch_size == "auto":
            assert found.global_batch_size == 48
            found = replace(found, micro_batch_size=4, num_micro_batches=3)
        assert found == layout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt3", "megamolbart"))) for name in FAMILIES]
)
def test_alternative_layouts_of_every_family(name: str) -> None:
    cfg = config(name, gpus=4)
    requested, profiler = read_layout(cfg), StepProfiler(cfg.model, estimate_tokens(cfg.model), half=True)
    found = list(alternative_layouts(profiler, requested))
    sizes = {(layout.tensor, layout.pipeline) for layout in found}
    divided = {(1, 1), (2, 1), (4, 1)}
    names = {"model.optim.name": "optimizer", "trainer.accumulate_grad_batches": "accumulate"}  # to `config`
    assert sizes == divided if name in ("prott5nv", "megamolbart") else divided | {(1, 2), (2, 2), (1, 4)}
    for layout in found:
        pairs = (override.split("=") for override in layout_overrides(layout, requested))
        typed = {names.get(key, key.removeprefix("model.")): yaml.safe_load(value) for key, value in pairs}
        assert read_layout(config(name, 4, **typed)) == layout  # `config` also validates it
        assert evaluate_layout(profiler, layout, H100).fits
        assert estimate_duration(profiler, layout, H100).compute > 0


def test_fitting_layouts_come_first_sorted_by_speed(cfg: RunConfig, profiler: StepProfiler) -> None:
    small = replace(H100, memory=40 * 1024)
    found = compare_layouts(profiler, read_layout(cfg), small)
    fit = [each for each in found if each.fits]
    assert found[: len(fit)] == fit != found
    assert [each.speed for each in fit] == sorted((each.speed for each in fit), reverse=True)
    assert max(each.memory for each in fit) <= 0.92 * 40 * 2**30 < min(each.memory for each in found[len(fit) :])


def test_largest_micro_batch_fits_and_one_row_more_does_not(profiler: StepProfiler) -> None:
    for layout in (Layout(2, data=4), Layout(1, 4, 2, num_micro_batches=8), Layout(8, recompute="uniform")):
        rows = largest_micro_batch(profiler, layout, H100)
        assert fullest_stage(profiler, replace(layout, micro_batch_size=rows))[1].total <= H100.usable
        assert fullest_stage(profiler, replace(layout, micro_batch_size=rows + 1))[1].total > H100.usable
    assert largest_micro_batch(profiler, Layout(), replace(H100, memory=1024)) == 0


def test_memory_uses_the_largest_micro_batch_and_duration_the_mean() -> None:
    cfg = config("megamolbart", micro_batch_size=32)
    profiler, layout = StepProfiler(cfg.model, estimate_tokens(cfg.model), half=True), read_layout(cfg)
    even = replace(profiler, tokens=tuple(replace(tokens, row_deviation=0.0) for tokens in profiler.tokens))
    assert 1.1 < fullest_stage(profiler, layout)[1].activations / fullest_stage(even, layout)[1].activations < 1.3
    assert estimate_duration(profiler, layout, H100) == estimate_duration(even, layout, H100)
    assert profiler.largest_tokens(10**6)[0].row == pytest.approx(profiler.tokens[0].row, rel=0.002)


def test_given_mfu_replaces_the_duration_model(profiler: StepProfiler) -> None:
    layout = Layout(2, data=4, micro_batch_size=4)
    assert estimate_duration(profiler, layout, H100, mfu=0.4).total == useful_flops(profiler, layout) / (
        8 * 0.4 * 989e12
    )


def test_effects_on_the_duration(profiler: StepProfiler) -> None:
    plain = Layout(data=8, micro_batch_size=4)
    base = estimate_duration(profiler, plain, H100)
    assert 0.1 < useful_flops(profiler, plain) / (8 * 989e12) / base.total < 0.6
    assert 1.15 < estimate_duration(profiler, replace(plain, recompute="uniform"), H100).compute / base.compute < 4 / 3
    assert estimate_duration(profiler, replace(plain, num_micro_batches=2), H100).compute == pytest.approx(
        2 * base.compute
    )
    staged = [
        estimate_duration(profiler, Layout(1, 4, 2, micro_batch_size=4, num_micro_batches=count), H100)
        for count in (1, 12)
    ]
    assert [each.bubble / (each.compute + each.tensor) for each in staged] == pytest.approx([3, 3 / 12])
    assert (
        estimate_duration(profiler, Layout(8, micro_batch_size=4, gpus_per_node=1), H100).tensor
        > estimate_duration(profiler, Layout(8, micro_batch_size=4), H100).tensor
        > 0
    )
    assert estimate_duration(profiler, plain, DEVICES["a100-80"]).total > base.total


@pytest.mark.parametrize(("devices", "count"), [(4, 4), ("4", 4), ("0,1", 2), ("3,", 1), ([0, 1, 5], 3)])
def test_devices_are_counted_as_by_lightning(cfg: RunConfig, devices: object, count: int) -> None:
    trainer = replace(cfg.trainer, devices=devices, num_nodes=2)
    assert read_layout(replace(cfg, trainer=trainer)).gpus == 2 * count


def test_errors(cfg: RunConfig) -> None:
    for devices, message in {"auto": "depends on the machine", (0,): "not divisible"}.items():
        given = list(devices) if isinstance(devices, tuple) else devices
        with pytest.raises(UserError, match=message):
            read_layout(replace(cfg, trainer=replace(cfg.trainer, devices=given)))
    with pytest.raises(UserError, match="16-mixed"):
        find_device("v100", "bf16-mixed")
    with pytest.raises(UserError, match="h100"):
        find_device("h1000", "32")
