# SPDX-License-Identifier: Apache-2.0
"""Parameter counts by formula, compared with the models, for one process and for every rank of a layout."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import EncoderConfig
from bionemo.megatron.layer_spec import PackedTransformerBlock
from bionemo.planning.layouts import Layout, Stage, layout_of
from bionemo.planning.step import layer_matrix_parameters, model_parameters, shape_of, stage_parameters
from tests.conftest import RUNNABLE
from tests.planning.simulated_rank import FAMILIES, build, config, simulate_rank

SHIPPED = RUNNABLE
KNOWN = {
    ("esm2nv", "pretrain_esm2_8M"): 7_542_848,
    ("esm1nv", "pretrain_small"): 43_612_544,
}  # published for BioNeMo v1


@pytest.mark.parametrize(("directory", "name"), SHIPPED, ids=[f"{path.parent.name}-{name}" for path, name in SHIPPED])
def test_parameters_of_every_configuration(directory: Path, name: str) -> None:
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
        **({"embedding norm": [model.embedding_layernorm]} if shape.embedding_norm else {}),
        **{
            f"{part} layers": [block.layers]
            for part, block in model.named_children()
            if isinstance(block, PackedTransformerBlock)
        },
    }
    for part, modules in held.items():
        assert parts.pop(part) == sum(count(module) for module in modules), part
    assert not any(parts.values())
    total = sum(model_parameters(shape).values())
    assert total == count(model) == KNOWN.get((directory.parent.name, name), total)
    for block_type, block in zip(shape.stacks, model.blocks(), strict=True):
        matrices = [parameter for parameter in block.layers[0].parameters() if parameter.dim() == 2]
        assert layer_matrix_parameters(shape, block_type) == sum(parameter.numel() for parameter in matrices)


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
    layout = layout_of(cfg)
    assert layout == Layout(tensor, pipeline, 2, gpus, rows=4)
    for rank in range(gpus):  # tensor ranks are neighbours, then replicas, then stages
        stage = Stage(rank // (2 * tensor), pipeline)
        with simulate_rank(layout, rank), torch.device("meta"):
            held = count(build(cfg))
        assert held == sum(stage_parameters(shape_of(cfg.model), layout, stage).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_head_size_that_differs_from_hidden_size(name: str) -> None:
    cfg = config(name, kv_channels=24, ffn_hidden_size=100)
    with torch.device("meta"):
        held = count(build(cfg))
    assert held == sum(model_parameters(shape_of(cfg.model)).values())


def test_unknown_model_family_is_rejected() -> None:
    other = object.__new__(EncoderConfig)
    vars(other).update(vars(config("esm2nv").model) | {"_target_": "other.Model"})
    with pytest.raises(UserError, match=r"does not support other\.Model"):
        shape_of(other)
