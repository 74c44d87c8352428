# SPDX-License-Identifier: Apache-2.0
"""Parameters by formula are those of the models that are built, whole and on every rank of a layout."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import EncoderConfig
from bionemo.megatron.layer_spec import Block
from bionemo.planning.layout import Layout, Stage, layout_of
from bionemo.planning.sizes import layer_matrices, model_parameters, shape_of, stage_parameters
from tests.conftest import RUNNABLE
from tests.planning.alone import FAMILIES, build, config, one_of

SHIPPED = RUNNABLE
KNOWN = {("esm2nv", "pretrain_esm2_8M"): 7_542_848, ("esm1nv", "pretrain_small"): 43_612_544}  # of the predecessor


@pytest.mark.parametrize(("directory", "name"), SHIPPED, ids=[f"{path.parent.name}-{name}" for path, name in SHIPPED])
def test_every_shipped_model(directory: Path, name: str) -> None:
    cfg = load(name, [], directory)
    with torch.device("meta"):
        model = build(cfg)
    shape = shape_of(cfg.model)
    parts = model_parameters(shape)
    held: dict[str, list[nn.Module]] = {
        "word table": [model.word_embeddings],
        "final norms": [block.final_layernorm for block in model.blocks()],
        "head": [model.lm_head],
        **({"positions": [model.position_embeddings]} if shape.positions else {}),
        **({"embedding norm": [model.embedding_layernorm]} if shape.normed else {}),
        **{f"{part} layers": [block.layers] for part, block in model.named_children() if isinstance(block, Block)},
    }
    for part, modules in held.items():
        assert parts.pop(part) == sum(count(module) for module in modules), part
    assert not any(parts.values())
    total = sum(model_parameters(shape).values())
    assert total == count(model) == KNOWN.get((directory.parent.name, name), total)
    for kind, block in zip(shape.stacks, model.blocks(), strict=True):
        matrices = [parameter for parameter in block.layers[0].parameters() if parameter.dim() == 2]
        assert layer_matrices(shape, kind) == sum(parameter.numel() for parameter in matrices)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        *((name, *ways) for name in ("esm1nv", "esm2nv", "gpt3") for ways in ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2))),
        *(("esm1b", *ways) for ways in ((2, 1), (1, 2))),
        *((name, *ways) for name in ("prott5nv", "megamolbart") for ways in ((2, 1), (4, 1))),
    ],
)
def test_every_rank_of_a_layout(name: str, tensor: int, pipeline: int) -> None:
    gpus = 2 * tensor * pipeline
    cfg = config(name, gpus, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    layout = layout_of(cfg)
    assert layout == Layout(tensor, pipeline, 2, gpus, rows=4)
    for rank in range(gpus):  # tensor ranks are neighbours, then replicas, then stages
        stage = Stage(rank // (2 * tensor), pipeline)
        with one_of(layout, rank), torch.device("meta"):
            held = count(build(cfg))
        assert held == sum(stage_parameters(shape_of(cfg.model), layout, stage).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_of_another_size_than_the_hidden_size_says(name: str) -> None:
    cfg = config(name, kv_channels=24, ffn_hidden_size=100)
    with torch.device("meta"):
        held = count(build(cfg))
    assert held == sum(model_parameters(shape_of(cfg.model)).values())


def test_a_model_without_formulas_is_refused() -> None:
    other = object.__new__(EncoderConfig)
    vars(other).update(vars(config("esm2nv").model) | {"_target_": "other.Model"})
    with pytest.raises(UserError, match=r"no plan for other\.Model"):
        shape_of(other)
