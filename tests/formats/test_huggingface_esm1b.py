# SPDX-License-Identifier: Apache-2.0
"""ESM-1b and ESM-1v in the Hugging Face format: bitwise round trips and equal logits."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.formats.convert import convert, open_model
from bionemo.formats.huggingface.directory import HuggingFaceModel
from bionemo.inference.contacts import predict_contacts
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.formats.archives import same
from tests.support.huggingface import SEQUENCES, check_same_logits, states, theirs
from tests.support.reference_models import hf_esm1b
from tests.support.runs import config, last_checkpoint, read_weights, train

FORM = {"position_embedding_type": "absolute", "emb_layer_norm_before": True}
FORMS = {
    "esm1b": FORM,
    "esm1v": FORM | {"emb_layer_norm_before": False},
    "esm1b without token dropout": FORM | {"token_dropout": False},
    "esm1v without token dropout": FORM | {"emb_layer_norm_before": None, "token_dropout": False},
}
MASK = 32
TABLE, NORM = "esm.embeddings.position_embeddings.weight", "esm.embeddings.layer_norm.weight"
LONGEST = "MKTAYIAKQRQI" * 8  # 96 residues, BOS and EOS: all positions of the table


def esm1b(path: Path, **settings: Any) -> EsmForMaskedLM:
    """Save a small ESM-1b with random weights, also in the unused rows of the position table."""
    return theirs(path, **(FORM | {"max_position_embeddings": 100} | settings))


def check_same_logits_of_masked(path: Path, model: EsmForMaskedLM) -> None:
    """Check the logits of padded sequences with no, some and all positions masked."""
    ours = bionemo.load(path)
    sequences = ours.ids([*SEQUENCES, LONGEST, "MKTAYIAKQR"])
    for share, ids in zip((0, 0.15, 1, 0.3, 0.5, 1), sequences, strict=True):
        ids[: math.ceil(share * len(ids))] = MASK
    rows = [torch.tensor([0, *ids.tolist(), 2]) for ids in sequences]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    with torch.no_grad():
        expected = model(tokens, attention_mask=(tokens != 1).long()).logits
    inside = torch.cat([row[1 : len(ids) + 1] for row, ids in zip(expected, sequences, strict=True)]).numpy()
    [found] = ours.compute(sequences, ["logits"])
    assert len(inside) == sum(map(len, sequences))
    np.testing.assert_allclose(found["logits"], inside, rtol=0, atol=1e-5 * max(1, np.abs(inside).max()))


@pytest.mark.parametrize("form", FORMS)
def test_round_trip(form: str, tmp_path: Path) -> None:
    """Weights and logits are equal after every conversion."""
    model = esm1b(tmp_path / "theirs", **FORMS[form])
    assert model.esm.embeddings.position_embeddings.weight[:2].all()
    convert(tmp_path / "theirs", tmp_path / "ours")
    for path in (tmp_path / "theirs", tmp_path / "ours"):
        check_same_logits_of_masked(path, model)
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again, message = EsmForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(message[key] for key in message)
    assert same(states(again), states(model))
    read = ("position_embedding_type", "token_dropout", "max_position_embeddings", "layer_norm_eps", "vocab_size")
    assert {key: getattr(again.config, key) for key in read} == {key: getattr(model.config, key) for key in read}
    assert again.config.emb_layer_norm_before is bool(model.config.emb_layer_norm_before)


def test_inference(tmp_path: Path) -> None:
    """Embeddings and pseudo-perplexities equal those of transformers; too long sequences are refused."""
    model, ours = esm1b(tmp_path), bionemo.load(tmp_path)
    ids = torch.tensor([[0, *ours.ids([SEQUENCES[0]])[0].tolist(), 2]])
    with torch.no_grad():
        hidden = model.esm(ids).last_hidden_state[0, 1:-1]
        rows = ids.repeat(len(hidden), 1)
        places = torch.arange(len(hidden))
        rows[places, places + 1] = MASK
        text = model(rows).logits[places, places + 1].log_softmax(-1)
    scores = text[places, ids[0, 1:-1]]
    np.testing.assert_allclose(ours.embed(SEQUENCES[:1])[0], hidden.mean(0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.pseudo_perplexity(SEQUENCES[:1])[0], torch.exp(-scores.mean()), rtol=1e-5)
    with pytest.raises(UserError, match="sequence 0 has 97 tokens, but the model accepts at most 96"):
        ours.embed([LONGEST + "M"])


def test_contacts_equal_transformers(tmp_path: Path) -> None:
    model = esm1b(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours")
    head = open_model(tmp_path / "ours").contact_head
    assert head is not None
    assert torch.equal(torch.tensor([head["weight"]]), model.esm.contact_head.regression.weight)
    reference = EsmForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    ours = bionemo.load(tmp_path / "ours", "cpu")
    ids = torch.tensor([[0, *ours.ids(SEQUENCES[1:2])[0].tolist(), 2]])
    with torch.no_grad():
        expected = reference.predict_contacts(ids, torch.ones_like(ids))[0].numpy()
    np.testing.assert_allclose(predict_contacts(ours, SEQUENCES[1]), expected, rtol=0, atol=1e-5)


def test_written_files(tmp_path: Path) -> None:
    esm1b(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", "hf")
    names = {"README.md", "config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert set(os.listdir(tmp_path / "hf")) == names
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("MKJA<mask>")["input_ids"] == [0, 20, 15, 3, 5, 32, 2]
    assert tokenizer.model_max_length == 98
    assert "| class | ESM1b: " in (tmp_path / "hf" / "README.md").read_text()
    with pytest.raises(
        UserError, match=r"the class 'bionemo\.models\.esm1b\.ESM1b' have no \.nemo format; supported: ESM1nvModel"
    ):
        convert(tmp_path / "ours", tmp_path / "x.nemo")


def test_parameter_count_of_the_published_model() -> None:
    """Compare with facebook/esm1b_t33_650M_UR50S, without its contact head."""
    cfg = load("pretrain_esm1b", [], EXAMPLES / "esm1b" / "conf").model
    cfg.make_vocab_size_divisible_by = 1
    kind = load_model_class(cfg._target_)
    with torch.device("meta"):
        model = kind(cfg, load_tokenizer(kind.tokenizer))
        reference = hf_esm1b(cfg, 33, MASK, 1)
    count = sum(parameter.numel() for parameter in model.parameters())
    heads = 33 * 20 + 1
    assert count == sum(parameter.numel() for parameter in reference.parameters()) - heads == 652_359_094 - heads


def test_training(tmp_path: Path) -> None:
    """Train from scratch, with zeros in unused rows of the position table, then from the Hugging Face format."""

    overrides = ("trainer.max_steps=3", "trainer.val_check_interval=3", "model.optim.sched.warmup_steps=1")
    train(config(tmp_path / "first", *overrides, model="esm1b"))
    trained = read_weights(last_checkpoint(tmp_path / "first"))
    convert(last_checkpoint(tmp_path / "first"), tmp_path / "hf", "hf")
    table = load_file(tmp_path / "hf" / "model.safetensors")[TABLE]
    assert table.shape == (66, 32)
    assert not table[:2].any()
    assert table[2:].any(1).all()
    check_same_logits(tmp_path / "hf", EsmForMaskedLM.from_pretrained(tmp_path / "hf").eval(), SEQUENCES[:1])
    train(config(tmp_path / "next", *overrides, f"restore_from_path={tmp_path / 'hf'}", model="esm1b"))
    after = read_weights(last_checkpoint(tmp_path / "next"))
    assert after.keys() == trained.keys()
    assert not any(torch.equal(after[name], weight) for name, weight in trained.items() if weight.dim() == 2)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"emb_layer_norm_before": "yes"}, "emb_layer_norm_before in its config.json is 'yes', neither true nor false"),
    ({"emb_layer_norm_before": False}, f"2 weights are unknown: 'esm.embeddings.layer_norm.bias', '{NORM}'"),
    ({"token_dropout": 1}, "token_dropout in its config.json is '1', neither true nor false"),
    (
        {"position_embedding_type": "relative_key"},
        "position_embedding_type is 'relative_key'; supported are absolute and rotary",
    ),
    (
        {"position_embedding_type": ["absolute"]},
        "position_embedding_type is \"['absolute']\"; supported are absolute and",
    ),
    (
        {"position_embedding_type": "rotary"},
        "emb_layer_norm_before in its config.json is 'True'; only False is supported",
    ),
    ({"max_position_embeddings": 90}, f"{TABLE} has shape (100, 32), expected (90, 32)"),
    ({"max_position_embeddings": 2}, f"{TABLE} has shape (100, 32), expected (3, 32)"),
    ({"vocab_size": 35}, "vocab_size is '35'; in ESM-1b's vocabulary it is 33"),
    ({"is_decoder": True}, "is_decoder in its config.json is 'True'; only False is supported"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers in its configuration is not an integer from 1 to 1000"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_unsupported_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    esm1b(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_old_files(tmp_path: Path) -> None:
    """Files on the hub have no position_embedding_type, and have position ids and a copy of the word embeddings."""
    model = esm1b(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["position_embedding_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["esm.embeddings.position_ids"] = torch.arange(100)[None]
    tensors["lm_head.decoder.weight"] = tensors["esm.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    check_same_logits(tmp_path, model)
    del tensors[TABLE]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"1 weights are missing: '{TABLE}'"):
        HuggingFaceModel(tmp_path)
