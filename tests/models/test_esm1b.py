# SPDX-License-Identifier: Apache-2.0
"""ESM-1b: training does not depend on the layout; unused rows of the position table stay 0."""

from pathlib import Path

import pytest
import torch

from tests.support.models import batch_of, build_model
from tests.support.parallel_layouts import Layout, Run, on_every_process


def losses_and_norms(layout: Layout) -> list[tuple[float, float]]:
    return Run(layout, "esm1b").train(3)


@pytest.mark.slow
def test_training_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Position table and layer norm are replicated on the tensor ranks of the first stage."""
    layouts = Layout(), Layout(tensor=2, pipeline=2, sequence=True)
    one, four = (torch.tensor(on_every_process(each, losses_and_norms, directory=tmp_path)) for each in layouts)
    assert one.shape == (3, 2)
    assert (one > 0.1).all()
    torch.testing.assert_close(four, one, rtol=2e-6, atol=0)


def test_unused_rows_of_the_position_table() -> None:
    model = build_model("esm1b").eval()
    batch, table = batch_of(model, 3), model.position_embeddings.table.weight
    assert len(table) == 96 + 2
    with torch.no_grad():
        before = model(batch)
        table[:2] = torch.nan
        assert torch.equal(model(batch), before)
        table[96 + 1] = torch.nan  # of the last position, which the longest sequence reaches
        assert model(batch).isnan().any()
    model.initialize_weights(seed=3)
    assert not table[:2].any()
    assert table[2:].all()
