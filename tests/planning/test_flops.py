# SPDX-License-Identifier: Apache-2.0
"""FLOPs by formula against those that PyTorch counts in a real update."""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from bionemo.planning.flops import of_micro_batch, of_update, on_hardware
from bionemo.planning.layout import layout_of
from bionemo.training.objectives import masked_lm
from tests.planning.alone import batch, build, config, step_of
from tests.planning.test_memory import CHANGES


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("esm1nv", what) for what in ("none", "block")),
        ("esm1b", "none"),
        *(("esm2nv", what) for what in ("none", "selective", "uniform-3")),
        *(("gpt3", what) for what in ("none", "selective", "block", "apart")),
        *(("prott5nv", what) for what in ("none", "selective", "block", "uniform-3")),
        *(("megamolbart", what) for what in ("none", "uniform", "undropped")),
    ],
)
def test_matrix_products_of_an_update(name: str, what: str) -> None:
    cfg = config(name, **CHANGES[what])
    model, given = build(cfg).train(), batch(cfg)
    masked_lm(model(given), given)  # attention tries its products out when it is first used
    with FlopCounterMode(display=False) as counter:
        masked_lm(model(given), given)[0].backward()
    step, layout = step_of(cfg, given, half=False, tiles=4), layout_of(cfg)
    found = sum(counter.get_flop_counts()["Global"].values())
    # As FlashAttention's, the backward pass makes the scores again: five products for the forward pass's two.
    scores_again = of_micro_batch(step, layout, whole=True).attention / 2
    assert found == pytest.approx(on_hardware(step, layout) + scores_again, rel=1e-6)
    plain = on_hardware(step, replace(layout, recompute="none"))
    assert (found == pytest.approx(plain + scores_again, rel=1e-6)) == (layout.recompute == "none")
    assert (of_update(step, layout) == pytest.approx(plain, rel=1e-6)) == (step.shape.stacks == ("encoder",))


def test_six_flops_a_parameter_and_token_and_what_attention_adds() -> None:
    cfg = config("esm2nv", num_layers=33, hidden_size=1280, ffn_hidden_size=5120, num_attention_heads=20)
    step, layout = step_of(cfg, batch(cfg), half=True), layout_of(cfg)
    [tokens], made = step.tokens, of_micro_batch(step, layout)
    count = tokens.count(4)
    assert 3 * made.matrices == 6 * 33 * 12 * 1280**2 * count
    assert 3 * made.attention == 12 * 33 * 1280 * tokens.attended * count
    assert made.head == pytest.approx(2 * (1280**2 + 33 * 1280) * 0.15 * count, rel=0.01)
    assert of_update(step, layout) == made.useful


def test_only_what_a_causal_mask_leaves_is_useful() -> None:
    cfg = config("gpt3", attention_dropout=0.0)
    flash, dropped = (step_of(config("gpt3", attention_dropout=p), batch(cfg), half=True) for p in (0.0, 0.1))
    layout, rows, length, heads = layout_of(cfg), 4, 128, 64
    below = sum(range(1, length + 1))
    assert of_micro_batch(flash, layout).attention == 4 * heads * 4 * rows * below
    assert on_hardware(flash, layout) == of_update(flash, layout) == of_update(dropped, layout)
    assert on_hardware(dropped, layout) - of_update(dropped, layout) == 3 * 4 * heads * 4 * rows * (length**2 - below)
