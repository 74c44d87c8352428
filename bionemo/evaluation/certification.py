# SPDX-License-Identifier: Apache-2.0
"""Certification: small models of all families learn as they did when `bands.json` was recorded.

Each recipe is trained with several seeds on synthetic data. The mean validation loss at several steps must be within a
band around the recorded one, so that a change of the code that harms learning is detected.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.common.figures import new_figure, to_svg
from bionemo.common.files import create_owned, write_atomic
from bionemo.common.regular import load_json
from bionemo.evaluation.html import html_page, html_table
from bionemo.evaluation.mock_molecules import write_molecules
from bionemo.evaluation.training_runs import Curve, pretrain
from bionemo.inference.progress import progress_bar

SEEDS = (1, 2, 3)
RESULT_NAME, PAGE_NAME = "bands.json", "certification.html"
_BANDS = Path(__file__).parent / RESULT_NAME
_KIND = "a certification"  # of the output directory, see `create_owned`
_MIN_TOLERANCE = 0.01  # of the loss
_DEVIATIONS = 4.0  # standard deviations of the difference of two means
_PROTEINS = (
    "data@model.data=mock", "model.data.num_workers=1", "model.hidden_size=64", "model.num_attention_heads=4",
    "model.replica_batch_size=16", "model.seq_length=256", "model.hidden_dropout=0", "model.attention_dropout=0",
    "model.optim.name=muon", "model.optim.lr=6e-3",
)  # fmt: skip
_ENCODER = (*_PROTEINS, "model.num_layers=6", "model.optim.sched.warmup_steps=100")


@dataclass(frozen=True)
class Recipe:
    """A small model of a family.

    Attributes:
        steps: number of training steps; the loss is measured after each quarter.
        config: name of the configuration.
        overrides: changed values.
    """

    steps: int
    config: str
    overrides: tuple[str, ...] = ()


RECIPES = {
    "esm2nv": Recipe(1000, "pretrain_esm2_mock"),
    "esm1nv": Recipe(1200, "pretrain", ("model=esm1nv_small", *_ENCODER, "model.optim.sched.constant_steps=0")),
    "esm1b": Recipe(800, "pretrain", ("model=esm1b_small", *_ENCODER)),
    "prott5nv": Recipe(
        800, "pretrain",
        ("model=prott5nv_small", *_PROTEINS, "model.num_layers=3", "model.data.seq_length_dec=128"),
    ),
    "megamolbart": Recipe(
        400, "pretrain",
        ("model=megamolbart_xsmall", "model.data.dataset={train: x000, val: x000}", "model.data.num_workers=1",
         "model.hidden_size=128", "model.seq_length=128", "model.replica_batch_size=32", "model.optim.lr=0.4",
         "model.optim.sched.warmup_steps=100"),
    ),
    "gpt3": Recipe(200, "pretrain_gpt3_mock"),
}  # fmt: skip


def certify(output: Path, recipes: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[str]:
    """Train the recipes, write `bands.json` and `certification.html`, and return a line for each difference.

    A run that is complete in `output` is not repeated.

    Args:
        output: directory of the runs.
        recipes: names of recipes.
        seeds: seeds of the runs of each recipe.

    Raises:
        UserError: if a recipe is unknown, a run fails, or `output` cannot be used.
    """
    for name in recipes:
        if name not in RECIPES:
            raise UserError(f"there is no recipe {name!r}: choose from {', '.join(RECIPES)}")
    output = output.absolute()
    create_owned(output, _KIND)
    curves: dict[str, list[Curve]] = {name: [] for name in recipes}
    with progress_bar("certify", sum(RECIPES[name].steps for name in recipes) * len(seeds), "steps") as advance:
        for name in recipes:
            for seed in seeds:
                curves[name].append(train_recipe(RECIPES[name], seed, output / name / f"seed-{seed}"))
                advance(RECIPES[name].steps)
    recorded = read_bands()
    write_atomic(output / RESULT_NAME, json.dumps(curves, indent=1) + "\n")
    write_atomic(output / PAGE_NAME, _render(curves, recorded))
    return [line for name in recipes for line in compare_curves(name, curves[name], recorded.get(name, []))]


def train_recipe(recipe: Recipe, seed: int, directory: Path, overrides: Sequence[str] = ()) -> Curve:
    """Train a recipe with one seed in a process of its own.

    Args:
        recipe: the recipe.
        seed: seed of weights, training masks and order.
        directory: directory of the run; a run that was interrupted is continued.
        overrides: further overrides.

    Raises:
        UserError: if the run fails.
    """
    every = recipe.steps // 4
    arguments = [
        f"--config-name={recipe.config}", *recipe.overrides, f"name={directory.parent.name}", f"model.seed={seed}",
        f"model.data.val.seed={SEEDS[0]}",  # the same masks for all seeds
        f"trainer.max_steps={recipe.steps}", f"trainer.val_check_interval={every}", "trainer.devices=1", *overrides,
    ]  # fmt: skip
    if any("megamolbart" in override for override in recipe.overrides):
        write_molecules(directory / "molecules", {"train": 20_000, "val": 256})
        arguments.append(f"model.data.dataset_path={directory / 'molecules'}")
    curve = pretrain(directory, arguments, recipe.steps)
    if sorted(curve) != list(range(every, recipe.steps + 1, every)):
        raise UserError(f"{directory} has validation losses of steps {sorted(curve)}: delete it and try again")
    return curve


def read_bands() -> dict[str, list[Curve]]:
    """Return the recorded curves by recipe, one for each seed."""
    recorded: dict[str, list[dict[str, float]]] = load_json(_BANDS, 1 << 20)
    return {
        name: [{int(step): loss for step, loss in curve.items()} for curve in curves]
        for name, curves in recorded.items()
    }


def compare_curves(name: str, measured: Sequence[Curve], recorded: Sequence[Curve]) -> list[str]:
    """Return a line for each step at which the mean loss is outside the band."""
    if not recorded:
        return [f"{name}: no curve is recorded"]
    lines = []
    for step, (expected, tolerance) in band(recorded, len(measured)).items():
        if step not in measured[0]:
            return [f"{name}: curves with other steps are recorded"]
        mean = float(np.mean([curve[step] for curve in measured]))
        if not abs(mean - expected) <= tolerance:
            worse = "worse" if mean > expected else "better"
            lines.append(
                f"{name}: the loss at step {step} is {mean:.4f}, {worse} than {expected:.4f} ± {tolerance:.4f}"
            )
    return lines


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
        found[step] = mean, max(_DEVIATIONS * float(deviation), _MIN_TOLERANCE * mean)
    return found


def _render(curves: Mapping[str, Sequence[Curve]], recorded: Mapping[str, Sequence[Curve]]) -> str:
    parts = ["<p>Validation losses of all seeds, and the band in which their mean must be.</p>"]
    for name, measured in curves.items():
        figure = new_figure(height=3)
        axes = figure.subplots()
        limits = band(recorded[name], len(measured)) if name in recorded else {}
        if limits:
            low, high = ([mean + sign * tolerance for mean, tolerance in limits.values()] for sign in (-1, 1))
            axes.fill_between(list(limits), low, high, alpha=0.25, label="band")
        for number, curve in enumerate(measured):
            axes.plot(list(curve), list(curve.values()), "C1.-", label="seeds" if number == 0 else None)
        axes.set_xlabel("step")
        axes.set_ylabel("validation loss (nats)")
        axes.legend()
        parts += [f"<h2>{name}</h2>", to_svg(figure), html_table(_HEADER, _rows(measured, limits))]
    return html_page("Certification", parts)


_HEADER = ("step", "losses", "mean", "expected")


def _rows(measured: Sequence[Curve], limits: Mapping[int, tuple[float, float]]) -> Iterator[tuple[str, ...]]:
    for step in measured[0]:
        losses = [curve[step] for curve in measured]
        expected = "{:.4f} ± {:.4f}".format(*limits[step]) if step in limits else ""
        yield str(step), ", ".join(f"{loss:.4f}" for loss in losses), f"{np.mean(losses):.4f}", expected
