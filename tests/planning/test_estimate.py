# SPDX-License-Identifier: Apache-2.0
"""Memory and FLOPs of a plan, compared with those of real training steps with all layers."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bionemo.megatron import attention
from bionemo.megatron.vocabulary import language_model_loss
from bionemo.planning.estimate import computed_flops, fullest_stage, stage_memory, useful_flops
from bionemo.planning.layouts import Layout, read_layout
from bionemo.planning.measure import StepProfiler
from tests.planning.simulated_rank import CHANGES, TENSOR, batch, build, config, gpu_attention, profiler_of, train

PARALLEL = "tensor", "sequence", "sequence and uniform", "stages", "stages and uniform"


def assert_close(found: float, expected: float, tolerance: float) -> None:
    assert abs(found / expected - 1) < tolerance, f"{found:,} planned, {expected:,} measured"


STEPS = [  # family, half precision, change, rank
    ("esm1nv", True, "selective", 0),
    ("esm1b", True, "stages", 0),
    ("esm2nv", True, "uniform", 0),
    ("esm2nv", True, "sequence", 0),
    ("esm2nv", False, "stages", 1),
    ("gpt3", True, "tensor", 0),
    ("gpt3", True, "stages and full vocabulary", 1),
    ("prott5nv", True, "uniform", 0),
    ("megamolbart", False, "sequence and uniform", 0),
]
MORE_STEPS = [
    *(("esm1nv", True, what, 0) for what in ("none", "stages and uniform")),
    ("esm1nv", True, "sequence", 1),
    ("esm1nv", False, "none", 0),
    ("esm1nv", False, "tensor", 1),
    ("esm1b", True, "none", 0),
    ("esm1b", False, "plain embedding", 0),
    *(("esm2nv", True, what, 0) for what in ("none", "selective", "block", "long rows", *PARALLEL)),
    ("esm2nv", False, "sequence", 1),
    *(("gpt3", True, what, 0) for what in ("none", "long rows", "narrow", "no dropout", "full vocabulary", *PARALLEL)),
    *(("gpt3", False, what, 1) for what in ("sequence", "stages")),
    *(("gpt3", False, what, 0) for what in ("long rows", "separate documents")),
    *(("gpt3", half, "stages and full vocabulary", rank) for half in (True, False) for rank in (0, 1)),
    ("gpt3", True, "tensor and full vocabulary", 1),
    *(("prott5nv", True, what, 0) for what in ("none", "selective", "sequence and uniform", "no dropout")),
    ("prott5nv", True, "untied head", 0),
    *(("megamolbart", True, what, 0) for what in ("none", "uniform", "tensor", "sequence", "no dropout")),
    *(("megamolbart", False, what, 0) for what in ("long rows", "selective")),
]


WITHOUT_TRITON = [("esm1nv", True, "selective", 0), ("megamolbart", False, "sequence and uniform", 0)]


@pytest.mark.parametrize(
    ("name", "half", "what", "rank", "triton"),
    [
        *((*each, True) for each in STEPS),
        *((*each, False) for each in WITHOUT_TRITON),
        *(pytest.param(*each, triton, marks=pytest.mark.slow) for each in MORE_STEPS for triton in (True, False)),
    ],
)
def test_peak_memory_of_a_step(name: str, half: bool, what: str, rank: int, triton: bool) -> None:
    planned, measured, peak = train(config(name, **CHANGES[what]), rank, half, triton)
    for state in ("weights", "gradients", "moments"):
        assert_close(getattr(planned, state), getattr(measured, state), 0.001)
    assert_close(planned.copies + planned.activations + planned.working, peak, 0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_optimizer_holds_its_share_of_the_moments(rank: int) -> None:
    planned, measured, _ = train(config("esm2nv", gpus=2, optimizer="distributed_fused_adam"), rank, False)
    assert planned.moments == planned.weights  # 8 bytes a parameter, for half of them
    for state in ("weights", "gradients", "moments"):
        assert_close(getattr(planned, state), getattr(measured, state), 0.01)  # buckets are filled up to even sizes


def make_profiler(
    name: str = "esm2nv", half: bool = True, triton: bool = True, **changes: Any
) -> tuple[StepProfiler, Layout]:
    cfg = config(name, **changes)
    return profiler_of(cfg, batch(cfg), half, triton), read_layout(cfg)


def test_sixteen_bytes_a_parameter() -> None:
    profiler, layout = make_profiler()
    memory = stage_memory(profiler, layout, layout.stages[0])
    assert memory.weights + memory.gradients + memory.moments == 16 * 212_672


def test_attention_kernel() -> None:
    assert make_profiler()[0].kernel == "flash"
    assert make_profiler(half=False)[0].kernel == "triton"
    assert make_profiler(**TENSOR)[0].kernel == "flash"
    assert make_profiler("esm1nv")[0].kernel == "triton"
    assert make_profiler("esm1nv", attention_dropout=0.0)[0].kernel == "flash"
    assert make_profiler(triton=False)[0].kernel == "sequences"
    assert make_profiler("esm1nv", triton=False)[0].kernel == "probabilities"
    assert make_profiler(kv_channels=12)[0].kernel == "triton"  # not a multiple of 8
    assert make_profiler(kv_channels=264)[0].kernel == "sequences"  # larger than 256
    assert make_profiler("esm1nv", kv_channels=264)[0].kernel == "probabilities"


def test_first_stage_is_fullest_with_enough_micro_batches() -> None:
    profiler, layout = make_profiler(pipeline_model_parallel_size=4, accumulate=8, gpus=4)
    assert [layout.in_flight(stage) for stage in layout.stages] == [4, 3, 2, 1]
    assert fullest_stage(profiler, layout)[0].first
    profiler, layout = make_profiler("gpt3", pipeline_model_parallel_size=4, gpus=4, full_vocabulary=True)
    assert fullest_stage(profiler, layout)[0].last  # one micro-batch is in flight, and the last stage has the logits


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("esm1nv", "block"),
        ("esm2nv", "none"),
        ("esm2nv", "uniform-3"),
        ("gpt3", "none"),
        ("prott5nv", "uniform-3"),
        ("megamolbart", "none"),
        *(
            pytest.param(name, change, marks=pytest.mark.slow)
            for name, change in (
                ("esm1nv", "none"), ("esm1b", "none"), ("gpt3", "block"), ("gpt3", "separate documents"),
                ("prott5nv", "none"), ("prott5nv", "block"), ("megamolbart", "uniform"),
            )
        ),
    ],
)  # fmt: skip
def test_flops_match_the_flop_counter(name: str, change: str) -> None:
    cfg = config(name, **CHANGES[change])
    model, micro_batch = build(cfg).train(), batch(cfg)
    profiler, layout = profiler_of(cfg, micro_batch, half=False, triton=False), read_layout(cfg)
    replaced = patch.object(attention, "attend", gpu_attention(profiler.kernel))
    with replaced, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        language_model_loss(model(micro_batch), micro_batch)[0].backward()
    found = sum(counter.get_flop_counts()["Global"].values())
    assert found == pytest.approx(computed_flops(profiler, layout), rel=1e-6)
    plain = computed_flops(profiler, replace(layout, recompute="none"))
    assert (found == pytest.approx(plain, rel=1e-6)) == (layout.recompute == "none")
    assert (useful_flops(profiler, layout) == pytest.approx(plain, rel=1e-6)) == name.startswith("esm")


def test_selective_recomputation_repeats_attention() -> None:
    profiler, layout = make_profiler("esm2nv")
    attention_flops = computed_flops(profiler, replace(layout, recompute="selective")) - computed_flops(
        profiler, layout
    )
    [tokens] = profiler.tokens
    assert attention_flops == pytest.approx(4 * 4 * 64 * 4 * tokens.row * tokens.attended)  # layers, size, rows


def test_six_flops_per_parameter_and_token_plus_attention() -> None:
    profiler, layout = make_profiler(num_layers=33, hidden_size=1280, ffn_hidden_size=5120, num_attention_heads=20)
    [tokens] = profiler.tokens
    count = tokens.count(4)
    layers = 6 * 33 * 12 * 1280**2 * count + 12 * 33 * 1280 * tokens.attended * count
    head = 6 * (1280**2 + 33 * 1280) * round(0.15 * count)
    assert useful_flops(profiler, layout) == pytest.approx(layers + head, rel=1e-4)


def test_masked_pairs_are_not_useful_flops() -> None:
    cfg = config("gpt3", attention_dropout=0.0)
    flash, dropped = (
        profiler_of(config("gpt3", attention_dropout=p), batch(cfg), half=True, triton=p == 0.0) for p in (0.0, 0.1)
    )
    layout, rows, length, size = read_layout(cfg), 4, 128, 64
    below = sum(range(1, length + 1))
    assert computed_flops(flash, layout) == useful_flops(flash, layout) == useful_flops(dropped, layout)
    assert computed_flops(dropped, layout) - useful_flops(dropped, layout) == pytest.approx(
        3 * 4 * size * 4 * rows * (length**2 - below)
    )
