# SPDX-License-Identifier: Apache-2.0
"""Hidden states and attention maps of any layers equal those of transformers."""

import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from transformers import (
    EsmcConfig,
    EsmcForMaskedLM,
    EsmForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import bionemo
from bionemo.common.errors import UserError
from tests.inference.samples import go, sequences
from tests.support.bpe import write_bpe
from tests.support.huggingface import theirs
from tests.support.runs import config, last_checkpoint, train

LAYERS = 3
SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWY" * 2, "GG"]


def esm2(path: Path) -> PreTrainedModel:
    theirs(path, layers=LAYERS)
    return EsmForMaskedLM.from_pretrained(path, attn_implementation="eager")


def esm1b(path: Path) -> PreTrainedModel:
    positions = {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "max_position_embeddings": 98}
    theirs(path, layers=LAYERS, **positions)
    return EsmForMaskedLM.from_pretrained(path, attn_implementation="eager")


def esmc(path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = EsmcConfig(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        intermediate_size=96, vocab_size=64, max_position_embeddings=128,
    )  # fmt: skip
    EsmcForMaskedLM(config).save_pretrained(path)
    return EsmcForMaskedLM.from_pretrained(path, attn_implementation="eager")


def gpt2(path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    path.mkdir()
    vocabulary, _ = write_bpe(path)
    size = len(json.loads(vocabulary.read_text()))
    config = GPT2Config(vocab_size=size, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(path)
    return GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize("build", [esm2, esm1b, esmc, gpt2], ids=lambda build: build.__name__)
def test_layers_equal_those_of_transformers(build: Any, tmp_path: Path) -> None:
    other = build(tmp_path / "hf").eval()
    model = bionemo.load(tmp_path / "hf", "cpu")
    ids = model.ids(SEQUENCES) if build is not gpt2 else [np.arange(3, 10), np.arange(40), np.array([5, 7])]
    ends = int(model.network.has_bos_eos)
    for number, each in enumerate(ids):
        tokens = torch.tensor([[0, *each.tolist(), 2] if ends else each.tolist()])
        with torch.no_grad():
            expected = other(tokens, output_hidden_states=True, output_attentions=True)
        inner = slice(ends, tokens.shape[1] - ends)
        for layer in range(LAYERS + 1):
            hidden = expected.hidden_states[layer][0, inner].numpy()
            close(model.hidden_states(ids, layer)[number], hidden)
            close(model.embed(ids, layer=layer)[number], hidden.mean(0))
            if ends:
                close(model.embed(ids, "begin", layer)[number], expected.hidden_states[layer][0, 0].numpy())
        for layer in range(1, LAYERS + 1):
            attention = expected.attentions[layer - 1][0, :, inner, inner].numpy()
            close(model.attentions(ids, layer)[number], attention)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


def test_the_encoder_of_an_encoder_decoder(tmp_path: Path) -> None:
    train(config(tmp_path, "trainer.max_steps=1", model="prott5nv"))
    model = bionemo.load(last_checkpoint(tmp_path), "cpu")
    last = len(model.network.blocks()[0].layers)
    assert np.array_equal(model.hidden_states(SEQUENCES, last)[1], model.hidden_states(SEQUENCES)[1])
    maps = model.attentions(SEQUENCES, 1)
    assert [each.shape[1:] for each in maps] == [(len(each),) * 2 for each in SEQUENCES]


def test_files(model: Path, fasta: Path, tmp_path: Path) -> None:
    outputs = "model.downstream_task.outputs=[embeddings,embeddings_1,hiddens_0,begin_2]"
    go(model, fasta, tmp_path / "x.npz", outputs)
    go(model, fasta, tmp_path / "x.h5", outputs)
    found, loaded = np.load(tmp_path / "x.npz"), bionemo.load(model, "cpu")
    texts = [each[:94] for each in sequences()]
    assert np.array_equal(found["embeddings_1"], loaded.embed(texts, layer=1))
    assert np.array_equal(found["begin_2"], loaded.embed(texts, "begin", 2))
    assert np.array_equal(found["hiddens_0"], np.concatenate(loaded.hidden_states(texts, 0)))
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["hiddens_0"], found["hiddens_0"])
        assert file["hiddens_0"].attrs["description"] == "[all tokens, D], hidden states; of layer 0"


def test_files_of_attention_maps(model: Path, fasta: Path, tmp_path: Path) -> None:
    go(model, fasta, tmp_path / "x.h5", "model.downstream_task.outputs=[attentions_2]",
       "model.data.output_format=h5_by_id")  # fmt: skip
    texts = [each[:94] for each in sequences()]
    expected = bionemo.load(model, "cpu").attentions(texts, 2)
    with h5py.File(tmp_path / "x.h5") as file:
        for number, each in enumerate(expected):
            assert np.array_equal(file[f"p{number}"], each)
        assert file["p0"].shape == (4, 10, 10)
    go(model, fasta, tmp_path / "x.pkl", "model.downstream_task.outputs=[attentions_2,embeddings]")
    rows = pickle.loads((tmp_path / "x.pkl").read_bytes())  # written by this test
    assert all(np.array_equal(row["attentions_2"], each) for row, each in zip(rows, expected, strict=True))


@pytest.mark.parametrize(
    ("outputs", "overrides", "message"),
    [
        ("hiddens_3", [], "hiddens_3: ESM2nv has the layers 0 to 2"),
        ("attentions_0", ["model.data.output_format=h5_by_id"], "attentions_0: ESM2nv has the layers 1 to 2"),
        ("attentions_1", [], "attentions_1 has another size for each sequence: set model.data.output_format=h5_by_id"),
        ("attentions", [], "expected one of embeddings, begin,"),
        ("logits_1", [], "expected one of embeddings, begin,"),
        ("attentions_1", ["model.data.output_format=h5_by_id", "model.data.long_sequences=split"],
         "attentions_1 is not available for pieces of sequences"),
        ("hiddens_1", ["model.data.output_format=csv"], "a CSV file cannot hold hiddens_1"),
    ],
)  # fmt: skip
def test_mistakes(outputs: str, overrides: list[str], message: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        go(model, fasta, tmp_path / "x.npz", f"model.downstream_task.outputs=[{outputs}]", *overrides)
    assert not (tmp_path / "x.npz").exists()


def test_outputs_of_pieces_are_averaged(model: Path, fasta: Path, tmp_path: Path) -> None:
    go(model, fasta, tmp_path / "x.npz", "model.downstream_task.outputs=[embeddings,embeddings_2]",
       "model.data.long_sequences=split")  # fmt: skip
    found = np.load(tmp_path / "x.npz")
    assert np.array_equal(found["embeddings"], found["embeddings_2"])  # the last layer
    assert found["embeddings"].shape[0] == 10
