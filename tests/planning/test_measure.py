# SPDX-License-Identifier: Apache-2.0
"""Parameters of a plan, compared with those of models with all layers, and plans of models of other packages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DataConfig, RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron.groups import simulate
from bionemo.models.esm2nv import ESM2nv
from bionemo.planning.estimate import stage_parameters
from bionemo.planning.layouts import Layout, Stage, read_layout
from bionemo.planning.lengths import estimate_tokens
from bionemo.planning.measure import StepProfiler
from tests.conftest import ROOT, RUNNABLE
from tests.planning.simulated_rank import FAMILIES, TENSOR, build, config, train

KNOWN = {
    ("esm2nv", "pretrain_esm2_8M"): 7_542_848,
    ("esm1nv", "pretrain_small"): 43_612_544,
}  # published for BioNeMo v1


def count_parameters(cfg: RunConfig) -> dict[str, int]:
    """Return the parameters of a plan, by part."""
    profiler = StepProfiler(cfg.model, estimate_tokens(cfg.model), half=True)
    return profiler.profile(Layout()).count_parameters(cfg.model.num_layers)


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
    parts = count_parameters(cfg)
    expected: dict[str, list[nn.Module]] = {
        "word table": [model.word_embeddings],
        "final norms": [block.final_layernorm for block in model.blocks()],
        "head": [model.lm_head],
        **{f"{part} layers": [block.layers] for part, block in model.named_children() if block in model.blocks()},
    }
    for part, modules in expected.items():
        assert parts[part] == sum(count(module) for module in modules), part
    assert sum(parts.values()) == count(model) == KNOWN.get((directory.parent.name, name), count(model))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        *(
            (name, *sizes)
            for name in ("esm1nv", "esm2nv", "gpt3")
            for sizes in ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
        ),
        *(("esm1b", *sizes) for sizes in ((2, 1), (1, 2))),
        *((name, *sizes) for name in ("prott5nv", "megamolbart") for sizes in ((2, 1), (4, 1))),
    ],
)
def test_parameters_of_every_rank(name: str, tensor: int, pipeline: int) -> None:
    gpus = 2 * tensor * pipeline
    cfg = config(name, gpus, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    layout = read_layout(cfg)
    assert layout == Layout(tensor, pipeline, 2, gpus, micro_batch_size=4)
    profiler = StepProfiler(cfg.model, estimate_tokens(cfg.model), half=True)
    for rank in range(gpus):  # tensor ranks are neighbours, then replicas, then stages
        stage = Stage(rank // (2 * tensor), pipeline)
        with simulate(tensor, pipeline, rank, layout.data), torch.device("meta"):
            found = count(build(cfg))
        assert found == stage_parameters(profiler, layout, stage)


@pytest.mark.parametrize("name", FAMILIES)
def test_head_size_that_differs_from_hidden_size(name: str) -> None:
    cfg = config(name, kv_channels=24, ffn_hidden_size=100)
    with torch.device("meta"):
        found = count(build(cfg))
    assert found == sum(count_parameters(cfg).values())


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
    narrow, wide = (
        config(load("pretrain_own_model", [*given, f"model.conv_kernel={kernel}"], own_model), **changes)
        for kernel in (1, 31)
    )
    planned, measured, peak = train(wide, 0, half=True)
    assert planned.weights == measured.weights
    assert planned.activations + planned.copies + planned.working == pytest.approx(peak, rel=0.04)
    smaller, _, _ = train(narrow, 0, half=True)
    assert planned.weights - smaller.weights == 4 * 30 * 64
    saved = 30 * 4 * 128 * 64 * 4  # each weight saves its input: 4 rows of 128 tokens, fp32
    assert planned.activations - smaller.activations == pytest.approx(saved, rel=0.02)


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
        count_parameters(cfg)


def test_lengths_of_unknown_data() -> None:
    cfg = config("esm2nv")
    vars(cfg.model)["data"] = object.__new__(type("OwnData", (DataConfig,), {}))
    vars(cfg.model.data).update(dynamic_padding=False, packing=True)
    [tokens] = estimate_tokens(cfg.model)
    assert (tokens.row, tokens.attended, tokens.target_fraction) == (128, 128, 1)
    assert "OwnData are unknown" in tokens.source
