# SPDX-License-Identifier: Apache-2.0
"""Parameters by formula are those of the models that are built, whole and on every rank of a layout."""

from pathlib import Path

import pytest
import torch

from bionemo.config.compose import load
from bionemo.config.paths import options
from bionemo.config.schema import EncoderConfig
from bionemo.errors import UserError
from bionemo.planning.layout import Layout, Stage, layout_of
from bionemo.planning.sizes import layer_matrices, model_parameters, shape_of, stage_parameters
from tests.conftest import EXAMPLES

from .alone import build, config, one_of

SHIPPED = [(path, name) for path in sorted(EXAMPLES.glob("esm*/conf")) for name in options(path)]
KNOWN = {"pretrain_esm2_8M": 7_542_848, "pretrain_small": 43_612_544}  # of the predecessor


@pytest.mark.parametrize(("directory", "name"), SHIPPED, ids=[name for _, name in SHIPPED])
def test_every_shipped_model(directory: Path, name: str) -> None:
    cfg = load(name, [], directory)
    with torch.device("meta"):
        model = build(cfg)
    shape = shape_of(cfg.model)
    parts = model_parameters(shape)
    held = {
        "word table": model.word_embeddings,
        "layers": model.encoder.layers,
        "final norm": model.encoder.final_layernorm,
        "head": model.lm_head,
        **({"positions": model.position_embeddings} if shape.positions else {}),
    }
    for part, module in held.items():
        assert parts.pop(part) == sum(parameter.numel() for parameter in module.parameters()), part
    assert not any(parts.values())
    total = sum(model_parameters(shape).values())
    assert total == sum(parameter.numel() for parameter in model.parameters()) == KNOWN.get(name, total)
    matrices = [parameter for parameter in model.encoder.layers[0].parameters() if parameter.dim() == 2]
    assert layer_matrices(shape) == sum(parameter.numel() for parameter in matrices)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", ["esm1nv", "esm2nv"])
def test_every_rank_of_a_layout(name: str, tensor: int, pipeline: int) -> None:
    gpus = 2 * tensor * pipeline
    cfg = config(name, gpus, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    layout = layout_of(cfg)
    assert layout == Layout(tensor, pipeline, 2, gpus, rows=4)
    for rank in range(gpus):  # tensor ranks are neighbours, then replicas, then stages
        stage = Stage(rank // (2 * tensor), pipeline)
        with one_of(layout, rank), torch.device("meta"):
            held = sum(parameter.numel() for parameter in build(cfg).parameters())
        assert held == sum(stage_parameters(shape_of(cfg.model), layout, stage).values())


def test_heads_of_another_size_than_the_hidden_size_says() -> None:
    cfg = config("esm2nv", kv_channels=24, ffn_hidden_size=100)
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in build(cfg).parameters())
    assert held == sum(model_parameters(shape_of(cfg.model)).values())


def test_a_model_without_formulas_is_refused() -> None:
    other = object.__new__(EncoderConfig)
    vars(other).update(vars(config("esm2nv").model) | {"_target_": "other.Model"})
    with pytest.raises(UserError, match=r"no plan for other\.Model"):
        shape_of(other)
