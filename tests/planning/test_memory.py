# SPDX-License-Identifier: Apache-2.0
"""The memory model against what is alive in real training steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bionemo.config.schema import RunConfig
from bionemo.megatron import attention
from bionemo.megatron.train_step import ParallelModel
from bionemo.planning.activations import activations, end, head
from bionemo.planning.layout import Layout, Stage, layout_of
from bionemo.planning.memory import Memory, fullest, memory, states
from bionemo.planning.moments import copies, head_copies
from bionemo.planning.step import Step
from bionemo.training.objectives import masked_lm
from bionemo.training.optimizers import build_optimizer
from tests.planning.alone import batch, build, config, one_of, step_of
from tests.planning.live import Live

Words = dict[str, Any]


def again(granularity: str, method: str | None = None, layers: int = 1) -> Words:
    keys = ("granularity", "method", "num_layers")
    return {
        f"activations_checkpoint_{key}": value for key, value in zip(keys, (granularity, method, layers), strict=True)
    }


TENSOR: Words = {"gpus": 2, "tensor_model_parallel_size": 2}
SEQUENCE: Words = TENSOR | {"sequence_parallel": True}
STAGES: Words = {"gpus": 2, "pipeline_model_parallel_size": 2, "accumulate": 2}
CHANGES: dict[str, Words] = {
    "none": {},
    "selective": again("selective"),
    "uniform": again("full", "uniform"),
    "uniform-3": again("full", "uniform", 3),
    "block": again("full", "block"),
    "block-4": again("full", "block", 4),
    "long rows": {"seq_length": 512, "micro_batch_size": 1},
    "narrow": {"hidden_size": 256, "ffn_hidden_size": 64, "seq_length": 64, "micro_batch_size": 1},
    "apart": {"reset_attention_mask": True},
    "own table": {"share_decoder_tokens_head_embeddings": False},
    "bare": {"embedding_layer_norm": False, "embedding_token_dropout": False},
    "undropped": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "all words": {"all_words": True},
    "tensor": TENSOR,
    "tensor and all words": TENSOR | {"all_words": True},
    "sequence": SEQUENCE,
    "sequence and uniform": SEQUENCE | again("full", "uniform", 2),
    "stages": STAGES,
    "stages and uniform": STAGES | again("full", "uniform"),
    "stages and all words": STAGES | {"all_words": True},
}
DIVIDED = "tensor", "sequence", "sequence and uniform", "stages", "stages and uniform"
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's buffers would be on the GPU")


def cast(half: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=half)


def close(found: float, expected: float, tolerance: float) -> None:
    assert abs(found / expected - 1) < tolerance, f"{found:,} by formula, {expected:,} measured"


KEPT = [
    *(("esm1nv", True, what) for what in ("none", "block-4")),
    *(("esm1nv", False, what) for what in ("none", "selective", "long rows")),
    *(("esm1b", half, what) for half, what in ((True, "none"), (False, "bare"))),
    *(("esm2nv", True, what) for what in ("none", "selective", "uniform-3", "block", "long rows")),
    *(("esm2nv", False, what) for what in ("none", "uniform")),
    *(("gpt3", True, what) for what in ("none", "selective", "uniform", "all words")),
    *(("gpt3", False, what) for what in ("none", "block", "apart")),
    *(("prott5nv", True, what) for what in ("none", "selective", "uniform-3", "long rows", "own table")),
    *(("prott5nv", False, what) for what in ("none", "selective", "block")),
    *(("megamolbart", True, what) for what in ("none", "uniform")),
    *(("megamolbart", False, what) for what in ("none", "undropped")),
]


@pytest.mark.parametrize(("name", "half", "what"), KEPT)
def test_what_a_forward_pass_leaves_for_the_backward_pass(name: str, half: bool, what: str) -> None:
    cfg = config(name, **CHANGES[what])
    model, given, layout = build(cfg).train(), batch(cfg), layout_of(cfg)
    model.initialise(1)
    with Live() as live:
        with cast(half):
            logits = model(given)
        loss, _ = masked_lm(logits, given)
        del logits
        kept = live.now
        loss.backward()
    native = half and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    step, alone = step_of(cfg, given, half, tiles=2 if native else 4), Stage(0, 1)
    planned = head_copies(step, layout, alone)
    for stack in step.stacks:
        planned += activations(step, layout, alone, stack) + end(step, layout, alone, stack)
        planned += layout.plain_layers(4) * copies(step, layout, stack.kind)
    close(planned, kept, 0.0001)


class _Flash(torch.autograd.Function):
    """Keeps what torch.nn.attention.varlen keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sum = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0])
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(x.shape, dtype=x.dtype) for x in ctx.saved_tensors[:3])


