# SPDX-License-Identifier: Apache-2.0
"""ESM-1nv as MegatronBertForMaskedLM: equal logits, bitwise round trips, the tokenizer, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, MegatronBertForMaskedLM, pipeline

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert
from bionemo.formats.huggingface.directory import HuggingFaceModel
from bionemo.tokenizers.alphabet import esm1nv
from tests.formats.archives import same
from tests.support.huggingface import states
from tests.support.runs import config, last_checkpoint, read_weights, train

SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 2, "M"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a small ESM-1nv after three steps."""
    path = tmp_path_factory.mktemp("esm1nv")
    overrides = "trainer.max_steps=3", "trainer.val_check_interval=3", "model.optim.sched.warmup_steps=1"
    train(config(path, *overrides, "model.optim.lr=1e-2", model="esm1nv"))
    return last_checkpoint(path)


@pytest.fixture(scope="module")
def written(trained: Path) -> Path:
    path = trained.parent / "hf"
    convert(trained, path, "hf")
    return path


def read(path: Path) -> MegatronBertForMaskedLM:
    loaded: Any = MegatronBertForMaskedLM.from_pretrained(path, output_loading_info=True)
    model, message = loaded
    assert not any(message[key] for key in message)
    return model.eval()


def test_logits_and_hidden_states(trained: Path, written: Path) -> None:
    """Rows of different lengths, with padding."""
    model, ours = read(written), bionemo.load(trained)
    ids = [torch.tensor([1, *each.tolist(), 2]) for each in ours.ids(SEQUENCES)]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=esm1nv().pad_id)
    with torch.no_grad():
        found = model(tokens, attention_mask=(tokens != esm1nv().pad_id).long(), output_hidden_states=True)
    for number, (logits, embedding) in enumerate(zip(ours.logits(SEQUENCES), ours.embed(SEQUENCES), strict=True)):
        inside = slice(1, len(ids[number]) - 1)
        np.testing.assert_allclose(logits, found.logits[number, inside], rtol=0, atol=1e-5)
        hidden = model.bert(ids[number][None]).last_hidden_state[0, inside].mean(0).detach()
        np.testing.assert_allclose(embedding, hidden, rtol=0, atol=1e-5)


def test_round_trip(trained: Path, written: Path, tmp_path: Path) -> None:
    convert(written, tmp_path / "ours")
    ours, before = read_weights(tmp_path / "ours"), read_weights(trained)
    for name, tensor in ours.items():
        padded = name in (
            "word_embeddings.weight",
            "lm_head.bias",
        )  # transformers have no rows that pad the vocabulary
        rows = slice(esm1nv().vocab_size) if padded else slice(None)
        assert torch.equal(tensor[rows], before[name][rows]), name
    read(written).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "again", "hf")
    assert same(states(read(tmp_path / "again")), states(read(written)))


def test_the_tokenizer(written: Path) -> None:
    assert set(os.listdir(written)) == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(written)
    for text in SEQUENCES:
        assert tokenizer(text)["input_ids"] == [1, *esm1nv().encode(text).tolist(), 2]
    assert tokenizer("MKJ<mask>A")["input_ids"] == [1, *(esm1nv().tokens.index(each) for each in "MK"), 0, 4, 6, 2]
    assert tokenizer.model_max_length == 64
    (found,) = pipeline("fill-mask", str(written))("MKTA<mask>IAK", top_k=1)
    with torch.no_grad():
        logits = read(written)(torch.tensor([tokenizer("MKTA<mask>IAK")["input_ids"]])).logits[0, 5]
    assert found["token"] == int(logits.argmax())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 29056}, "vocab_size is '29056'; ESM-1nv has 30 tokens"),
        ({"type_vocab_size": 1}, "type_vocab_size in its config.json is '1'; only 2 is supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type in its config.json is 'relative_key'"),
        ({"hidden_act": "relu"}, "hidden_act in its config.json is 'relu'; only gelu is supported"),
    ],
)
def test_unsupported_settings(written: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    read(written).save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | settings))
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_token_types_are_refused(written: Path, tmp_path: Path) -> None:
    model = read(written)
    torch.nn.init.constant_(model.bert.embeddings.token_type_embeddings.weight, 0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"token_type_embeddings.weight is not 0, which ESM-1nv cannot express"):
        HuggingFaceModel(tmp_path)
