# SPDX-License-Identifier: Apache-2.0
"""Export of a run to the Hugging Face format, and a new run from it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import EsmForMaskedLM, GPT2LMHeadModel

import bionemo
from bionemo.checkpoint import Checkpoint
from bionemo.formats.convert import convert, open_model
from bionemo.formats.huggingface.directory import write
from bionemo.training.resume import open_initial_weights
from tests.support.huggingface import theirs
from tests.support.runs import VOCABULARY, config, last_checkpoint, logged, read_weights, run, train

WORDS = len(json.loads((VOCABULARY / "vocab.json").read_text()))
ONCE = ("trainer.max_steps=1", "trainer.val_check_interval=1", "model.optim.lr=1e-60", "model.optim.sched.min_lr=0.0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the last checkpoint of a run, and its export to the Hugging Face format."""
    directory = tmp_path_factory.mktemp("gpt3")
    train(config(directory / "run", "model.optim.sched.warmup_steps=1", model="gpt3"))
    last = last_checkpoint(directory / "run")
    convert(last, directory / "hf", "hf")
    return last, directory / "hf"


def test_transformers_open_a_trained_model(trained: tuple[Path, Path]) -> None:
    last, hf = trained
    weights, theirs = read_weights(last), GPT2LMHeadModel.from_pretrained(hf)
    assert torch.equal(theirs.transformer.wte.weight, weights["word_embeddings.weight"][:WORDS])
    assert torch.equal(theirs.transformer.h[1].mlp.c_fc.weight.T, weights["decoder.layers.1.mlp.linear_fc1.weight"])


@pytest.mark.parametrize("through", ["converted", "directly"])
def test_a_new_run_starts_from_a_hugging_face_model(tmp_path: Path, trained: tuple[Path, Path], through: str) -> None:
    """Its weights equal the trained ones except for padding rows; its first loss is not that of a random model."""
    last, source = trained
    if through == "converted":
        convert(source, tmp_path / "weights")
        source = tmp_path / "weights"
    train(config(tmp_path / "next", f"restore_from_path={source}", *ONCE, model="gpt3"))
    found, expected = (read_weights(path) for path in (last_checkpoint(tmp_path / "next"), last))
    expected["word_embeddings.weight"][WORDS:] = 0
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    train(config(tmp_path / "anew", *ONCE, model="gpt3"))
    assert logged(tmp_path / "next", "reduced_train_loss")[1] != logged(tmp_path / "anew", "reduced_train_loss")[1]


def test_another_model_is_refused(tmp_path: Path, trained: tuple[Path, Path]) -> None:
    convert(trained[1], tmp_path / "weights")
    assert isinstance(open_initial_weights(str(tmp_path / "weights")), Checkpoint)
    status, lines = run(tmp_path / "next", f"restore_from_path={tmp_path / 'weights'}", model="esm2nv")
    assert status == 1
    assert "its model._target_ is bionemo.models.gpt3.GPT3" in lines[-1]
    status, lines = run(tmp_path / "next", f"restore_from_path={trained[1]}", model="esm2nv")
    assert status == 1
    assert lines[-1].startswith(f"error: the weights of {trained[1]} belong to another model")


def test_a_contact_head_is_left_out_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run changes the attention to which it was fitted. The export has zeros, which the note names."""
    theirs(tmp_path / "hf")
    open_initial_weights(str(tmp_path / "hf"))
    assert f"the contact head of {tmp_path / 'hf'} is left out; after the run, fit one" in caplog.text
    convert(tmp_path / "hf", tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "again", to="hf")
    assert "has no contact head" not in caplog.text
    assert bionemo.load(tmp_path / "again", "cpu").contacts("MKTAYIAK").unique().numel() > 1
    saved = open_model(tmp_path / "hf")
    write(tmp_path / "without", saved.config, 33, saved.weights)
    assert f"{tmp_path / 'without'} has no contact head: transformers predict a probability of 0.5" in caplog.text
    network = EsmForMaskedLM.from_pretrained(tmp_path / "without", attn_implementation="eager").eval()
    tokens = torch.tensor([[0, 5, 6, 7, 8, 2]])
    assert (network.predict_contacts(tokens, torch.ones_like(tokens)) == 0.5).all()
