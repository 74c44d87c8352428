# SPDX-License-Identifier: Apache-2.0
"""GPT-2 in the Hugging Face format: transformers and this package open each other's models with equal logits."""

import json
import os
import resource
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from bionemo.checkpoint import Checkpoint, TensorsInMemory, tools
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.formats.huggingface.directory import HuggingFaceModel, write
from bionemo.models.gpt3 import GPT3
from bionemo.tokenizers.gpt2 import placeholder_tokenizer
from tests.conftest import checkpoint_command
from tests.formats.archives import same
from tests.support.models import SMALL, assert_close, batch_of, pad_rows
from tests.support.runs import FAMILIES, FORK, read_weights

WORDS = 517  # padded to 520 and 640


def model_of(*overrides: str) -> GPT3:
    family = FAMILIES["gpt3"]
    cfg = load(family.name, [*family.overrides, *SMALL, *overrides], family.directory / "conf")
    model = GPT3(cfg.model, placeholder_tokenizer(WORDS)).eval()
    model.initialize_weights(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # biases and norms, too, must differ from their initial values to be distinguishable
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def weights_of(model: GPT3) -> dict[str, Tensor]:
    """Return the model's weights with zeros in padding rows, as they are after a round trip."""
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights["word_embeddings.weight"][WORDS:] = 0
    return weights


def checkpoint_of(model: GPT3, path: Path) -> Path:
    known = {"model._target_": model.config._target_, "vocabulary": model.vocabulary.identity}
    tools.write_weights(path, {"config": asdict(model.config), "model": known}, iter(weights_of(model).items()))
    return path


def check_same_logits(model: GPT3, theirs: GPT2LMHeadModel) -> None:
    batch = batch_of(model, 3)
    tokens, padding = pad_rows(batch)
    with torch.no_grad():
        logits = model(batch)[:, : model.vocabulary.vocab_size]
        assert_close(logits, theirs.eval()(tokens, attention_mask=(~padding).long()).logits[~padding])


@pytest.mark.parametrize("multiple", [8, 128])
@pytest.mark.parametrize(("activation", "theirs"), [("gelu_tanh", "gelu_new"), ("gelu", "gelu")])
def test_round_trip(
    activation: str, theirs: str, multiple: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(f"model.activation={activation}", f"model.make_vocab_size_divisible_by={multiple}")
    first, hf, second = checkpoint_of(model, tmp_path / "first"), tmp_path / "new" / "hf", tmp_path / "second"
    assert checkpoint_command(monkeypatch, "convert", first, hf, "--to=hf") == 0
    tokenizer = ["merges.txt", "tokenizer_config.json", "vocab.json"]
    assert sorted(os.listdir(hf)) == sorted(["README.md", "config.json", "model.safetensors", *tokenizer])
    assert json.loads((hf / "config.json").read_text())["activation_function"] == theirs

    reference, message = GPT2LMHeadModel.from_pretrained(hf, output_loading_info=True)
    assert not any(message[key] for key in message)
    assert reference.transformer.wte.weight.shape == (WORDS, 64)
    check_same_logits(model, reference)

    assert checkpoint_command(monkeypatch, "convert", hf, second) == 0
    found = Checkpoint(second)
    assert same(read_weights(second), weights_of(model))
    assert found.state["model"] == {"model._target_": "bionemo.models.gpt3.GPT3", "words": WORDS}
    files = found.state["config"].pop("tokenizer")
    assert files == {"vocab_file": str(hf / "vocab.json"), "merge_file": str(hf / "merges.txt")}
    assert all(asdict(model.config)[key] == value for key, value in found.state["config"].items())
    assert checkpoint_command(monkeypatch, "convert", second, tmp_path / "again", "--to=hf") == 0
    for name in set(os.listdir(hf)) - {"README.md"}:  # the title is the directory's name
        assert (tmp_path / "again" / name).read_bytes() == (hf / name).read_bytes()


def test_only_valid_vocabulary_files_are_copied(tmp_path: Path) -> None:
    """An untrusted configuration may name any file of the user who exports the model."""
    (tmp_path / "key").write_text("private")
    os.mkfifo(tmp_path / "pipe")
    model = model_of()
    for vocabulary, merges in (("key", "key"), ("pipe", "pipe"), ("none", "key")):
        config = asdict(model.config)
        config["tokenizer"] |= {"vocab_file": str(tmp_path / vocabulary), "merge_file": str(tmp_path / merges)}
        write(tmp_path / "hf", config, WORDS, TensorsInMemory(tmp_path, weights_of(model)))
        assert sorted(os.listdir(tmp_path / "hf")) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of()
    weights = {name: weight.to(dtype) for name, weight in weights_of(model).items()}
    write(tmp_path / "hf", asdict(model.config), WORDS, TensorsInMemory(tmp_path, weights))
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "hf").dtype == dtype
    found = HuggingFaceModel(tmp_path / "hf")
    assert same({name: found.read(f"weights/{name}") for name in found.shapes("weights")}, weights)


def theirs(**settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=96, n_embd=64, n_layer=3, n_head=4, **settings)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def open_as_ours(path: Path) -> GPT3:
    """Return our model with the configuration and weights of a directory."""
    found = HuggingFaceModel(path)
    keys = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings",
            "seq_length", "activation", "layernorm_epsilon")  # fmt: skip
    model = model_of(*(f"model.{key}={found.config[key]}" for key in keys))
    model.load_state_dict({name: found.read(f"weights/{name}") for name in found.shapes("weights")})
    return model


