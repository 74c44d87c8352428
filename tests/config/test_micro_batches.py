# SPDX-License-Identifier: Apache-2.0
"""Rows of a step and their division into micro-batches."""

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bionemo.config.check import check_config, check_layout
from bionemo.config.compose import load
from bionemo.config.micro_batches import MicroBatches, divide_batch
from bionemo.config.schema import ModelConfig, RunConfig, TrainerConfig
from tests.conftest import EXAMPLES

Size = int | Literal["auto"]
SIZES = st.integers(1, 200)


@cache
def composed() -> RunConfig:
    return load("pretrain_esm2_mock", [], EXAMPLES / "esm2nv" / "conf")


def configured(
    size: Size = "auto", accumulated: int | None = None, batch: int | None = None, rows: int = 8, tensor: int = 1,
    pipeline: int = 1,
) -> tuple[ModelConfig, TrainerConfig]:  # fmt: skip
    """Return a configuration.

    Args:
        size: micro_batch_size.
        accumulated: accumulate_grad_batches.
        batch: global_batch_size.
        rows: replica_batch_size.
        tensor: tensor_model_parallel_size.
        pipeline: pipeline_model_parallel_size.
    """
    cfg = composed()
    model = replace(
        cfg.model, micro_batch_size=size, replica_batch_size=rows, global_batch_size=batch,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
    )  # fmt: skip
    return model, replace(cfg.trainer, accumulate_grad_batches=accumulated)


@given(SIZES, SIZES, SIZES)
def test_limit_takes_the_largest_divisor_up_to_the_limit(size: int, count: int, limit: int) -> None:
    rows, found = size * count, MicroBatches(size, count).limit(limit)
    assert found.size * found.count == rows
    assert found.size == max(each for each in range(1, rows + 1) if rows % each == 0 and each <= limit)


def test_limits_below_one_row_and_above_all_rows() -> None:
    assert MicroBatches(4, 3).limit(0) == MicroBatches(1, 12)
    assert MicroBatches(4, 3).limit(13) == MicroBatches(12, 1)


@pytest.mark.parametrize(
    ("keys", "replicas", "on_gpu", "on_cpu"),
    [
        ({}, 1, (8, 1), (8, 1)),
        ({"size": 1, "accumulated": 1, "batch": 8}, 4, (1, 2), (1, 2)),  # as in NeMo
        ({"size": 4, "accumulated": 1}, 2, (4, 1), (4, 1)),
        ({}, 64, (8, 1), (8, 1)),  # rows of a replica do not depend on the number of replicas
        ({"rows": 2, "accumulated": 1}, 1, (2, 1), (2, 1)),
        ({"rows": 6, "accumulated": 4}, 3, (24, 1), (6, 4)),
        ({"batch": 256}, 4, (64, 1), (8, 8)),
        ({"batch": 256, "accumulated": 1}, 4, (64, 1), (8, 8)),
        ({"batch": 20}, 1, (20, 1), (5, 4)),  # 8 does not divide 20
        ({"batch": 26}, 2, (13, 1), (1, 13)),
        ({"batch": 3}, 1, (3, 1), (3, 1)),
        ({"rows": 64, "batch": 32}, 1, (32, 1), (32, 1)),  # the global batch size has priority
    ],
)
def test_automatic_size(keys: dict[str, int], replicas: int, on_gpu: tuple[int, int], on_cpu: tuple[int, int]) -> None:
    model, trainer = configured(**keys)
    assert not list(check_layout(model, trainer, replicas))
    assert divide_batch(model, trainer, replicas, on_gpu=True) == MicroBatches(*on_gpu)
    assert divide_batch(model, trainer, replicas, on_gpu=False) == MicroBatches(*on_cpu)


