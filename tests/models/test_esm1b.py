# SPDX-License-Identifier: Apache-2.0
"""ESM-1b: what stands before its layers is the same on every layout; rows of no position are not used."""

from pathlib import Path

import torch

from tests.megatron.layouts import Layout, Run, on_every_process
from tests.models.test_parity import batch_of, ours


def losses_and_norms(layout: Layout) -> list[tuple[float, float]]:
    return Run(layout, "esm1b").train(3)


def test_layouts_train_the_same(tmp_path: Path) -> None:
    """Table and norm are whole on every tensor rank of the first stage, before the sequence is divided."""
    layouts = Layout(), Layout(tensor=2, pipeline=2, sequence=True)
    one, four = (torch.tensor(on_every_process(each, losses_and_norms, directory=tmp_path)) for each in layouts)
    assert one.shape == (3, 2)
    assert (one > 0.1).all()
    torch.testing.assert_close(four, one, rtol=2e-6, atol=0)


def test_rows_of_no_position() -> None:
    model = ours("esm1b").eval()
    batch, table = batch_of(model, 3), model.position_embeddings.table.weight
    assert len(table) == 96 + 2
    with torch.no_grad():
        before = model(batch)
        table[:2] = torch.nan
        assert torch.equal(model(batch), before)
        table[96 + 1] = torch.nan  # of the last position, which the longest sequence reaches
        assert model(batch).isnan().any()
    model.initialise(seed=3)
    assert not table[:2].any()
    assert table[2:].all()