@pytest.mark.parametrize("settings", [{}, {"n_inner": 96, "layer_norm_epsilon": 1e-3, "activation_function": "gelu"}])
@pytest.mark.parametrize("shards", ["1GB", "200KB"])
def test_models_written_by_transformers(settings: dict[str, Any], shards: str, tmp_path: Path) -> None:
    model = theirs(**settings)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards != "1GB")
    check_same_logits(open_as_ours(tmp_path), model)


def test_base_models_and_old_files(tmp_path: Path) -> None:
    """OpenAI's files have names without prefix, masks, a copy of the word embeddings, and links into a cache."""
    model = theirs()
    GPT2Model.save_pretrained(model.transformer, tmp_path / "bare")
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    assert "wte.weight" in tensors
    mask = torch.ones(1, 1, 96, 96).tril()
    more = {f"h.{layer}.attn.bias": mask.clone() for layer in range(3)}
    more |= {"h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors | more, tmp_path / "blob")
    (tmp_path / "bare" / "model.safetensors").unlink()
    (tmp_path / "bare" / "model.safetensors").symlink_to("../blob")
    check_same_logits(open_as_ours(tmp_path / "bare"), model)


def test_blocks_of_tensors(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    found = HuggingFaceModel(tmp_path)
    assert found.shapes() == {f"weights/{name}": shape for name, shape in found.shapes("weights").items()}
    name = "weights/decoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(found.read(name, (48, 8), (96, 32)), found.read(name)[48:144, 8:40])


def test_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = theirs()
    model.save_pretrained(tmp_path / "hf")
    assert checkpoint_command(monkeypatch, "inspect", "--tensors", tmp_path / "hf") == 0
    text = capsys.readouterr().out
    assert f"Hugging Face {tmp_path / 'hf'}\n" in text
    assert "model        bionemo.models.gpt3.GPT3\n" in text
    assert "vocabulary   517 tokens\n" in text
    padding = (640 - WORDS) * 64
    assert f"parameters   {model.num_parameters() + padding:,} in" in text
    assert "decoder.layers.2.mlp.linear_fc2.weight  64 x 256\n" in text
    assert checkpoint_command(monkeypatch, "convert", tmp_path / "hf", tmp_path / "weights") == 0
    assert checkpoint_command(monkeypatch, "inspect", tmp_path / "weights") == 0
    assert "vocabulary   517 tokens\n" in capsys.readouterr().out


def write_with_room_for(size: int, path: Path, model: GPT3) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        write(path, asdict(model.config), WORDS, TensorsInMemory(path, weights_of(model)))
    except UserError as error:
        os._exit(0 if str(error).startswith(f"{path} could not be written (File too large)") else 2)
    os._exit(1)


@pytest.mark.parametrize("size", [0, 700, 100_000])
def test_full_disk_keeps_existing_files(size: int, tmp_path: Path) -> None:
    model = model_of()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("mine")
    writer = FORK.Process(target=write_with_room_for, args=(size, tmp_path / "hf", model))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert os.listdir(tmp_path) == ["hf"]
    assert os.listdir(tmp_path / "hf") == ["mine"]
