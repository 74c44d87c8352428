# SPDX-License-Identifier: Apache-2.0
"""Memory by formula, compared with the memory that real training steps use."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bionemo.config.schema import RunConfig
from bionemo.megatron import attention
from bionemo.megatron.groups import simulate
from bionemo.megatron.train_step import ParallelModel
from bionemo.megatron.vocabulary import language_model_loss
from bionemo.planning.layouts import Layout, Stage, layout_of
from bionemo.planning.estimate import Memory, fullest_stage, stage_memory, stage_parameters
from bionemo.planning.measure import Step
from bionemo.training.optimizers import build_optimizer
from tests.planning.simulated_rank import CHANGES, TENSOR, batch, build, config, step_of
from tests.planning.storage_meter import StorageMeter

PARALLEL = "tensor", "sequence", "sequence and uniform", "stages", "stages and uniform"
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's buffers would be on the GPU")


def cast(half: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=half)


def assert_close(found: float, expected: float, tolerance: float) -> None:
    assert abs(found / expected - 1) < tolerance, f"{found:,} by formula, {expected:,} measured"


class _Flash(torch.autograd.Function):
    """Saves the same tensors as torch.nn.attention.varlen, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sum = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0])
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(x.shape, dtype=x.dtype) for x in ctx.saved_tensors[:3])


def gpu_attention(kernel: str) -> Callable[..., Tensor]:
    """Return the attention that a GPU would use: the same code per sequence, or a substitute of the flash kernel."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sequences: Any, scale: float, dropout: Any = None, causal: bool = False
    ) -> Tensor:
        if kernel == "flash":
            out: Tensor = _Flash.apply(q, k, v)
            return out
        keys = sequences.context or sequences
        return attention.attend_per_sequence(q, k, v, sequences.lengths, scale, dropout, keys.lengths, causal)

    return attend


def train(cfg: RunConfig, rank: int, half: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Memory, Memory, int]:
    """Run one update of a rank. Return planned memory, measured states and the measured peak on top of the states."""
    layout, micro_batch = layout_of(cfg), batch(cfg)
    step = step_of(cfg, micro_batch, half)
    monkeypatch.setattr(attention, "attend", gpu_attention(step.kernel))
    with simulate(layout.tensor, layout.pipeline, rank, layout.data):
        model = build(cfg).train()
        model.initialize_weights(1)
        parallel = ParallelModel(model, layout.sharded)
        optimizer = build_optimizer(cfg.model.optim, parallel.optimizer_shards, model.learning_rate_factor)
        with StorageMeter() as meter:
            parallel.forward_backward([micro_batch] * layout.micro_batches, language_model_loss, partial(cast, half))
        optimizer.step()
        parallel.finish_update()
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        moments = [v for state in optimizer.state.values() for key, v in state.items() if key.startswith("exp")]
        measured = Memory(
            weights=sum(weights.values()),
            gradients=sum(buffer.grad_data.nbytes for buffer in parallel.ddp.buffers),
            moments=sum(moment.nbytes for moment in moments),
            copies=0,
            activations=0,
            working=0,
        )
    stage = Stage(rank // (layout.gpus // layout.pipeline), layout.pipeline)
    return stage_memory(step, layout, stage), measured, meter.peak


STEPS = [  # family, half precision, change, rank
    *(("esm1nv", True, what, 0) for what in ("none", "selective", "stages and uniform")),
    ("esm1nv", True, "sequence", 1),
    ("esm1nv", False, "none", 0),
    ("esm1nv", False, "tensor", 1),
    *(("esm1b", True, what, 0) for what in ("none", "stages")),
    *(("esm2nv", True, what, 0) for what in ("none", "selective", "uniform", "block", "long rows", *PARALLEL)),
    *(("esm2nv", False, what, 1) for what in ("sequence", "stages")),
    *(("gpt3", True, what, 0) for what in ("none", "long rows", "narrow", "no dropout", "full vocabulary", *PARALLEL)),
    *(("gpt3", False, what, 1) for what in ("sequence", "stages")),
    ("gpt3", False, "long rows", 0),
    *(("gpt3", half, "stages and full vocabulary", rank) for half in (True, False) for rank in (0, 1)),
    ("gpt3", True, "tensor and full vocabulary", 1),
    *(("prott5nv", True, what, 0) for what in ("none", "selective", "uniform", "sequence and uniform", "no dropout")),
    *(("prott5nv", False, what, 0) for what in ("uniform", "block", "tensor")),
    *(("megamolbart", True, what, 0) for what in ("none", "uniform", "tensor", "sequence", "no dropout")),
    *(("megamolbart", False, what, 0) for what in ("long rows", "selective", "sequence and uniform")),
]


@ON_CPU
@pytest.mark.parametrize(("name", "half", "what", "rank"), STEPS)
def test_peak_memory_of_a_step(name: str, half: bool, what: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(name, **CHANGES[what])
    planned, measured, peak = train(cfg, rank, half, monkeypatch)
    for state in ("weights", "gradients", "moments"):
        assert_close(getattr(planned, state), getattr(measured, state), 0.001)
    assert_close(planned.copies + planned.activations + planned.working, peak, 0.04)


@ON_CPU
@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_optimizer_holds_its_share_of_the_moments(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("esm2nv", gpus=2, optimizer="distributed_fused_adam")
    planned, measured, _ = train(cfg, rank, False, monkeypatch)
    assert planned.moments == planned.weights  # 8 bytes a parameter, for half of them
    for state in ("weights", "gradients", "moments"):
        assert_close(getattr(planned, state), getattr(measured, state), 0.01)  # buckets are filled up to even sizes


def make_step(name: str = "esm2nv", half: bool = True, **changes: Any) -> tuple[Step, Layout]:
    cfg = config(name, **changes)
    return step_of(cfg, batch(cfg), half), layout_of(cfg)


def test_sixteen_bytes_a_parameter() -> None:
    step, layout = make_step()
    assert state_memory(step.shape, layout, Stage(0, 1)).total == 16 * 212_672


def test_attention_kernel() -> None:
    assert make_step()[0].kernel == "flash"
    assert make_step(half=False)[0].kernel == "sequences"
    assert make_step(**TENSOR)[0].kernel == "flash"
    assert make_step("esm1nv")[0].kernel == "probabilities"
    assert make_step("esm1nv", attention_dropout=0.0)[0].kernel == "flash"


def test_first_stage_is_fullest_with_enough_micro_batches() -> None:
    step, layout = make_step(pipeline_model_parallel_size=4, accumulate=8, gpus=4)
    assert [layout.in_flight(stage) for stage in layout.stages] == [4, 3, 2, 1]
    assert fullest_stage(step, layout)[0].first
    assert head_bytes(step, layout, step.stacks[-1]) < saved_bytes(step, layout, Stage(3, 4), step.stacks[-1])
