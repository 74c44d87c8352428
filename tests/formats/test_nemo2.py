# SPDX-License-Identifier: Apache-2.0
"""ESM-2 of BioNeMo 2: checkpoints of Megatron-Core and torch, read bitwise, with the logits of both references."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, describe, open_model
from bionemo.training.resume import open_initial_weights
from tests.conftest import ROOT, checkpoint_command
from tests.formats.archives import bits, same
from tests.support import nemo2
from tests.support.huggingface import SEQUENCES, check_same_logits, states, theirs
from tests.support.parallel_layouts import Layout, on_every_process

TOKENS = torch.tensor([[0, 20, 15, 11, 5, 19, 12, 5, 15, 16, 10, 2], [0, 5, 23, 13, 9, 2, 1, 1, 1, 1, 1, 1]])
OURS = {
    "word_embeddings": "embedding.word_embeddings", "lm_head.bias": "output_layer.bias",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}  # fmt: skip


class Checkpoint(NamedTuple):
    path: Path
    model: EsmForMaskedLM  # with the same weights
    weights: dict[str, Tensor]  # under the names of BioNeMo 2
    logits: dict[bool, Tensor]  # of Megatron-Core, see tests.support.nemo2.save


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two tensor ranks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint with stacked layers that Megatron-Core has saved on one or two tensor-parallel ranks."""
    directory, layout = tmp_path_factory.mktemp("nemo2"), Layout(tensor=request.param)
    model = theirs(directory / "hf", initializer_range=0.2)  # both forms of GELU must differ
    weights = nemo2.weights(model, rows=128 * layout.tensor)
    logits = on_every_process(layout, nemo2.save, directory / "saved", weights, TOKENS, directory=directory)
    nemo2.write_context(directory / "saved")
    return Checkpoint(directory / "saved", model, weights, logits)


@pytest.fixture
def written(tmp_path: Path) -> Checkpoint:
    """A checkpoint with separate layers that torch has saved; a test may change it."""
    model = theirs(tmp_path / "hf")
    weights = nemo2.weights(model)
    return Checkpoint(nemo2.write(tmp_path / "saved", weights), model, weights, {})


