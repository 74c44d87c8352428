# SPDX-License-Identifier: Apache-2.0
"""Learning rates, compared with NeMo's classes, with v1's formulas and with the values in v1's logs."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import SchedConfig
from bionemo.training.schedules import Schedule, build_schedule
from tests.conftest import EXAMPLES
from tests.support.nemo import lr_scheduler as nemo_schedules


def schedule(name: Any, lr: float, steps: int, **keys: Any) -> Schedule:
    return build_schedule(SchedConfig(name=name, **keys), lr, steps)


def shipped(model: str, config: str, *overrides: str) -> Schedule:
    cfg = load(config, overrides, EXAMPLES / model / "conf")
    return build_schedule(cfg.model.optim.sched, cfg.model.optim.lr, cfg.trainer.max_steps)


# Learning rates in v1's logs of runs of 500 steps. In fp16, 17 of ESM-1nv's updates were skipped.
@pytest.mark.parametrize(
    ("model", "config", "step", "logged"),
    [
        ("esm1nv", "pretrain_small", 482, 1.928e-4),
        ("esm2nv", "pretrain_esm2_8M", 499, 1.2982e-4),
    ],
)
def test_shipped_configurations_give_the_rates_logged_by_v1(model: str, config: str, step: int, logged: float) -> None:
    rate = shipped(model, config, "trainer.max_steps=500")
    assert rate(step) == pytest.approx(logged, rel=1e-4)
    assert shipped(model, config)(step) == pytest.approx(logged, rel=1e-4)  # during warm-up max_steps has no effect


def test_warmup_decay_hold_values_of_the_v1_test() -> None:
    rate = schedule(
        "WarmupAnnealDecayHold", 99.0, 100, warmup_steps=20, min_lr=0.01, max_lr=0.1, anneal_percentage=0.5
    )
    assert [rate(s) for s in (0, 10, 20, 40, 60)] == pytest.approx([0.01, 0.055, 0.1, 0.075, 0.05])
    assert {round(rate(s), 9) for s in range(60, 300)} == {0.05}


def test_esm2_decays_to_a_tenth_and_holds() -> None:
    rate = shipped("esm2nv", "pretrain_esm2_8M")  # 500,000 steps, 2,000 of them warm-up, 4e-5 to 4e-4
    assert (rate(0), rate(1000), rate(2000)) == pytest.approx((4e-5, 2.2e-4, 4e-4))
    assert rate(251_000) == pytest.approx(2e-4)
    assert [rate(s) for s in (460_000, 499_999, 600_000)] == pytest.approx([4e-5] * 3)


def test_cosine_with_constant_steps() -> None:
    rate = shipped("esm1nv", "pretrain_small")  # 1,000,000 steps, 500 of them warm-up, 50,000 constant at the end
    assert rate(0) == 0
    assert [rate(s) for s in (1, 250, 500)] == pytest.approx([4e-7, 1e-4, 2e-4])
    decay = 1_000_000 - 500 - 50_000
    for s in (501, 10_000, 500 + decay // 2, 900_000):
        expected = 2e-5 + 0.5 * (1 + math.cos(math.pi * (s - 500) / decay)) * (2e-4 - 2e-5)
        assert rate(s) == pytest.approx(expected, rel=1e-12)
    assert rate(500 + decay // 2) == pytest.approx(1.1e-4, rel=1e-5)  # halfway between the two
    assert [rate(s) for s in (950_000, 999_999, 2_000_000)] == [2e-5] * 3


def test_cosine_with_constant_steps_and_a_run_too_short_for_them() -> None:
    rate = shipped("esm1nv", "pretrain_small", "trainer.max_steps=20")
    assert [rate(s) for s in range(20)] == pytest.approx([2e-4 * s / 500 for s in range(20)])


def test_cosine_without_constant_steps() -> None:
    rate = schedule("CosineAnnealing", 1.0, 100, warmup_steps=20, min_lr=0.1)
    for s in range(20):
        assert rate(s) == pytest.approx((s + 1) / 21)
    assert rate(20) == pytest.approx(1.0)
    assert rate(60) == pytest.approx(0.55)
    for s in range(20, 101):
        assert rate(s) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * (s - 20) / 80)))
    assert rate(1000) == pytest.approx(0.1)


def test_inverse_square_root() -> None:
    rate = schedule("InverseSquareRootAnnealing", 0.3, 1000, warmup_ratio=0.0199)  # rounded down to 19 steps
    assert [rate(s) for s in (0, 9, 18)] == pytest.approx([0.3 / 20, 0.15, 0.3 * 19 / 20])
    assert [rate(s) for s in (19, 79, 319)] == pytest.approx([0.3, 0.15, 0.075])  # four times the steps, half the rate


def test_noam_peaks_after_the_warmup_and_has_a_floor_only_later() -> None:
    rate = schedule("NoamAnnealing", 2.0, 10**6, warmup_steps=100, d_model=64, min_lr=0.02)
    scale = 2.0 / 8  # lr is a multiplier: d_model ** -0.5 is an eighth
    assert rate(0) == rate(1) == pytest.approx(scale / 1000)  # below the floor
    assert rate(50) == pytest.approx(scale * 50 / 1000)
    assert rate(100) == pytest.approx(scale / 10)
    assert rate(121) == pytest.approx(scale / 11)
    assert rate(10_000) == 0.02  # the formula gives 0.0025
    assert schedule("NoamAnnealing", 1.0, 10, warmup_steps=0, d_model=4, min_lr=0.6)(1) == 0.6


def test_noam_with_a_rate_below_its_floor_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.optim\.lr=0.001 is below model\.optim\.sched\.min_lr=0.01"):
        schedule("NoamAnnealing", 0.001, 10, warmup_steps=1, d_model=4, min_lr=0.01)


def test_warmup_annealing() -> None:
    rate = schedule("WarmupAnnealing", 1.0, 110, warmup_ratio=0.1, min_lr=0.2)
    assert [rate(s) for s in (0, 10)] == pytest.approx([1 / 12, 11 / 12])
    assert [rate(s) for s in (11, 11 + 33, 110, 500)] == pytest.approx([1.0, 1 - 0.8 / 3, 0.2, 0.2])


@pytest.mark.parametrize(
    ("name", "missing"),
    [("WarmupAnnealDecayHold", "max_lr"), ("NoamAnnealing", "d_model")],
)
def test_a_key_that_a_schedule_needs_is_named(name: str, missing: str) -> None:
    with pytest.raises(UserError, match=rf"model\.optim\.sched\.{missing} is not set"):
        schedule(name, 1.0, 100, constant_steps=5)


# NeMo's own classes are the reference.
_NEMO = {
    "CosineAnnealing": nemo_schedules.CosineAnnealing,
    "InverseSquareRootAnnealing": nemo_schedules.InverseSquareRootAnnealing,
    "NoamAnnealing": nemo_schedules.NoamAnnealing,
    "WarmupAnnealing": nemo_schedules.WarmupAnnealing,
}
_LR = 1e-3
_BEYOND = 25  # steps compared after the end of the schedule


def nemo_rates(name: str, steps: int, **keys: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=_LR)
    scheduler = _NEMO[name](optimizer, max_steps=steps, **keys)
    scheduler._get_lr_called_within_step = True  # `scheduler.step()` is five times slower
    rates: list[float] = []
    for scheduler.last_epoch in range(steps + _BEYOND):
        rates += scheduler.get_lr()
    return rates


def settings_of(name: str) -> Iterator[tuple[dict[str, Any], int, int | None]]:
    """Yield keys of a schedule, trainer.max_steps, and sched.max_steps."""
    constants = (None, 0, 5, 50) if name == "CosineAnnealing" else (None,)
    warmups = (
        {}, {"warmup_steps": 0}, {"warmup_steps": 1}, {"warmup_steps": 10}, {"warmup_steps": 40}, {"warmup_steps": 99},
        {"warmup_ratio": 0.0}, {"warmup_ratio": 0.13}, {"warmup_ratio": 0.5}, {"warmup_ratio": 1.0},
    )  # fmt: skip
    ends = ((1, None), (2, None), (40, None), (40, -1), (40, 0), (100, None), (60, 37), (100, 40), (10, 40), (40, 1))
    for warmup, constant, min_lr in itertools.product(warmups, constants, (None, 0.0, 1e-5, 5e-4, _LR)):
        if constant and min_lr == _LR:  # refused by NeMo
            continue
        keys = {"constant_steps": constant, "min_lr": min_lr, "d_model": 64 if name == "NoamAnnealing" else None}
        for trainer_steps, end in ends:
            yield warmup | {key: value for key, value in keys.items() if value is not None}, trainer_steps, end


@pytest.mark.parametrize(("name", "settings"), [(name, 1800 if name == "CosineAnnealing" else 500) for name in _NEMO])
def test_rates_equal_those_of_nemo(name: Any, settings: int) -> None:
    compared = 0
    for keys, trainer_steps, end in settings_of(name):
        expected = nemo_rates(name, trainer_steps if end in (None, -1, 0) else end, **keys)
        rate = schedule(name, _LR, trainer_steps, **keys if end is None else keys | {"max_steps": end})
        found = [rate(step) for step in range(len(expected))]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-18, err_msg=f"{keys, trainer_steps, end}")
        compared += 1
    assert compared == settings


def test_decay_and_hold_does_not_fall_below_its_first_rate() -> None:
    rate = schedule("WarmupAnnealDecayHold", 1.0, 100, warmup_steps=20, min_lr=0.02, max_lr=0.1, anneal_percentage=0.1)
    assert [rate(s) for s in (0, 20, 60, 100, 300)] == pytest.approx([0.02, 0.1, 0.05, 0.02, 0.02])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.optim.sched.name=WarmupAnnealing", "model.optim.sched.min_lr=1"], "is above 0.0002, the"),
        (["model.optim.sched.min_lr=1"], "is above 0.0002, the highest rate"),
        (
            ["model.optim.sched.name=InverseSquareRootAnnealing", "model.optim.sched.min_lr=1e-4",
             "model.optim.sched.warmup_steps=0", "trainer.max_steps=8"],
            "is above 6.66667e-05, the rate that InverseSquareRootAnnealing reaches at its end, step 8",
        ),
    ],
)  # fmt: skip
def test_a_lowest_rate_above_the_others_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        shipped("esm1nv", "pretrain_small", *overrides)
