# SPDX-License-Identifier: Apache-2.0
"""Files of fair-esm: equal to the package fair-esm with random weights."""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import esm
import numpy as np
import pytest
import torch
from esm.model.esm1 import ProteinBertModel
from esm.model.esm2 import ESM2
from torch import Tensor, nn
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, describe, open_model
from bionemo.inference.contacts import predict_contacts
from tests.support.runs import config, last_checkpoint, read_weights, train

SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 3, "GGJA"]
LAYERS, WIDTH, HEADS = 3, 32, 4
FAMILIES = "esm2_t3", "esm1b_t3", "esm1v_t3"


class Unknown:
    """A class that no file of a model may contain."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    alphabet = esm.Alphabet.from_architecture("ESM-1b")
    if name.startswith("esm2"):
        model: Any = ESM2(LAYERS, WIDTH, HEADS, alphabet)
    else:
        model = ProteinBertModel(_arguments(name), alphabet)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def _arguments(name: str) -> Namespace:
    return Namespace(
        arch="roberta_large", layers=LAYERS, embed_dim=WIDTH, ffn_embed_dim=96, attention_heads=HEADS,
        max_positions=98, token_dropout=True, emb_layer_norm_before=name.startswith("esm1b"),
    )  # fmt: skip


def write(directory: Path, name: str) -> Path:
    """Write the two files of a random model as the authors do."""
    state = dict(build(name).state_dict())
    regression = {key: state.pop(key) for key in list(state) if key.startswith("contact_head.")}
    prefixes = {key: "encoder." if key.startswith("lm_head") else "encoder.sentence_encoder." for key in state}
    saved: dict[str, Any] = {"model": {prefixes[key] + key: value for key, value in state.items()}}
    if name.startswith("esm2"):
        sizes = Namespace(
            encoder_layers=LAYERS, encoder_embed_dim=WIDTH, encoder_attention_heads=HEADS, token_dropout=True
        )
        saved["cfg"] = {"model": sizes}
    else:
        saved["args"] = Namespace(**{
            (key if key in ("arch", "max_positions", "token_dropout") else f"encoder_{key}"): value
            for key, value in vars(_arguments(name)).items()
            if key != "emb_layer_norm_before"
        })  # fmt: skip
    torch.save(saved, directory / f"{name}.pt")
    if not name.startswith("esm1v"):
        torch.save({"model": regression}, directory / f"{name}-contact-regression.pt")
    return directory / f"{name}.pt"


def original(path: Path) -> tuple[nn.Module, Any]:
    """Load a file with fair-esm, which needs the classes of the file to be allowed."""
    with torch.serialization.safe_globals([Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet(str(path))
    return model.eval(), alphabet


def run(path: Path) -> dict[str, Any]:
    model, alphabet = original(path)
    _, _, tokens = alphabet.get_batch_converter()(list(enumerate(each.replace("J", "X") for each in SEQUENCES)))
    with torch.no_grad():
        found: dict[str, Any] = model(tokens, repr_layers=[LAYERS], return_contacts=True)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_equal_those_of_fair_esm(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    expected, ours = run(path), bionemo.load(path, "cpu")
    sequences = [each.replace("J", "X") for each in SEQUENCES]
    for row, (sequence, logits, hidden) in enumerate(
        zip(sequences, ours.logits(sequences), ours.hidden_states(sequences), strict=True)
    ):
        inside = slice(1, len(sequence) + 1)
        for found, theirs in ((logits, expected["logits"]), (hidden, expected["representations"][LAYERS])):
            wanted = theirs[row, inside].numpy()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        if not name.startswith("esm1v"):
            contacts = expected["contacts"][row, : len(sequence), : len(sequence)].numpy()
            np.testing.assert_allclose(predict_contacts(ours, sequence), contacts, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_vector_of_the_mask_token_is_that_of_fair_esm(name: str, tmp_path: Path) -> None:
    """fair-esm sets it to 0 in ESM-1b and ESM-1v; the output layer shares it."""
    path = write(tmp_path, name)
    model, _ = original(path)
    with torch.no_grad():
        expected = model(torch.tensor([[0, 20, 32, 19, 2]]))["logits"][0, 1:4].numpy()
    ours = bionemo.load(path, "cpu")
    [columns] = ours.compute([np.array([20, 32, 19])], ["logits"])
    np.testing.assert_allclose(columns["logits"], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    words = open_model(path).weights.read("weights/word_embeddings.weight")
    assert bool(words[32].any()) == name.startswith("esm2")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_hugging_face_form_computes_the_same(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    convert(path, tmp_path / "hf", to="hf")
    theirs = EsmForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    model, _ = original(path)
    tokens = torch.tensor([[0, 20, 32, 19, 5, 4, 2]])
    with torch.no_grad():
        expected, found = model(tokens)["logits"], theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert "3" in describe(path).partition("layers")[2].splitlines()[0]


def test_weights_are_read_bitwise(tmp_path: Path) -> None:
    path = write(tmp_path, "esm2_t3")
    state, weights = build("esm2_t3").state_dict(), open_model(path).weights
    assert torch.equal(weights.read("weights/word_embeddings.weight")[:33], state["embed_tokens.weight"])
    fused = weights.read("weights/encoder.layers.1.self_attention.linear_qkv.weight").view(HEADS, 3, -1, WIDTH)
    for part, letter in enumerate("qkv"):
        assert torch.equal(fused[:, part].reshape(WIDTH, WIDTH), state[f"layers.1.self_attn.{letter}_proj.weight"])


def test_half_precision_and_the_format_of_old_versions_of_torch(tmp_path: Path) -> None:
    path = write(tmp_path, "esm2_t3")
    with torch.serialization.safe_globals([Namespace]):
        saved = torch.load(path)
    expected = bionemo.load(path, "cpu").logits(SEQUENCES[:1])
    torch.save(saved, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert np.array_equal(bionemo.load(tmp_path / "old.pt", "cpu").logits(SEQUENCES[:1])[0], expected[0])
    saved["model"] = {name: tensor.half() for name, tensor in saved["model"].items()}
    torch.save(saved, tmp_path / "half.pt")
    found = bionemo.load(tmp_path / "half.pt", "cpu").logits(SEQUENCES[:1])
    np.testing.assert_allclose(found[0], expected[0], atol=2e-2)


def test_training_continues(tmp_path: Path) -> None:
    path = write(tmp_path, "esm2_t3")
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "ffn_hidden_size": 4 * WIDTH}
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    overrides += ["trainer.max_steps=1", "model.optim.lr=1e-30", "model.optim.sched.min_lr=0"]
    train(config(tmp_path / "run", f"restore_from_path={path}", *overrides))
    after = read_weights(last_checkpoint(tmp_path / "run"))
    state = build("esm2_t3").state_dict()
    assert torch.equal(after["encoder.final_layernorm.weight"], state["emb_layer_norm_after.weight"])


def changed(path: Path, **entries: Any) -> Path:
    with torch.serialization.safe_globals([Namespace]):
        torch.save({**torch.load(path), **entries}, path)
    return path


def drop(path: Path) -> Path:
    with torch.serialization.safe_globals([Namespace]):
        saved = torch.load(path)
    del saved["model"]["encoder.sentence_encoder.layers.2.fc2.bias"]
    torch.save(saved, path)
    return path


def narrow(path: Path) -> Path:
    with torch.serialization.safe_globals([Namespace]):
        saved = torch.load(path)
    name = "encoder.sentence_encoder.layers.2.fc2.weight"
    saved["model"][name] = saved["model"][name][:, 1:]
    torch.save(saved, path)
    return path


def plain(path: Path) -> Path:
    tensors: dict[str, Tensor] = {"weight": torch.zeros(2)}
    torch.save(tensors, path)
    return path


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-100])
    return path


ERRORS = [
    ("esm1b_t3", lambda path: changed(path, args=Namespace(arch="msa_transformer")),
     "its arch is 'msa_transformer'; supported are ESM-2, and roberta_large (ESM-1b, ESM-1v)"),
    ("esm2_t3", lambda path: changed(path, cfg={"model": Namespace(encoder_layers=3)}),
     "hidden_size in its configuration is not an integer from 1 to"),
    ("esm2_t3", drop, "1 weights are missing: 'esm.encoder.layer.2.output.dense.bias'"),
    ("esm2_t3", narrow, "has shape (32, 127), expected (32, 128)"),
    ("esm2_t3", plain, "it is not a file of fair-esm, which holds args or cfg, and model: save the model with"),
    ("esm2_t3", lambda path: changed(path, cfg={"model": Namespace(), "other": Unknown()}),
     "its weights in esm2_t3.pt contain other objects than tensors, which could run code"),
    ("esm2_t3", truncate, "its weights in esm2_t3.pt cannot be read ("),
    ("esm2_t3", lambda path: path.with_name("esm2_t3-contact-regression.pt"),
     "it is the contact regression of esm2_t3.pt: give esm2_t3.pt"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "message"), ERRORS, ids=[message[:30] for _, _, message in ERRORS])
def test_errors(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    path = damage(write(tmp_path, name))
    with pytest.raises(UserError) as raised:
        open_model(path)
    assert message in str(raised.value) and "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_a_model_without_its_contact_regression(tmp_path: Path) -> None:
    path = write(tmp_path, "esm2_t3")
    shutil.move(tmp_path / "esm2_t3-contact-regression.pt", tmp_path / "elsewhere.pt")
    assert open_model(path).contact_head is None