def expect(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Return a weight by our name; BioNeMo's padding of the vocabulary is replaced by 95 rows of zeros."""
    for ours, other in OURS.items():
        name = name.replace(ours, other)
    tensor = weights[name]
    if name in ("embedding.word_embeddings.weight", "output_layer.bias"):
        return torch.cat([tensor[:33], torch.zeros(95, *tensor.shape[1:], dtype=tensor.dtype)])
    return tensor


def check_weights(found: Checkpoint) -> None:
    source = open_model(found.path).weights
    shapes = source.shapes("weights")
    assert len(shapes) == len(found.weights)
    for name, shape in shapes.items():
        values = source.read(f"weights/{name}")
        assert values.shape == shape
        assert torch.equal(bits(values), bits(expect(name, found.weights))), name
    name = "encoder.layers.1.self_attention.linear_qkv.weight"
    block = source.read(f"weights/{name}", (8, 4), (24, 2))
    assert torch.equal(block, expect(name, found.weights)[8:32, 4:6])


def test_weights_of_megatron(checkpoint: Checkpoint) -> None:
    """Weights are read bitwise, and logits are those of EsmForMaskedLM, which has token dropout, too."""
    assert len(list((checkpoint.path / "weights").glob("*.distcp"))) >= len(checkpoint.logits[False]) // 2
    check_weights(checkpoint)
    check_same_logits(checkpoint.path, checkpoint.model)


@pytest.mark.parametrize("fused", [False, True])
def test_logits_of_megatron(fused: bool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The fused kernel computes another GELU than the exact one, in the layers, but not in the head."""
    shutil.copytree(checkpoint.path, tmp_path / "x")
    nemo2.write_context(tmp_path / "x", bias_activation_fusion=fused, token_dropout=False)
    ours = bionemo.load(tmp_path / "x").logits([row[row != 1][1:-1].numpy() for row in TOKENS])
    for kind, logits in checkpoint.logits.items():
        errors = [
            np.abs(found - row[1 : len(found) + 1, :33].numpy()).max() / float(logits.abs().max())
            for found, row in zip(ours, logits, strict=True)
        ]
        assert (max(errors) < 1e-5) == (kind == fused), errors


def test_masked_tokens(written: Checkpoint) -> None:
    tokens = torch.tensor([[0, 20, 32, 11, 5, 32, 12, 5, 15, 2]])
    with torch.no_grad():
        logits = written.model(tokens).logits[0, 1:-1].numpy()
    (ours,) = bionemo.load(written.path).logits([tokens[0, 1:-1].numpy()])
    np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_separate_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    model = theirs(tmp_path / "hf").to(dtype)
    weights = nemo2.weights(model)
    check_weights(Checkpoint(nemo2.write(tmp_path / "x", weights), model, weights, {}))
    if dtype == torch.float32:
        check_same_logits(tmp_path / "x", model)


def test_conversions(written: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command accepts the directory, and its weights/; the export has the names and bits of EsmForMaskedLM."""
    for name in ("", "weights"):
        assert checkpoint_command(monkeypatch, "convert", written.path / name, tmp_path / f"ours{name}") == 0
        assert bionemo.load(written.path / name).path == written.path
        assert open_initial_weights(str(written.path / name)).path == written.path
        assert describe(written.path / name).startswith(f"NeMo 2       {written.path}\n")
    check_same_logits(tmp_path / "ours", written.model, SEQUENCES[:1])
    convert(written.path, tmp_path / "x.nemo")
    for number, source in enumerate((written.path, tmp_path / "ours", tmp_path / "x.nemo")):
        convert(source, tmp_path / f"hf{number}", "hf")
        again: Any = EsmForMaskedLM.from_pretrained(tmp_path / f"hf{number}")
        found, expected = states(again), states(written.model)
        for kind in ("weight", "bias"):  # BioNeMo 2 has no contact head
            assert not found.pop(f"esm.contact_head.regression.{kind}").any()
            expected.pop(f"esm.contact_head.regression.{kind}")
        assert same(found, expected)


def test_a_directory_of_checkpoints_names_one(written: Checkpoint, tmp_path: Path) -> None:
    shutil.move(written.path, tmp_path / "checkpoints" / "step=1")
    with pytest.raises(UserError, match=f"give the path of one in it, such as {tmp_path}/checkpoints/step=1$"):
        bionemo.load(tmp_path / "checkpoints")


def test_arguments_that_were_not_given(written: Checkpoint) -> None:
    """io.json contains only the arguments that were given; the others have the defaults of ESM2Config."""
    settings = {"bias_activation_fusion": ("activation", "gelu_tanh"), "seq_length": ("seq_length", 1024),
                "kv_channels": ("kv_channels", None), "biobert_spec_option": ("layernorm_epsilon", 1e-5)}  # fmt: skip
    for without, (key, value) in settings.items():
        nemo2.write_context(written.path, without=without)
        assert open_model(written.path).config[key] == value
    nemo2.write_context(written.path, without="ffn_hidden_size")
    with pytest.raises(UserError, match=r"linear_fc1.weight has shape \(96, 32\), expected \(5120, 32\)"):
        open_model(written.path)


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"activation_func": "bionemo.esm2.model.model.esm_gelu_func"}, {"activation": "gelu"}),
        ({"activation_func": "torch._C._nn.gelu", "bias_activation_fusion": True}, {"activation": "gelu_tanh"}),
        ({"token_dropout": False}, {"embedding_token_dropout": False}),
        ({"layernorm_epsilon": 1e-6, "hidden_dropout": 0.1}, {"layernorm_epsilon": 1e-6, "hidden_dropout": 0.1}),
        ({"seq_length": 2048, "make_vocab_size_divisible_by": 64}, {"max_position_embeddings": 2048}),
        ({"kv_channels": 8, "use_esm_attention": True}, {"kv_channels": 8}),
    ],
)
def test_arguments(arguments: dict[str, Any], config: dict[str, Any], written: Checkpoint) -> None:
    nemo2.write_context(written.path, **arguments)
    found = open_model(written.path).config
    assert {key: found[key] for key in config} == config


def test_a_fused_gelu_has_no_hugging_face_form(written: Checkpoint, tmp_path: Path) -> None:
    nemo2.write_context(written.path, bias_activation_fusion=True)
    with pytest.raises(UserError, match="its activation is 'gelu_tanh'; that of ESM-2 is gelu"):
        convert(written.path, tmp_path / "new", "hf")
    assert not (tmp_path / "new").exists()


def test_documented_change_of_the_fused_gelu(
    written: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    nemo2.write_context(written.path, without="bias_activation_fusion")
    code = (ROOT / "docs" / "how-to" / "migrate.md").read_text().split("```python\n")[1].split("```")[0]
    shutil.copytree(written.path, tmp_path / "here" / "NAME")
    monkeypatch.chdir(tmp_path / "here")
    exec(code, {})
    convert(tmp_path / "here" / "NAME", tmp_path / "hf" / "new", "hf")
    check_same_logits(tmp_path / "hf" / "new", written.model, SEQUENCES[:1])
