# SPDX-License-Identifier: Apache-2.0
"""FLOPs by formula, compared with those that PyTorch counts in a training step."""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from bionemo.megatron.vocabulary import language_model_loss
from bionemo.planning.duration import computed_flops, micro_batch_flops, useful_flops
from bionemo.planning.layouts import layout_of
from tests.planning.simulated_rank import CHANGES, batch, build, config, step_of


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("esm1nv", change) for change in ("none", "block")),
        ("esm1b", "none"),
        *(("esm2nv", change) for change in ("none", "selective", "uniform-3")),
        *(("gpt3", change) for change in ("none", "selective", "block", "separate documents")),
        *(("prott5nv", change) for change in ("none", "selective", "block", "uniform-3")),
        *(("megamolbart", change) for change in ("none", "uniform", "no dropout")),
    ],
)
def test_flops_match_the_flop_counter(name: str, change: str) -> None:
    cfg = config(name, **CHANGES[change])
    model, micro_batch = build(cfg).train(), batch(cfg)
    language_model_loss(model(micro_batch), micro_batch)  # attention benchmarks its matrix products on first use
    with FlopCounterMode(display=False) as counter:
        language_model_loss(model(micro_batch), micro_batch)[0].backward()
    step, layout = step_of(cfg, micro_batch, half=False, tiles=4), layout_of(cfg)
    found = sum(counter.get_flop_counts()["Global"].values())
    # Like FlashAttention's, the backward pass recomputes the scores: five products, the forward pass has two.
    scores_again = micro_batch_flops(step, layout, masked=True).attention / 2
    assert found == pytest.approx(computed_flops(step, layout) + scores_again, rel=1e-6)
    plain = computed_flops(step, replace(layout, recompute="none"))
    assert (found == pytest.approx(plain + scores_again, rel=1e-6)) == (layout.recompute == "none")
    assert (useful_flops(step, layout) == pytest.approx(plain, rel=1e-6)) == (step.shape.stacks == ("encoder",))


def test_six_flops_per_parameter_and_token_plus_attention() -> None:
    cfg = config("esm2nv", num_layers=33, hidden_size=1280, ffn_hidden_size=5120, num_attention_heads=20)
    step, layout = step_of(cfg, batch(cfg), half=True), layout_of(cfg)
    [tokens], made = step.tokens, micro_batch_flops(step, layout)
    count = tokens.count(4)
    assert 3 * made.matrices == 6 * 33 * 12 * 1280**2 * count
    assert 3 * made.attention == 12 * 33 * 1280 * tokens.attended * count
    assert made.head == pytest.approx(2 * (1280**2 + 33 * 1280) * 0.15 * count, rel=0.01)
    assert useful_flops(step, layout) == made.useful


def test_masked_pairs_are_not_useful_flops() -> None:
    cfg = config("gpt3", attention_dropout=0.0)
    flash, dropped = (step_of(config("gpt3", attention_dropout=p), batch(cfg), half=True) for p in (0.0, 0.1))
    layout, rows, length, heads = layout_of(cfg), 4, 128, 64
    below = sum(range(1, length + 1))
    assert micro_batch_flops(flash, layout).attention == 4 * heads * 4 * rows * below
    assert computed_flops(flash, layout) == useful_flops(flash, layout) == useful_flops(dropped, layout)
    assert computed_flops(dropped, layout) - useful_flops(dropped, layout) == 3 * 4 * heads * 4 * rows * (
        length**2 - below
    )
