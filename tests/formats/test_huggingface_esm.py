# SPDX-License-Identifier: Apache-2.0
"""ESM-2 in the Hugging Face format: transformers and this package open each other's models with equal logits."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, EsmForMaskedLM

from bionemo.checkpoint import Checkpoint, TensorsInMemory, tools
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, open_model
from bionemo.formats.huggingface.directory import HuggingFaceModel, write
from tests.conftest import checkpoint_command
from tests.formats.archives import same
from tests.support.huggingface import check_same_logits, states, theirs
from tests.support.runs import run, run_on_ranks

LAYOUTS = [(20, 16), (20, 24), (20, 32), (20, 64), (40, 64), (40, 128)]  # heads and head size, 8M to 15B


@pytest.mark.parametrize(
    ("heads", "size"), [pytest.param(*each, marks=[pytest.mark.slow] if each[0] == 40 else []) for each in LAYOUTS]
)
def test_round_trip(heads: int, size: int, tmp_path: Path) -> None:
    model = theirs(tmp_path / "theirs", heads, size)
    convert(tmp_path / "theirs", tmp_path / "ours")
    check_same_logits(tmp_path / "ours", model)
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again, message = EsmForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(message[key] for key in message)
    assert same(states(again), states(model))  # the contact head is among them


def test_written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers read the files, which do not depend on intermediate formats."""
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


def test_old_files(tmp_path: Path) -> None:
    """Files on the hub have computed frequencies and positions, a position table, a copy of the word embeddings."""
    model = theirs(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    tensors |= {
        f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq": 10000 ** -(torch.arange(4) / 4)
        for layer in range(2)
    }
    tensors["esm.embeddings.position_ids"] = torch.arange(98)[None]
    tensors["esm.embeddings.position_embeddings.weight"] = torch.ones(98, 32)
    tensors["lm_head.decoder.weight"] = tensors["esm.embeddings.word_embeddings.weight"].clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    check_same_logits(tmp_path / "hf", model)
    tensors["lm_head.decoder.weight"] += 1
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    with pytest.raises(UserError, match=r"lm_head\.decoder\.weight differs from esm\.embeddings"):
        HuggingFaceModel(tmp_path / "hf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = theirs(tmp_path / "full").to(dtype)
    model.save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again = EsmForMaskedLM.from_pretrained(tmp_path / "again")
    assert again.dtype == dtype
    assert same(states(again), states(model))


@pytest.mark.slow
def test_export_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Runs on one and two tensor ranks from the same weights, which a learning rate of 0 does not change."""
    theirs(tmp_path / "hf", heads=2, size=16)
    overrides = [f"restore_from_path={tmp_path / 'hf'}", "trainer.max_steps=1", "trainer.val_check_interval=1",
             "model.ffn_hidden_size=96", "model.optim.lr=1e-60", "model.optim.weight_decay=0.0",
             "model.optim.sched.max_lr=1e-60", "model.optim.sched.min_lr=0.0",
             "model.max_position_embeddings=96"]  # fmt: skip
    run(tmp_path / "one", *overrides)
    ended = run_on_ranks(tmp_path / "two", *overrides, "model.tensor_model_parallel_size=2", ranks=2)
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


def test_contact_head_is_kept(tmp_path: Path) -> None:
    model = theirs(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours")
    head = open_model(tmp_path / "ours").contact_head
    assert head == Checkpoint(tmp_path / "ours").state["contact_head"]
    assert head is not None
    assert torch.equal(torch.tensor([head["weight"]]), model.esm.contact_head.regression.weight)
    assert torch.equal(torch.tensor([head["bias"]]), model.esm.contact_head.regression.bias)


def test_a_contact_head_of_zeros_is_none(tmp_path: Path) -> None:
    """The export writes zeros for a model without contact head, because the class in transformers has one."""
    theirs(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "plain.nemo")
    convert(tmp_path / "plain.nemo", tmp_path / "exported", to="hf")
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    assert not tensors["esm.contact_head.regression.weight"].any()
    assert open_model(tmp_path / "exported").contact_head is None


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"position_embedding_type": "relative_key"}, "type is 'relative_key'; supported are absolute and rotary"),
    ({"position_embedding_type": None}, "position_embedding_type is 'None'"),
    ({"emb_layer_norm_before": True}, "emb_layer_norm_before in its config.json is 'True'; only False is supported"),
    ({"is_folding_model": True}, "is_folding_model in its config.json is 'True'"),
    ({"rope_theta": 500000.0}, "rope_theta in its config.json is '500000.0'; only 10000.0 is supported"),
    ({"vocab_size": 64}, "vocab_size is '64'; in ESM-2's vocabulary it is 33"),
    ({"mask_token_id": None}, "mask_token_id is 'None'; in ESM-2's vocabulary it is 32"),
    ({"token_dropout": "yes"}, "token_dropout in its config.json is 'yes', neither true nor false"),
    ({"hidden_size": 30}, "hidden_size 30 is not divisible by num_attention_heads 4"),
    ({"num_hidden_layers": 3}, "16 weights are missing: 'esm.encoder.layer.2.attention.LayerNorm.weight', "),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers in its configuration is not an integer from 1 to 1000"),
    ({"layer_norm_eps": -1}, "layer_norm_eps in its config.json is '-1', not a number from 0 on"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_unsupported_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    theirs(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(tmp_path)
    assert message in str(caught.value)


NO_HEADS: list[Any] = [
    1,
    {},
    {"weight": [0.0] * 7, "bias": 0.0},
    {"weight": [0.0] * 7 + ["x"], "bias": 0.0},
    {"weight": [0.0] * 8, "bias": float("nan")},
    {"weight": "x" * 8, "bias": 0.0},
]


@pytest.mark.parametrize("head", NO_HEADS)
def test_invalid_contact_heads(head: object, tmp_path: Path) -> None:
    theirs(tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf")
    state = {"config": source.config, "model": {"words": 33}, "contact_head": head}
    weights = ((name, source.read(f"weights/{name}")) for name in source.shapes("weights"))
    tools.write_weights(tmp_path / "x", state, weights)
    with pytest.raises(UserError, match="its contact head must have one finite weight for each head of each layer"):
        open_model(tmp_path / "x")


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    theirs(tmp_path)
    (tmp_path / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\nA\nL\n")
    with pytest.raises(UserError, match=r"its vocab.txt is not the vocabulary of ESM-2"):
        HuggingFaceModel(tmp_path)


def test_unsupported_models_are_not_written(tmp_path: Path) -> None:
    config = {"_target_": "bionemo.models.esm2nv.ESM2nv", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
              "ffn_hidden_size": 16, "max_position_embeddings": 6, "make_vocab_size_divisible_by": 8}  # fmt: skip
    nothing = TensorsInMemory(tmp_path, {})
    for wrong, vocab_size, message in (
        ({"kv_channels": 3}, 33, "its head size is 3"),
        ({"activation": "gelu_tanh"}, 33, "its activation is 'gelu_tanh'"),
        ({}, 30, "its vocabulary has 30 tokens; that of ESM-2 has 33"),
    ):
        with pytest.raises(UserError, match=message):
            write(tmp_path / "hf", config | wrong, vocab_size, nothing)
    assert os.listdir(tmp_path) == []
