# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any parallel layout is loaded bitwise by any other, with any number of processes."""

from pathlib import Path

import pytest
import torch

from bionemo.checkpoint import Checkpoint, find_damage
from tests.support.parallel_layouts import UP_TO_FOUR, Layout, Run, on_every_process
from tests.support.runs import FAMILIES

BEFORE, AFTER = 3, 5


def train_and_save(layout: Layout, model: str, directory: Path) -> None:
    run = Run(layout, model)
    run.train(BEFORE)
    run.save(directory / str(layout))


def go_on_from_each(
    layout: Layout, model: str, directory: Path, others: list[Layout]
) -> dict[str, list[tuple[float, float]]]:
    """Load the checkpoints of all other layouts, save each again, then train."""
    losses = {}
    for other in others:
        run = Run(layout, model)
        run.load(directory / str(other))
        run.save(directory / f"{other}-by-{layout}")
        losses[str(other)] = run.train(AFTER)
    return losses


def same_tensors(one: Path, other: Path) -> None:
    """Check that all full tensors of the weights and the optimizer are bitwise equal."""
    assert not find_damage(one) and not find_damage(other)
    first, second = Checkpoint(one), Checkpoint(other)
    assert first.shapes() == second.shapes()
    assert len(first.shapes("weights")) * 3 == len(first.shapes())  # with two moments each
    for name in first.shapes():
        assert torch.equal(first.read(name), second.read(name)), name
    assert first.state == second.state


def undivided(layouts: list[Layout]) -> list[Layout]:
    """Return the layouts without pipeline parallelism, as encoder-decoders need."""
    return [layout for layout in layouts if layout.pipeline == 1]


ALL = [*UP_TO_FOUR, Layout(tensor=2, data=2, sharded=True, sequence=True)]
CASES = [
    pytest.param(
        "esm2nv", [Layout(tensor=2, pipeline=2, sequence=True), Layout(data=2, sharded=True)], id="esm2nv-some"
    ),
    *(
        pytest.param(
            model,
            undivided(ALL) if model in ("prott5nv", "megamolbart") else ALL,
            id=f"{model}-all",
            marks=pytest.mark.slow,
        )
        for model in FAMILIES
    ),
]


@pytest.mark.parametrize(("model", "layouts"), CASES)
def test_any_layout_resumes_from_any_other(tmp_path: Path, model: str, layouts: list[Layout]) -> None:
    for layout in layouts:
        on_every_process(layout, train_and_save, model, tmp_path, directory=tmp_path)
    expected: dict[str, list[tuple[float, float]]] = {}
    for layout in layouts:
        losses = on_every_process(layout, go_on_from_each, model, tmp_path, layouts, directory=tmp_path)
        expected = expected or losses  # those of the first layout
        for other in layouts:
            same_tensors(tmp_path / str(other), tmp_path / f"{other}-by-{layout}")
            assert torch.tensor(losses[str(other)]).allclose(torch.tensor(expected[str(other)]), rtol=2e-6, atol=0), (
                f"{other} by {layout}: {losses[str(other)]} instead of {expected[str(other)]}"
            )


def test_each_process_writes_its_share(tmp_path: Path) -> None:
    """Data-parallel processes have equal weights and write about equal numbers of parameters."""
    layout = Layout(data=2)
    on_every_process(layout, train_and_save, "esm2nv", tmp_path, directory=tmp_path)
    sizes = [file.stat().st_size for file in sorted((tmp_path / str(layout)).glob("tensors-*"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)
