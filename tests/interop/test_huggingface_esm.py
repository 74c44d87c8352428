# SPDX-License-Identifier: Apache-2.0
"""ESM-2 to Hugging Face's form and back: transformers open what we write and compute the same, and the other way."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, EsmForMaskedLM, EsmModel
from transformers import EsmConfig as TheirConfig

import bionemo
from bionemo.checkpoint import Checkpoint, TensorsInMemory, tools
from bionemo.common.errors import UserError
from bionemo.interop.convert import convert, open_model
from bionemo.interop.huggingface import HuggingFaceModel, write
from tests.conftest import checkpoint_command
from tests.interop.archives import same
from tests.training.runs import run, run_on_ranks

SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 3, "M", "GG<mask>A"]
LAYOUTS = [(20, 16), (20, 24), (20, 32), (20, 64), (40, 64), (40, 128)]  # heads, and their size: 8M to 15B


def theirs(path: Path, heads: int = 4, size: int = 8, layers: int = 2, **settings: Any) -> EsmForMaskedLM:
    """A model of random weights, as transformers save it."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "hidden_size": heads * size, "emb_layer_norm_before":
        False, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 96, "token_dropout":
        True, "position_embedding_type": "rotary", "max_position_embeddings": 98, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    model = EsmForMaskedLM(TheirConfig(**(config | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    return model


def states(model: EsmForMaskedLM) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("inv_freq")}


def compute_the_same(path: Path, model: EsmForMaskedLM, sequences: Sequence[str] = SEQUENCES) -> None:
    """Logits of our model of these weights, and of theirs, padded."""
    ours = bionemo.load(path)
    ids = [torch.tensor([0, *each.tolist(), 2]) for each in ours.ids(sequences)]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
    with torch.no_grad():
        logits = model(tokens, attention_mask=(tokens != 1).long()).logits
    for found, row, each in zip(ours.logits(sequences), logits, ids, strict=True):
        expected = row[1 : len(each) - 1].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("heads", "size"), [pytest.param(*each, marks=[pytest.mark.slow] if each[0] == 40 else []) for each in LAYOUTS]
)
def test_there_and_back(heads: int, size: int, tmp_path: Path) -> None:
    model = theirs(tmp_path / "theirs", heads, size)
    convert(tmp_path / "theirs", tmp_path / "ours")
    compute_the_same(tmp_path / "ours", model)
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again, told = EsmForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(told[key] for key in told)
    assert same(states(again), states(model))  # the contact head is among them


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that transformers know, the same whichever way the model has gone."""
    theirs(tmp_path / "theirs")
    for source, target in (("theirs", "one"), ("one", "two.nemo"), ("two.nemo", "three")):
        assert checkpoint_command(monkeypatch, "convert", tmp_path / source, tmp_path / target) == 0
    for name in ("one", "three"):
        convert(tmp_path / name, tmp_path / "hf" / name, "hf")
    one, three = tmp_path / "hf" / "one", tmp_path / "hf" / "three"
    names = {"README.md", "config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert set(os.listdir(one)) == set(os.listdir(three)) == names
    assert (one / "config.json").read_bytes() == (three / "config.json").read_bytes()
    tensors = load_file(three / "model.safetensors")  # a .nemo archive has no contact head
    assert not tensors.pop("esm.contact_head.regression.weight").any()
    assert not tensors.pop("esm.contact_head.regression.bias").any()
    assert all(torch.equal(tensor, load_file(one / "model.safetensors")[name]) for name, tensor in tensors.items())
    tokenizer = AutoTokenizer.from_pretrained(one)
    assert tokenizer("MKJA<mask>")["input_ids"] == [0, 20, 15, 3, 5, 32, 2]
    card = (one / "README.md").read_text()
    assert "library_name: bionemo" in card
    assert "| class | ESM2nv: " in card
    assert "| num_layers | 2 |" in card


def test_names_of_old_files(tmp_path: Path) -> None:
    """As on the hub: frequencies and positions that are computed, a table of positions, the word table again."""
    model = theirs(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    tensors |= {
        f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq": torch.ones(4) for layer in range(2)
    }
    tensors["esm.embeddings.position_ids"] = torch.arange(98)[None]
    tensors["esm.embeddings.position_embeddings.weight"] = torch.ones(98, 32)
    tensors["lm_head.decoder.weight"] = tensors["esm.embeddings.word_embeddings.weight"].clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    compute_the_same(tmp_path / "hf", model)
    tensors["lm_head.decoder.weight"] += 1
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    with pytest.raises(UserError, match=r"lm_head\.decoder\.weight is not its esm\.embeddings"):
        HuggingFaceModel(tmp_path / "hf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = theirs(tmp_path / "full").to(dtype)
    model.save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again = EsmForMaskedLM.from_pretrained(tmp_path / "again")
    assert again.dtype == dtype
    assert same(states(again), states(model))


def test_any_layout_exports_the_same_file(tmp_path: Path) -> None:
    """A run on two tensor ranks, and one on one, from the same weights, which a rate of 0 leaves alone."""
    theirs(tmp_path / "hf", heads=2, size=16)
    words = [f"restore_from_path={tmp_path / 'hf'}", "trainer.max_steps=1", "trainer.val_check_interval=1",
             "model.ffn_hidden_size=96", "model.optim.lr=1e-60", "model.optim.weight_decay=0.0",
             "model.optim.sched.max_lr=1e-60", "model.optim.sched.min_lr=0.0",
             "model.max_position_embeddings=96"]  # fmt: skip
    run(tmp_path / "one", *words)
    ended = run_on_ranks(tmp_path / "two", *words, "model.tensor_model_parallel_size=2", ranks=2)
    assert [status for status, _ in ended] == [0, 0], ended
    for name in ("one", "two"):
        (saved,) = (tmp_path / name / "checkpoints").glob("*-last")
        convert(saved, tmp_path / f"{name}-hf", "hf")
    one, two = tmp_path / "one-hf", tmp_path / "two-hf"
    for name in ("config.json", "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    before, after = load_file(tmp_path / "hf" / "model.safetensors"), load_file(one / "model.safetensors")
    name = "esm.encoder.layer.1.attention.self.key.weight"
    assert torch.equal(before[name], after[name])


def test_the_contact_head_travels_beside_the_weights(tmp_path: Path) -> None:
    model = theirs(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours")
    head = open_model(tmp_path / "ours").contact_head
    assert head == Checkpoint(tmp_path / "ours").state["contact_head"]
    assert head is not None
    assert torch.equal(torch.tensor([head["weight"]]), model.esm.contact_head.regression.weight)
    assert torch.equal(torch.tensor([head["bias"]]), model.esm.contact_head.regression.bias)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"position_embedding_type": "relative_key"}, "type is 'relative_key': rotary and absolute are read"),
    ({"position_embedding_type": None}, "its position_embedding_type is 'None'"),
    ({"emb_layer_norm_before": True}, "says emb_layer_norm_before: 'True', of which False alone is read"),
    ({"is_folding_model": True}, "says is_folding_model: 'True'"),
    ({"rope_theta": 500000.0}, "says rope_theta: '500000.0', of which 10000.0 alone is read"),
    ({"vocab_size": 64}, "its vocab_size is '64', of ESM-2's vocabulary 33: it reads other letters"),
    ({"mask_token_id": None}, "its mask_token_id is 'None', of ESM-2's vocabulary 32"),
    ({"token_dropout": "yes"}, "its token_dropout is 'yes', neither true nor false"),
    ({"hidden_size": 30}, "its hidden_size 30 is not divisible by its num_attention_heads 4"),
    ({"num_hidden_layers": 3}, "it lacks 16 weights: 'esm.encoder.layer.2.attention.LayerNorm.weight', "),
    ({"num_hidden_layers": 10**9}, "gives no num_hidden_layers from 1 to 1000"),
    ({"layer_norm_eps": -1}, "its layer_norm_eps is '-1', no number from 0 on"),
]


@pytest.mark.parametrize(("settings", "told"), SETTINGS)
def test_what_is_not_read_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    theirs(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(tmp_path)
    assert told in str(caught.value)


NO_HEADS: list[Any] = [
    1,
    {},
    {"weight": [0.0] * 7, "bias": 0.0},
    {"weight": [0.0] * 7 + ["x"], "bias": 0.0},
    {"weight": [0.0] * 8, "bias": float("nan")},
    {"weight": "x" * 8, "bias": 0.0},
]


@pytest.mark.parametrize("head", NO_HEADS)
def test_a_contact_head_that_is_none(head: object, tmp_path: Path) -> None:
    theirs(tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf")
    state = {"config": source.config, "model": {"words": 33}, "contact_head": head}
    weights = ((name, source.read(f"weights/{name}")) for name in source.shapes("weights"))
    tools.write_weights(tmp_path / "x", state, weights)
    with pytest.raises(UserError, match="its contact head is none of a weight for each head of each layer"):
        open_model(tmp_path / "x")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    theirs(tmp_path)
    (tmp_path / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\nA\nL\n")
    with pytest.raises(UserError, match=r"its vocab.txt is not ESM-2's"):
        HuggingFaceModel(tmp_path)


def test_a_bare_model_has_no_head(tmp_path: Path) -> None:
    EsmModel.save_pretrained(theirs(tmp_path / "hf").esm, tmp_path / "bare")
    with pytest.raises(UserError, match=r"it lacks 5 weights: 'lm_head\.dense\.weight'"):
        HuggingFaceModel(tmp_path / "bare")


def test_what_is_not_esm2_is_not_written(tmp_path: Path) -> None:
    config = {"_target_": "bionemo.models.esm2nv.ESM2nv", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
              "ffn_hidden_size": 16, "max_position_embeddings": 6, "make_vocab_size_divisible_by": 8}  # fmt: skip
    nothing = TensorsInMemory(tmp_path, {})
    for wrong, words, told in (
        ({"kv_channels": 3}, 33, "its heads are of 3"),
        ({"activation": "gelu_tanh"}, 33, "its activation is 'gelu_tanh'"),
        ({}, 30, "its vocabulary has 30 tokens, ESM-2's 33"),
    ):
        with pytest.raises(UserError, match=told):
            write(tmp_path / "hf", config | wrong, words, nothing)
    assert os.listdir(tmp_path) == []