def as_on_a_gpu(which: str) -> Callable[..., Tensor]:
    """The attention that a GPU would be given: the same code one sequence at a time, or the stand-in of its kernel."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, segments: Any, scale: float, dropout: Any = None, causal: bool = False
    ) -> Tensor:
        if which == "flash":
            out: Tensor = _Flash.apply(q, k, v)
            return out
        to = segments.attended or segments
        return attention.per_sequence(q, k, v, segments.lengths, scale, dropout, to.lengths, causal)

    return attend


def train(cfg: RunConfig, rank: int, half: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Memory, Memory, int]:
    """One update on a rank: its memory by formula, the states as measured, and the most that came on top of them."""
    layout, given = layout_of(cfg), batch(cfg)
    step = step_of(cfg, given, half)
    monkeypatch.setattr(attention, "attend", as_on_a_gpu(step.kernel))
    with one_of(layout, rank):
        model = build(cfg).train()
        model.initialise(1)
        parallel = ParallelModel(model, layout.sharded)
        optimizer = build_optimizer(cfg.model.optim, parallel.parts, model.rate_of)
        with Live() as live:
            parallel.forward_backward([given] * layout.micro_batches, masked_lm, partial(cast, half))
        optimizer.step()
        parallel.after_update()
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        moments = [v for state in optimizer.state.values() for key, v in state.items() if key.startswith("exp")]
        measured = Memory(
            weights=sum(weights.values()),
            gradients=sum(buffer.grad_data.nbytes for buffer in parallel.buffers.buffers),
            moments=sum(moment.nbytes for moment in moments),
        )
    stage = Stage(rank // (layout.gpus // layout.pipeline), layout.pipeline)
    return memory(step, layout, stage), measured, live.peak


STEPS = [  # and the rank
    *(("esm1nv", True, what, 0) for what in ("none", "selective", "stages and uniform")),
    ("esm1nv", True, "sequence", 1),
    ("esm1nv", False, "none", 0),
    ("esm1nv", False, "tensor", 1),
    *(("esm1b", True, what, 0) for what in ("none", "stages")),
    *(("esm2nv", True, what, 0) for what in ("none", "selective", "uniform", "block", "long rows", *DIVIDED)),
    *(("esm2nv", False, what, 1) for what in ("sequence", "stages")),
    *(("gpt3", True, what, 0) for what in ("none", "long rows", "narrow", "undropped", "all words", *DIVIDED)),
    *(("gpt3", False, what, 1) for what in ("sequence", "stages")),
    ("gpt3", False, "long rows", 0),
    *(("gpt3", half, "stages and all words", rank) for half in (True, False) for rank in (0, 1)),
    ("gpt3", True, "tensor and all words", 1),
    *(("prott5nv", True, what, 0) for what in ("none", "selective", "uniform", "sequence and uniform", "undropped")),
    *(("prott5nv", False, what, 0) for what in ("uniform", "block", "tensor")),
    *(("megamolbart", True, what, 0) for what in ("none", "uniform", "tensor", "sequence", "undropped")),
    *(("megamolbart", False, what, 0) for what in ("long rows", "selective", "sequence and uniform")),
]


@ON_CPU
@pytest.mark.parametrize(("name", "half", "what", "rank"), STEPS)
def test_the_most_that_a_step_needs(
    name: str, half: bool, what: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(name, **CHANGES[what])
    planned, measured, peak = train(cfg, rank, half, monkeypatch)
    for kind in ("weights", "gradients", "moments"):
        close(getattr(planned, kind), getattr(measured, kind), 0.001)
    close(planned.copies + planned.activations + planned.working, peak, 0.04)


@ON_CPU
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_optimizer_holds_its_share_of_the_moments(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("esm2nv", gpus=2, optimizer="distributed_fused_adam")
    planned, measured, _ = train(cfg, rank, False, monkeypatch)
    assert planned.moments == planned.weights  # 8 bytes a parameter, for half of them
    for kind in ("weights", "gradients", "moments"):
        close(getattr(planned, kind), getattr(measured, kind), 0.01)  # buckets are filled up to even sizes


def planned(name: str = "esm2nv", half: bool = True, **words: Any) -> tuple[Step, Layout]:
    cfg = config(name, **words)
    return step_of(cfg, batch(cfg), half), layout_of(cfg)


def test_sixteen_bytes_a_parameter() -> None:
    step, layout = planned()
    assert states(step.shape, layout, Stage(0, 1)).total == 16 * 212_672


def test_which_attention_computes() -> None:
    assert planned()[0].kernel == "flash"
    assert planned(half=False)[0].kernel == "sequences"
    assert planned(**TENSOR)[0].kernel == "flash"
    assert planned("esm1nv")[0].kernel == "probabilities"
    assert planned("esm1nv", attention_dropout=0.0)[0].kernel == "flash"


def test_the_first_stage_is_the_fullest_when_there_are_micro_batches_enough() -> None:
    step, layout = planned(pipeline_model_parallel_size=4, accumulate=8, gpus=4)
    assert [layout.in_flight(stage) for stage in layout.stages] == [4, 3, 2, 1]
    assert fullest(step, layout)[0].first
    assert head(step, layout, step.stacks[-1]) < activations(step, layout, Stage(3, 4), step.stacks[-1])
