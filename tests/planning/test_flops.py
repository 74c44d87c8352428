# SPDX-License-Identifier: Apache-2.0
"""FLOPs by formula against those that PyTorch counts in a real update."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from bionemo.planning.flops import of_row, of_update, on_hardware
from bionemo.planning.layout import layout_of
from bionemo.training.objectives import masked_lm

from .alone import batch, build, config, step_of
from .test_memory import CHANGES


@pytest.mark.parametrize(
    ("name", "what"),
    [("esm1nv", "none"), ("esm1nv", "block"), ("esm2nv", "none"), ("esm2nv", "selective"), ("esm2nv", "uniform-3")],
)
def test_matrix_products_of_an_update(name: str, what: str) -> None:
    cfg = config(name, **CHANGES[what])
    model, given = build(cfg).train(), batch(cfg)
    masked_lm(model(given), given)  # attention tries its products out when it is first used
    with FlopCounterMode(display=False) as counter:
        masked_lm(model(given), given)[0].backward()
    step, layout = step_of(cfg, given, half=False), layout_of(cfg)
    found = sum(counter.get_flop_counts()["Global"].values())
    # As FlashAttention's, the backward pass makes the scores again: five products for the forward pass's two.
    scores_again = layout.rows * of_row(step.shape, step.tokens).attention / 2
    assert found == pytest.approx(on_hardware(step, layout) + scores_again, rel=1e-3)
    assert (found == pytest.approx(of_update(step, layout) + scores_again, rel=1e-3)) == (what == "none")


def test_six_flops_a_parameter_and_token_and_what_attention_adds() -> None:
    cfg = config("esm2nv", num_layers=33, hidden_size=1280, ffn_hidden_size=5120, num_attention_heads=20)
    step = step_of(cfg, batch(cfg), half=True)
    row, length = of_row(step.shape, step.tokens), step.tokens.row
    assert 3 * row.matrices == 6 * 33 * 12 * 1280**2 * length
    assert 3 * row.attention == 12 * 33 * 1280 * step.tokens.attended * length
    assert row.head == pytest.approx(2 * (1280**2 + 33 * 1280) * 0.15 * length, rel=0.01)
    assert of_update(step, layout_of(cfg)) == row.useful * 4
