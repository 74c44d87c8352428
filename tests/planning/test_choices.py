# SPDX-License-Identifier: Apache-2.0
"""Layouts that are offered are valid, and say truly whether they fit."""

from dataclasses import replace

import pytest
import yaml

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.planning.choices import alternatives, choice, choices, largest, overrides
from bionemo.planning.devices import DEVICES, device
from bionemo.planning.duration import duration
from bionemo.planning.flops import of_update
from bionemo.planning.layout import Layout, layout_of
from bionemo.planning.lengths import tokens_of
from bionemo.planning.memory import fullest
from bionemo.planning.sizes import shape_of
from bionemo.planning.step import Step
from tests.conftest import EXAMPLES
from tests.planning.alone import FAMILIES, config

H100 = DEVICES["h100"]


def load_3b(*words: str) -> RunConfig:
    return load("pretrain_esm2_3B", ["trainer.devices=8", *words], EXAMPLES / "esm2nv" / "conf")


@pytest.fixture(scope="module")
def cfg() -> RunConfig:
    return load_3b("trainer.precision=bf16-mixed", "model.micro_batch_size=4")


@pytest.fixture(scope="module")
def step(cfg: RunConfig) -> Step:
    return Step(shape_of(cfg.model), tokens_of(cfg.model), half=True)


def test_all_ways_to_divide_eight_gpus(cfg: RunConfig, step: Step) -> None:
    asked = layout_of(cfg)
    found = list(alternatives(step, asked))
    ways = {(layout.tensor, layout.pipeline) for layout in found}
    assert ways == {
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
        (1, 2),
        (2, 2),
        (4, 2),
        (1, 4),
        (2, 4),
    }  # 36 layers are no 8 stages
    for layout in found:
        assert (layout.gpus, layout.global_rows) == (8, asked.global_rows)
        assert layout.rows <= asked.rows
        assert layout.sharded <= (layout.data > 1)


def test_what_to_type_gives_the_layout(cfg: RunConfig, step: Step) -> None:
    asked = layout_of(cfg)
    assert overrides(asked, asked) == []
    for layout in list(alternatives(step, asked))[3::17]:
        typed = load_3b("trainer.precision=bf16-mixed", "model.micro_batch_size=4", *overrides(layout, asked))
        assert layout_of(typed) == layout


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_divided_as_it_may_be(name: str) -> None:
    cfg = config(name, gpus=4)
    asked, step = layout_of(cfg), Step(shape_of(cfg.model), tokens_of(cfg.model), half=True)
    found = list(alternatives(step, asked))
    ways = {(layout.tensor, layout.pipeline) for layout in found}
    divided = {(1, 1), (2, 1), (4, 1)}
    names = {"model.optim.name": "optimizer", "trainer.accumulate_grad_batches": "accumulate"}  # to `config`
    assert ways == divided if name in ("prott5nv", "megamolbart") else divided | {(1, 2), (2, 2), (1, 4)}
    for layout in found:
        words = (word.split("=") for word in overrides(layout, asked))
        typed = {names.get(key, key.removeprefix("model.")): yaml.safe_load(value) for key, value in words}
        assert layout_of(config(name, 4, **typed)) == layout  # which has been checked, too
        assert choice(step, layout, H100).fits
        assert duration(step, layout, H100).compute > 0


def test_fitting_layouts_come_first_the_fastest_of_them_at_the_top(cfg: RunConfig, step: Step) -> None:
    small = replace(H100, memory=40 * 1024)
    found = choices(step, layout_of(cfg), small)
    fit = [each for each in found if each.fits]
    assert found[: len(fit)] == fit != found
    assert [each.speed for each in fit] == sorted((each.speed for each in fit), reverse=True)
    assert max(each.memory for each in fit) <= 0.92 * 40 * 2**30 < min(each.memory for each in found[len(fit) :])


def test_the_largest_micro_batch_fits_and_one_row_more_does_not(step: Step) -> None:
    for layout in (Layout(2, data=4), Layout(1, 4, 2, micro_batches=8), Layout(8, recompute="uniform")):
        rows = largest(step, layout, H100)
        assert fullest(step, replace(layout, rows=rows))[1].total <= H100.usable
        assert fullest(step, replace(layout, rows=rows + 1))[1].total > H100.usable
    assert largest(step, Layout(), replace(H100, memory=1024)) == 0


def test_memory_is_that_of_the_largest_micro_batch_and_time_that_of_the_mean() -> None:
    cfg = config("megamolbart", micro_batch_size=32)
    step, layout = Step(shape_of(cfg.model), tokens_of(cfg.model), half=True), layout_of(cfg)
    even = replace(step, tokens=tuple(replace(tokens, spread=0.0) for tokens in step.tokens))
    assert 1.1 < fullest(step, layout)[1].activations / fullest(even, layout)[1].activations < 1.3
    assert duration(step, layout, H100) == duration(even, layout, H100)
    assert step.crowded(10**6).tokens[0].row == pytest.approx(step.tokens[0].row, rel=0.002)


def test_a_known_share_of_the_peak_is_all_that_counts(step: Step) -> None:
    layout = Layout(2, data=4, rows=4)
    assert duration(step, layout, H100, mfu=0.4).total == of_update(step, layout) / (8 * 0.4 * 989e12)


def test_what_makes_a_step_longer(step: Step) -> None:
    plain = Layout(data=8, rows=4)
    base = duration(step, plain, H100)
    assert 0.1 < of_update(step, plain) / (8 * 989e12) / base.total < 0.6
    assert 1.15 < duration(step, replace(plain, recompute="uniform"), H100).compute / base.compute < 4 / 3
    assert duration(step, replace(plain, micro_batches=2), H100).compute == pytest.approx(2 * base.compute)
    staged = [duration(step, Layout(1, 4, 2, rows=4, micro_batches=count), H100) for count in (1, 12)]
    assert [each.bubble / (each.compute + each.tensor) for each in staged] == pytest.approx([3, 3 / 12])
    assert duration(step, Layout(8, rows=4, node=1), H100).tensor > duration(step, Layout(8, rows=4), H100).tensor > 0
    assert duration(step, plain, DEVICES["a100-80"]).total > base.total


@pytest.mark.parametrize(("given", "count"), [(4, 4), ("4", 4), ("0,1", 2), ("3,", 1), ([0, 1, 5], 3)])
def test_devices_are_counted_as_lightning_does(cfg: RunConfig, given: object, count: int) -> None:
    trainer = replace(cfg.trainer, devices=given, num_nodes=2)
    assert layout_of(replace(cfg, trainer=trainer)).gpus == 2 * count


def test_what_cannot_be_planned_says_so(cfg: RunConfig) -> None:
    for devices, words in {"auto": "only the machine itself", (0,): "not divisible"}.items():
        given = list(devices) if isinstance(devices, tuple) else devices
        with pytest.raises(UserError, match=words):
            layout_of(replace(cfg, trainer=replace(cfg.trainer, devices=given)))
    with pytest.raises(UserError, match="16-mixed"):
        device("v100", "bf16-mixed")
    with pytest.raises(UserError, match="h100"):
        device("h1000", "32")
