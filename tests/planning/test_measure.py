# SPDX-License-Identifier: Apache-2.0
"""Costs of a step on fake tensors, compared with real training steps, and plans of models of other packages."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DataConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import attention
from bionemo.models.esm2nv import ESM2nv
from bionemo.planning.layouts import read_layout
from bionemo.planning.lengths import estimate_tokens
from bionemo.planning.measure import Step, measure_model, measure_step
from tests.conftest import ROOT, RUNNABLE
from tests.planning.simulated_rank import CHANGES, TENSOR, batch, build, config, gpu_attention, step_of, train

KNOWN = {
    ("esm2nv", "pretrain_esm2_8M"): 7_542_848,
    ("esm1nv", "pretrain_small"): 43_612_544,
}  # published for BioNeMo v1


FIRST = {directory: name for directory, name in reversed(RUNNABLE)}  # one configuration of each directory
CONFIGURATIONS = [
    pytest.param(
        directory, name, id=f"{directory.parent.name}-{name}",
        marks=[] if name == FIRST[directory] or (directory.parent.name, name) in KNOWN else pytest.mark.slow,
    )
    for directory, name in RUNNABLE
]  # fmt: skip


@pytest.mark.parametrize(("directory", "name"), CONFIGURATIONS)
def test_parameters_of_every_configuration(directory: Path, name: str) -> None:
    cfg = load(name, [], directory)
    with torch.device("meta"):
        model = build(cfg)
    parts, _ = measure_model(Step(cfg.model, estimate_tokens(cfg.model), half=True), rows=1)
    assert parts["word embeddings"] == count(model.word_embeddings)
    assert sum(parts.values()) == count(model) == KNOWN.get((directory.parent.name, name), count(model))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


STEPS = [  # family, half precision, change, rank, Triton
    ("esm1nv", True, "selective", 0, True),
    ("esm1nv", True, "none", 0, False),
    ("esm1b", True, "stages", 0, True),
    ("esm2nv", True, "uniform", 0, True),
    ("esm2nv", True, "sequence", 0, True),
    ("esm2nv", False, "stages", 1, True),
    ("gpt3", True, "tensor", 0, True),
    ("gpt3", True, "stages and full vocabulary", 1, True),
    ("prott5nv", True, "uniform", 0, True),
    ("megamolbart", False, "sequence and uniform", 0, False),
]


@pytest.mark.parametrize(("name", "half", "what", "rank", "triton"), STEPS)
def test_memory_of_a_step(name: str, half: bool, what: str, rank: int, triton: bool) -> None:
    costs, measured = train(config(name, **CHANGES[what]), rank, half, triton)
    assert measured.weights == 4 * costs.parameters
    for state, size in (("gradients", 4), ("moments", 8)):
        assert getattr(measured, state) == pytest.approx(size * costs.parameters, rel=0.001)
    assert costs.peak == pytest.approx(measured.activations, rel=0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_optimizer_holds_its_share_of_the_moments(rank: int) -> None:
    costs, measured = train(config("esm2nv", gpus=2, optimizer="distributed_fused_adam"), rank, False)
    assert measured.moments == pytest.approx(8 * costs.parameters / 2, rel=0.01)


@pytest.mark.parametrize(("name", "change"), [("esm1nv", "block"), ("esm2nv", "none"), ("esm2nv", "uniform-3")])
def test_flops_match_the_flop_counter(name: str, change: str) -> None:
    cfg = config(name, **CHANGES[change])
    model, micro_batch = build(cfg).train(), batch(cfg)
    replaced = patch.object(attention, "attend", gpu_attention(per_sequence=True))
    with replaced, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.compute_loss(micro_batch)[0].backward()
    step = step_of(cfg, micro_batch, half=False)
    assert measure_step(step, read_layout(cfg), 0).flops == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_six_flops_per_parameter_and_token_plus_attention() -> None:
    cfg = config("esm2nv", num_layers=33, hidden_size=1280, ffn_hidden_size=5120, num_attention_heads=20)
    step = step_of(cfg, batch(cfg), half=True)
    [tokens] = step.tokens
    size = tokens.count(4)
    layers = 6 * 33 * 12 * 1280**2 * size + 12 * 33 * 1280 * tokens.attended * size
    head = 6 * (1280**2 + 33 * 1280) * round(0.15 * size)
    assert 3 * measure_model(step, 4)[1] == pytest.approx(layers + head, rel=1e-4)


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Allow the package of examples/own_model; return the directory of its configurations."""
    directory = ROOT / "examples" / "own_model"
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", "own_model")
    return directory / "conf"


@pytest.mark.parametrize("changes", [{}, TENSOR | {"sequence_parallel": True}], ids=["single", "sequence"])
def test_model_of_another_package(own_model: Path, changes: dict[str, Any]) -> None:
    given = ["data@model.data=mock", "trainer.num_nodes=1"]
    costs, measured = train(config(load("pretrain_own_model", given, own_model), **changes), 0, half=True)
    assert 4 * costs.parameters == measured.weights
    assert costs.peak == pytest.approx(measured.activations, rel=0.04)


class Reads(ESM2nv):
    """A model whose forward pass depends on values."""

    def embed(self, batch: PackedBatch, keys_T: Tensor | None) -> Tensor:
        """Scale the embeddings by a number that is read from the batch."""
        return super().embed(batch, keys_T) * int(batch.tokens[0])


def test_model_that_reads_values_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("esm2nv")
    cfg.model._target_ = f"{__name__}.Reads"
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", "tests")
    with pytest.raises(UserError, match=r"cannot measure .*Reads: .* depends on values"):
        measure_model(Step(cfg.model, estimate_tokens(cfg.model), half=True), rows=1)


def test_lengths_of_unknown_data() -> None:
    cfg = config("esm2nv")
    vars(cfg.model)["data"] = object.__new__(type("OwnData", (DataConfig,), {}))
    vars(cfg.model.data).update(dynamic_padding=False, packing=True)
    [tokens] = estimate_tokens(cfg.model)
    assert (tokens.row, tokens.attended, tokens.target_fraction) == (128, 128, 1)
    assert "OwnData are unknown" in tokens.source