@pytest.mark.parametrize(
    ("keys", "replicas", "count"),
    [
        ({}, 1, 1),
        ({"accumulated": 5}, 1, 5),
        ({"accumulated": 5}, 8, 5),
        ({"batch": 32}, 1, 8),
        ({"batch": 32}, 4, 2),
        ({"batch": 32, "accumulated": 2}, 4, 2),
        ({"rows": 100}, 4, 1),
    ],
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_explicit_size(keys: dict[str, int], replicas: int, count: int, on_gpu: bool) -> None:
    """The configured size is used, and the number of micro-batches is that of version 1."""
    model, trainer = configured(4, **keys)
    assert not list(check_layout(model, trainer, replicas))
    assert divide_batch(model, trainer, replicas, on_gpu) == MicroBatches(4, count)


def test_ranks_of_a_model_replica_share_its_rows() -> None:
    assert divide_batch(*configured(batch=32, rows=6, tensor=2, pipeline=2), 16, on_gpu=True) == MicroBatches(4, 2)
    assert divide_batch(*configured(2, batch=32, tensor=2, pipeline=2), 16, on_gpu=True) == MicroBatches(2, 4)


@given(
    size=st.one_of(st.just("auto"), SIZES),
    rows=SIZES,
    accumulated=st.one_of(st.none(), st.integers(1, 20)),
    per_replica=st.one_of(st.none(), st.integers(1, 500)),
    replicas=st.integers(1, 16),
)
def test_an_accepted_step_has_the_same_rows_on_every_device(
    size: Size, rows: int, accumulated: int | None, per_replica: int | None, replicas: int
) -> None:
    batch = None if per_replica is None else per_replica * replicas
    model, trainer = configured(size, accumulated, batch, rows)
    if list(check_layout(model, trainer, replicas)):
        model, trainer = configured(size, accumulated, None, rows)
        assert not list(check_layout(model, trainer, replicas))
    gpu, cpu = (divide_batch(model, trainer, replicas, on_gpu) for on_gpu in (True, False))
    held = gpu.size * gpu.count
    assert cpu.size * cpu.count == held
    if model.global_batch_size is not None:
        assert held == per_replica
    elif size == "auto":
        assert held == rows * (accumulated or 1)
    if size == "auto":
        assert gpu.count == 1
        assert cpu.size <= rows
    else:
        assert gpu == cpu
        assert gpu.size == size


@pytest.mark.parametrize(
    ("keys", "world_size", "problem"),
    [
        ({"batch": 30}, 4, "model.global_batch_size is 30, not a multiple of 4 model replicas"),
        ({"batch": 30, "tensor": 2}, 8, "model.global_batch_size is 30, not a multiple of 4 model replicas"),
        (
            {"batch": 32, "accumulated": 2}, 4,
            "model.global_batch_size=32 determines the accumulation with model.micro_batch_size=auto: set "
            "trainer.accumulate_grad_batches=null, or set model.micro_batch_size",
        ),
        (
            {"tensor": 2, "pipeline": 3}, 8,
            "trainer.devices x trainer.num_nodes=8 is not divisible by model.tensor_model_parallel_size=2 x "
            "model.pipeline_model_parallel_size=3",
        ),
    ],
)  # fmt: skip
def test_errors_of_automatic_sizes(keys: dict[str, int], world_size: int, problem: str) -> None:
    assert list(check_layout(*configured(**keys), world_size)) == [problem]


@pytest.mark.parametrize(
    ("keys", "world_size"),
    [
        ({"batch": 32, "tensor": 2}, 8),
        ({"batch": 5}, 5),
        ({"batch": 32, "accumulated": 1}, 4),
        ({"accumulated": 7}, 4),
        ({"rows": 3}, 7),
    ],
)
def test_accepted_automatic_sizes(keys: dict[str, int], world_size: int) -> None:
    assert not list(check_layout(*configured(**keys), world_size))


def test_sequence_parallelism_divides_rows_of_an_automatic_size() -> None:
    """Whatever the micro-batch, its tokens are divisible if those of one row are."""
    model, trainer = configured(tensor=2)
    model = replace(model, sequence_parallel=True, make_vocab_size_divisible_by=128)
    cfg = replace(composed(), model=model, trainer=replace(trainer, devices=2))
    assert not [problem for problem in check_config(cfg) if "sequence_parallel" in problem]
    odd = replace(model, seq_length=255, encoder_seq_length=255)
    (problem,) = (each for each in check_config(replace(cfg, model=odd)) if "sequence_parallel" in each)
    assert "model.seq_length=255 is not divisible by model.tensor_model_parallel_size=2" in problem
