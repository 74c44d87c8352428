# SPDX-License-Identifier: Apache-2.0
"""Small models of all families learn on synthetic data as they did when `bands.json` was recorded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bionemo.config.compose import load
from tests.conftest import ROOT
from tests.support.mock_molecules import write_molecules
from tests.support.runs import logged, train

Curve = dict[int, float]  # validation loss in nats by step

SEEDS = (1, 2, 3)
RECORDED: dict[str, list[Curve]] = {
    name: [{int(step): loss for step, loss in curve.items()} for curve in curves]
    for name, curves in json.loads((ROOT / "tests" / "fixtures" / "bands.json").read_text()).items()
}
PROTEINS = (
    "data@model.data=mock", "model.data.num_workers=1", "model.hidden_size=64", "model.num_attention_heads=4",
    "model.replica_batch_size=16", "model.seq_length=256", "model.hidden_dropout=0", "model.attention_dropout=0",
    "model.optim.name=muon", "model.optim.lr=6e-3",
)  # fmt: skip
ENCODER = (*PROTEINS, "model.num_layers=6", "model.optim.sched.warmup_steps=100")


@dataclass(frozen=True)
class Recipe:
    """A small model of a family; the loss is measured after each quarter of the steps."""

    steps: int
    config: str
    overrides: tuple[str, ...] = ()


RECIPES = {
    "esm2nv": Recipe(1000, "pretrain_esm2_mock"),
    "esm1nv": Recipe(1200, "pretrain", ("model=esm1nv_small", *ENCODER, "model.optim.sched.constant_steps=0")),
    "esm1b": Recipe(800, "pretrain", ("model=esm1b_small", *ENCODER)),
    "prott5nv": Recipe(
        800, "pretrain",
        ("model=prott5nv_small", *PROTEINS, "model.num_layers=3", "model.data.seq_length_dec=128"),
    ),
    "megamolbart": Recipe(
        400, "pretrain",
        ("model=megamolbart_xsmall", "model.data.dataset={train: x000, val: x000}", "model.data.num_workers=1",
         "model.hidden_size=128", "model.seq_length=128", "model.replica_batch_size=32", "model.optim.lr=0.4",
         "model.optim.sched.warmup_steps=100"),
    ),
    "gpt3": Recipe(200, "pretrain_gpt3_mock"),
}  # fmt: skip


def train_recipe(name: str, seed: int, directory: Path, *overrides: str) -> Curve:
    """Train a recipe with one seed of weights, training masks and order; return its validation losses."""
    recipe = RECIPES[name]
    given = [
        *recipe.overrides, f"name={name}", f"model.seed={seed}", f"exp_manager.exp_dir={directory}",
        f"model.data.val.seed={SEEDS[0]}",  # the same masks for all seeds
        f"trainer.max_steps={recipe.steps}", f"trainer.val_check_interval={recipe.steps // 4}", "trainer.devices=1",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
        "exp_manager.checkpoint_callback_params.save_top_k=1", *overrides,
    ]  # fmt: skip
    if name == "megamolbart":
        write_molecules(directory / "molecules", {"train": 20_000, "val": 256})
        given.append(f"model.data.dataset_path={directory / 'molecules'}")
    train(load(recipe.config, given))
    return logged(directory, "val_loss")


def band(recorded: Sequence[Curve], count: int) -> dict[int, tuple[float, float]]:
    """Return mean and tolerance by step.

    The tolerance is 4 standard deviations of the difference between the recorded mean and that of `count` runs, and at
    least 1 % of the loss.
    """
    found = {}
    for step in recorded[0]:
        losses = np.array([curve[step] for curve in recorded])
        deviation = losses.std(ddof=1) * (1 / len(losses) + 1 / count) ** 0.5
        mean = float(losses.mean())
        found[step] = mean, max(4 * float(deviation), 0.01 * mean)
    return found


def outside(name: str, measured: Sequence[Curve]) -> dict[int, float]:
    """Return the mean losses outside the band of a family by step."""
    expected = band(RECORDED[name], len(measured))
    assert all(list(curve) == list(expected) for curve in measured)
    means = {step: float(np.mean([curve[step] for curve in measured])) for step in expected}
    return {step: loss for step, loss in means.items() if not abs(loss - expected[step][0]) <= expected[step][1]}


def test_every_family_has_a_band_that_is_narrow_compared_with_what_is_learned() -> None:
    assert set(RECORDED) == set(RECIPES)
    for name, curves in RECORDED.items():
        quarter = RECIPES[name].steps // 4
        assert [list(curve) for curve in curves] == [[quarter, 2 * quarter, 3 * quarter, 4 * quarter]] * len(SEEDS)
        expected = band(curves, len(SEEDS))
        losses = [loss for loss, _ in expected.values()]
        assert losses == sorted(losses, reverse=True), f"{name} does not learn"
        assert expected[4 * quarter][1] < 0.25 * (losses[0] - losses[-1]), name


def test_the_band_of_a_hand_computed_case() -> None:
    # mean 2 and standard deviation 0.1; difference of two means of 3: 0.1 * sqrt(2 / 3); times 4
    recorded = [{10: 1.9, 20: 1.0}, {10: 2.0, 20: 1.0}, {10: 2.1, 20: 1.0}]
    assert band(recorded, 3)[10] == pytest.approx((2.0, 0.32660), abs=1e-5)
    assert band(recorded, 3)[20] == (1.0, 0.01)
    assert band(recorded, 1)[10] == pytest.approx((2.0, 0.46188), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_all_families_learn_as_recorded(tmp_path: Path, name: str) -> None:
    assert not outside(name, [train_recipe(name, seed, tmp_path / str(seed)) for seed in SEEDS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    ["model.optim.lr=1e-3", "model.hidden_dropout=0.2", "model.optim.sched.anneal_percentage=1",
     "model.data.mask_percent=0.5 model.data.perturb_percent=0.4"],
)  # fmt: skip
def test_harm_is_detected(tmp_path: Path, harm: str) -> None:
    assert outside("esm2nv", [train_recipe("esm2nv", 1, tmp_path, *harm.split())])
