# SPDX-License-Identifier: Apache-2.0
"""The useful FLOPs of a step are those that torch counts, and the utilization of a GPU follows from them."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bionemo.config.compose import load
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.megatron import attention
from bionemo.models.flops import training_flops
from bionemo.training.module import TrainingModule
from bionemo.training.throughput import Reading, Throughput
from tests.planning.simulated_rank import gpu_attention
from tests.support.models import build_model
from tests.support.runs import MODELS, tiny

LENGTHS, SOURCE_LENGTHS = (20, 3, 41), (7, 50, 12)


def sequences(lengths: tuple[int, ...]) -> TokenSequences:
    """Return tokens without padding."""
    number = sum(lengths)
    ids = np.random.default_rng(1).integers(5, 20, number)
    return TokenSequences(ids, np.array(lengths), number, np.arange(len(lengths), dtype=np.uint64))


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """Except that it counts all pairs of causal attention, and the dense layer of the head of an encoder."""
    model = build_model(name).train()
    source = sequences(SOURCE_LENGTHS) if hasattr(model, "encode") else None
    positions = np.arange(0, sum(LENGTHS), 2)
    batch = TokenizedBatch(sequences(LENGTHS), positions, np.full(len(positions), 7), source=source).unpack()
    with (
        patch.object(attention, "attend", gpu_attention(per_sequence=True)),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model.compute_loss(batch)[0].backward()
    config = model.config
    masked = 0.0
    if model.causal or source is not None:
        masked = 6.0 * config.num_layers * config.hidden_size * sum(n * n for n in LENGTHS)
    dense = sum(p.numel() for n, p in model.lm_head.named_parameters() if n == "dense.weight")
    assert model.count_flops(batch) + masked + 6 * dense * len(positions) == counter.get_total_flops()


def test_flops_by_hand() -> None:
    """One layer of size 2 with one head: 4 x 4 weights of attention, 2 x 16 of the MLP; two sequences of 3 and 1."""
    config: Any = SimpleNamespace(
        num_layers=1, hidden_size=2, ffn_hidden_size=8, num_attention_heads=1, head_size=2, activation="gelu"
    )
    head = 6 * 2 * 2 * 5  # two targets, five entries
    assert training_flops(config, (3, 1), 2, 5) == 6 * 4 * (16 + 32) + head + 12 * 2 * (9 + 1)
    assert training_flops(config, (3, 1), 2, 5, causal=True) == 6 * 4 * (16 + 32) + head + 12 * 2 * (9 + 1) / 2
    config.activation = "swiglu"  # 3 x 16 weights
    assert training_flops(config, (3, 1), 2, 5) == 6 * 4 * (16 + 48) + head + 12 * 2 * (9 + 1)


@pytest.mark.parametrize(
    ("device", "precision", "ranks", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 1, 0.4),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 2, 0.2),
        ("NVIDIA H100 80GB HBM3", "32", 1, 0.4 * 989 / 67),
        ("an unknown GPU", "bf16-mixed", 1, None),
    ],
)
def test_logged_utilization(
    device: str, precision: str, ranks: int, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = MODELS["esm2nv"]
    cfg: Any = load(
        family.name,
        tiny(f"model.tensor_model_parallel_size={ranks}", f"trainer.devices={ranks}"),
        family.directory / "conf",
    )
    module: Any = TrainingModule(nn.Module, cfg.model, cfg.trainer, SimpleNamespace(  # type: ignore[arg-type]
        dtype=torch.float32 if precision == "32" else torch.bfloat16, needs_scaling=False
    ))  # fmt: skip
    monkeypatch.setattr(TrainingModule, "on_gpu", True)
    gpu = SimpleNamespace(name=device, total_memory=81_559 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    position = SimpleNamespace(consumed_tokens=9, consumed_samples=3)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(position=position), global_step=1, loggers=[])
    monkeypatch.setattr(Throughput, "read", lambda *_: Reading(1.0, 2.0, 0.4 * 989e12))
    module._log_training(1e-4)
    found = module.logged_metrics.get("mfu")
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_reading_counts_the_flops_of_its_interval() -> None:
    throughput = Throughput()
    throughput.start(0)
    with patch("time.perf_counter", return_value=throughput._since + 4.0):
        throughput.count_step(6.0)
        throughput.count_step(2.0)
        assert throughput.read(100) == Reading(25.0, 2.0, 2.0)
    with patch("time.perf_counter", return_value=throughput._since + 1.0):
        throughput.count_step(3.0)
        assert throughput.read(150) == Reading(50.0, 1.0, 3.0)
