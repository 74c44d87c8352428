# SPDX-License-Identifier: Apache-2.0
"""ProtT5nv and MegaMolBART as BlenderbotForConditionalGeneration: equal logits and generation, bitwise round trips."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BlenderbotForConditionalGeneration

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert
from bionemo.formats.huggingface.directory import HuggingFaceModel
from bionemo.models.decoding import generate
from tests.formats.archives import same
from tests.support.huggingface import states
from tests.support.models import assert_close, batch_of, pad_rows
from tests.support.runs import config, last_checkpoint, read_weights, train

MODELS = {
    "prott5nv": ("prott5nv", []),
    "untied": (
        "prott5nv", ["model.share_decoder_tokens_head_embeddings=False", "model.tokenizer.num_sentinel_tokens=20"],
    ),
    "megamolbart": ("megamolbart", []),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a small model after three steps."""
    path = tmp_path_factory.mktemp(request.param)
    model, overrides = MODELS[request.param]
    short = "trainer.max_steps=3", "trainer.val_check_interval=3", "model.seq_length=96"
    train(config(path, *short, *overrides, model=model))
    return last_checkpoint(path)


@pytest.fixture(scope="module")
def written(trained: Path) -> Path:
    path = trained.parent / "hf"
    convert(trained, path, "hf")
    return path


def read(path: Path) -> BlenderbotForConditionalGeneration:
    loaded: Any = BlenderbotForConditionalGeneration.from_pretrained(path, output_loading_info=True)
    model, message = loaded
    assert not any(message[key] for key in message)
    return model.eval()


def test_logits(trained: Path, written: Path) -> None:
    """Padded rows of different lengths in the encoder and in the decoder."""
    model, ours = read(written), bionemo.load(trained, "cpu").network
    batch = batch_of(ours, 6)
    assert batch.source is not None
    (tokens, padding), (source, source_padding) = pad_rows(batch), pad_rows(batch.source)
    with torch.no_grad():
        expected = model(
            input_ids=source, attention_mask=(~source_padding).long(), decoder_input_ids=tokens,
            decoder_attention_mask=(~padding).long(),
        ).logits[~padding]  # fmt: skip
        found = ours(batch)[:, : ours.vocabulary.vocab_size]
    assert_close(found, expected)


def test_greedy_generation(trained: Path, written: Path) -> None:
    model = read(written)
    ours: Any = bionemo.load(trained, "cpu").network
    source = batch_of(ours, 6).source
    assert source is not None
    with torch.no_grad():
        found = [each.tokens for each in generate(ours, ours.encode(source))]
        ids, padding = pad_rows(source)
        expected = model.generate(ids, attention_mask=(~padding).long(), max_length=97, do_sample=False, num_beams=1)
    vocabulary = ours.vocabulary
    for tokens, row in zip(found, expected[:, 1:].tolist(), strict=True):
        end = row.index(vocabulary.eos_id) if vocabulary.eos_id in row else len(row)
        assert tokens == [
            token for token in row[:end] if token != vocabulary.pad_id
        ]  # which an untrained model predicts


def test_round_trip(trained: Path, written: Path, tmp_path: Path) -> None:
    convert(written, tmp_path / "ours")
    ours, before = read_weights(tmp_path / "ours"), read_weights(trained)
    rows = bionemo.load(trained, "cpu").network.vocabulary.vocab_size
    for name, tensor in ours.items():
        padded = name in ("word_embeddings.weight", "lm_head.bias", "lm_head.weight")
        part = slice(rows) if padded else slice(None)
        assert torch.equal(tensor[part], before[name][part]), name
    assert len(ours) == sum(not name.startswith("optimizer") for name in before)
    read(written).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "again", "hf")
    assert same(states(read(tmp_path / "again")), states(read(written)))


def test_the_tokenizer(trained: Path, written: Path) -> None:
    vocabulary = bionemo.load(trained, "cpu").network.vocabulary
    tokenizer = AutoTokenizer.from_pretrained(written)
    texts = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO"]
    if vocabulary.vocab_size == 523:
        texts = ["CC(=O)Oc1ccccc1C(=O)O", "C[C@H](N)C(=O)O.Cl", "BrC1=CC=C%10C=C1CCCC%10"]
    for text in texts:
        np.testing.assert_array_equal(tokenizer(text)["input_ids"], vocabulary.encode(text))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 8008}, "its vocabulary has 8008 tokens; supported are MegaMolBART and ProtT5nv"),
        ({"decoder_layers": 3}, "decoder_layers is not equal to encoder_layers, 2"),
        ({"scale_embedding": True}, "scale_embedding in its config.json is 'True'; only False is supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings in its config.json is '1', neither true nor false"),
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
