# SPDX-License-Identifier: Apache-2.0
"""Invalid Hugging Face directories are rejected in one line; no code is executed and no file is written."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bionemo.checkpoint import TensorsInMemory
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert
from bionemo.formats.huggingface import files
from bionemo.formats.huggingface.directory import HuggingFaceModel, write
from bionemo.models.gpt3 import GPT3

pytestmark = pytest.mark.usefixtures("sentinel")

CONFIG = {
    "_target_": "bionemo.models.gpt3.GPT3", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
    "ffn_hidden_size": 16, "max_position_embeddings": 6, "activation": "gelu_tanh", "kv_channels": None,
    "make_vocab_size_divisible_by": 8, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "init_method_std": 0.02,
}  # fmt: skip
WORDS = 11
FILE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = GPT3.hugging_face.names.weights(CONFIG, WORDS)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in table.items()}


def written(path: Path, config: dict[str, Any] | None = None, vocab_size: int = WORDS, **other: Tensor) -> Path:
    write(path, CONFIG | (config or {}), vocab_size, TensorsInMemory(path, weights() | other))
    return path


def refuse(path: Path) -> str:
    """Check that a directory is rejected in one line and unchanged; return the line."""
    before = sorted((file.name, file.lstat().st_size) for file in path.iterdir())
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert message.isprintable()
    assert len(message) < len(str(path)) + 300
    assert sorted((file.name, file.lstat().st_size) for file in path.iterdir()) == before
    return message.removeprefix(f"{path} cannot be opened: ")


def test_valid_directory_is_read(tmp_path: Path) -> None:
    found = HuggingFaceModel(written(tmp_path / "x"))
    assert torch.equal(found.read("weights/position_embeddings.weight"), weights()["position_embeddings.weight"])


# config.json

SETTINGS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "llama"},
        "the model_type 'llama' has no Hugging Face format here; supported: esm, megatron-bert, esmc, gpt2, blenderb",
    ),
    ({"model_type": None}, "the model_type 'None'"),
    ({"model_type": ["gpt2"]}, "the model_type \"['gpt2']\""),
    ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx in its config.json is 'True'; only False"),
    ({"reorder_and_upcast_attn": True}, "upcast_attn in its config.json is 'True'; only False"),
    ({"scale_attn_weights": False}, "scale_attn_weights in its config.json is 'False'; only True is supported"),
    ({"add_cross_attention": True}, "add_cross_attention in its config.json is 'True'; only False"),
    ({"add_cross_attention": 0}, "add_cross_attention in its config.json is '0'; only False is supported"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings in its config.json is 'False'; only True is supported"),
    ({"activation_function": "relu"}, "activation_function is 'relu'; supported are gelu_new, gelu_pytorch_tanh"),
    ({"activation_function": {}}, "activation_function is '{}'"),
    ({"activation_function": "\x1b[2J\n"}, r"activation_function is '\x1b[2J\n'"),
    ({"n_embd": 9}, "n_embd 9 is not divisible by n_head 2"),
    ({"n_embd": 16}, "transformer.wte.weight has shape (11, 8), expected (11, 16)"),
    ({"n_layer": 2}, "12 weights are missing: 'transformer.h.1.ln_1.weight', "),
    ({"n_layer": 10**6}, "n_layer in its configuration is not an integer from 1 to 1000"),
    ({"n_inner": 32}, "transformer.h.0.mlp.c_fc.weight has shape (8, 16), expected (8, 32)"),
    ({"n_inner": -1}, "n_inner in its configuration is not an integer from 1 to 1048576"),
    ({"n_positions": 7}, "transformer.wpe.weight has shape (6, 8), expected (7, 8)"),
    ({"vocab_size": 12}, "transformer.wte.weight has shape (11, 8), expected (12, 8)"),
    ({"vocab_size": "11"}, "vocab_size in its configuration is not an integer from 1 to 1048576"),
    ({"vocab_size": True}, "vocab_size in its configuration is not an integer from 1 to 1048576"),
    ({"vocab_size": 10**12}, "vocab_size in its configuration is not an integer from 1 to 1048576"),
    ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by in its configuration is not an"),
    ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon in its config.json is '1e-5', not a number from 0 on"),
    ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon in its config.json is 'nan', not a number from 0 on"),
    ({"attn_pdrop": [0.1]}, "attn_pdrop in its config.json is '[0.1]', not a number from 0 on"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), SETTINGS, ids=lambda each: ascii(each)[:40])
def test_unsupported_settings(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = written(tmp_path / "x") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert message in refuse(tmp_path / "x")


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "n_embd", "n_head", "n_layer", "n_positions"])
def test_missing_settings(key: str, tmp_path: Path) -> None:
    config = written(tmp_path / "x") / "config.json"
    settings = json.loads(config.read_text())
    del settings[key]
    config.write_text(json.dumps(settings))
    assert key in refuse(tmp_path / "x")


TEXTS = [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
         b'{"n_embd": ' + b"9" * 5000 + b"}", b'{"a": "' + b"x" * (1 << 24) + b'"}']  # fmt: skip


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:10]))
def test_invalid_json(text: bytes, file: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    (path / FILE).unlink()
    (path / file).write_bytes(text)
    assert f"its {file} " in refuse(path)


# Tensors


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


WTE, QKV = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda t: without(t, QKV), f"1 weights are missing: '{QKV}'"),
    "none": (lambda t: {}, "16 weights are missing: "),
    "too many": (lambda t: t | {"h.1.ln_1.bias": torch.ones(8)}, "1 weights are unknown: 'transformer.h.1.ln_1.bias'"),
    "cross attention": (
        lambda t: t | {"transformer.h.0.crossattention.q_attn.weight": torch.ones(8, 8)},
        "1 weights are unknown: 'transformer.h.0.crossattention.q_attn.weight'",
    ),
    "a strange name": (lambda t: t | {"\x1b[2J" + "x" * 500: torch.ones(1)}, "1 weights are unknown: "),
    "not transposed": (
        lambda t: t | {QKV: t[QKV].T.contiguous()},
        f"{QKV} has shape (24, 8), expected (8, 24)",
    ),
    "flat": (lambda t: t | {QKV: t[QKV].flatten()}, f"{QKV} has shape (192,), expected (8, 24)"),
    "numbers": (lambda t: t | {QKV: t[QKV].int()}, f"{QKV} is of type I32; supported are F32, F16 and BF16"),
    "long": (lambda t: t | {QKV: t[QKV].double()}, f"{QKV} is of type F64"),
    "another head": (
        lambda t: t | {"lm_head.weight": t[WTE] + 1},
        f"lm_head.weight differs from {WTE}; separate output embeddings are not supported",
    ),
    "a head of another shape": (lambda t: t | {"lm_head.weight": t[WTE][:5].clone()}, "lm_head.weight differs from"),
    "a head of another type": (lambda t: t | {"lm_head.weight": t[WTE].half()}, "lm_head.weight differs from"),
    "twice": (lambda t: t | {"wte.weight": t[WTE].clone()}, f"it contains '{WTE}' twice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_invalid_tensors(kind: str, tmp_path: Path) -> None:
    spoil, message = TENSORS[kind]
    file = written(tmp_path / "x") / FILE
    save_file(spoil(load_file(file)), file, {"format": "pt"})
    assert message in refuse(tmp_path / "x")


def test_invalid_safetensors_files(tmp_path: Path) -> None:
    file = written(tmp_path / "x") / FILE
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    lies = (
        whole[:8]
        + whole[8 : 8 + header].replace(b'"data_offsets": [0,', b'"data_offsets": [9,', 1)
        + whole[8 + header :]
    )
    bad = [b"", b"x" * 7, b"\xff" * 8, whole[:100], whole[:-1], whole + b"x", lies, b"PK\x03\x04" + whole]
    bad += [(1 << 62).to_bytes(8, "little") + whole[8:]]
    for data in bad:
        file.write_bytes(data)
        assert refuse(tmp_path / "x").startswith(f"its {FILE} cannot be read (")


class Exploit:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def test_pickles_do_not_run(sentinel: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    pickled = pickle.dumps(Exploit(sentinel))
    (path / FILE).rename(path / "kept")
    (path / PICKLE).write_bytes(pickled)
    assert refuse(path) == f"its weights in {PICKLE} contain other objects than tensors, which could run code"
    torch.save({"wte.weight": Exploit(sentinel)}, path / PICKLE)
    assert refuse(path) == f"its weights in {PICKLE} contain other objects than tensors, which could run code"
    (path / PICKLE).unlink()
    (path / f"{PICKLE}.index.json").write_bytes(pickled)
    assert refuse(path).startswith(f"its {PICKLE}.index.json cannot be read as JSON")
    (path / FILE).write_bytes(pickled)
    assert refuse(path).startswith(f"its {FILE} cannot be read (")


def save_pickles(path: Path, shards: int) -> dict[str, str]:
    """Replace the safetensors file by files of PyTorch, as transformers 4 writes them; return the index."""
    tensors = load_file(path / FILE)
    (path / FILE).unlink()
    if shards == 1:
        torch.save(tensors, path / PICKLE)
        return {}
    index = {name: f"pytorch_model-{number % shards:05d}-of-{shards:05d}.bin" for number, name in enumerate(tensors)}
    for shard in set(index.values()):
        torch.save({name: tensors[name] for name in tensors if index[name] == shard}, path / shard)
    (path / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": index}))
    return index


@pytest.mark.parametrize("shards", [1, 3])
def test_files_of_pytorch(shards: int, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    before = HuggingFaceModel(path)
    expected = {name: before.read(name) for name in before.shapes()}
    index = save_pickles(path, shards)
    found = HuggingFaceModel(path)
    assert all(torch.equal(found.read(name), tensor) for name, tensor in expected.items())
    if shards > 1:
        (path / next(iter(index.values()))).unlink()
        assert "names, is missing" in refuse(path)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is mapped several times, and two models must not be mixed."""
    monkeypatch.setattr(files, "_MAPPED", 0)
    path = written(tmp_path / "x")
    found = HuggingFaceModel(path)
    names = list(found.shapes())
    assert all(found.read(name).isfinite().all() for name in names)
    written(tmp_path / "y")
    (tmp_path / "y" / FILE).rename(path / FILE)
    with pytest.raises(UserError, match="was changed while it was read: run the command again"):
        for name in names:
            found.read(name)


def test_two_forms_of_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saving twice with other sizes of shards leaves both; transformers read the single file without a word."""
    path = written(tmp_path / "x")
    (path / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": "other.safetensors"}}))
    HuggingFaceModel(path)
    assert f"{FILE} is read; remove it to read the files that {INDEX} names" in caplog.text


def test_missing_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    message = f"it contains none of {FILE}, {INDEX}, {PICKLE}, {PICKLE}.index.json"
    (path / FILE).unlink()
    assert refuse(path) == message
    (path / FILE).symlink_to("nowhere")
    assert refuse(path) == message
    (path / FILE).unlink()
    os.mkfifo(path / FILE)
    assert refuse(path) == message


MAPS: list[tuple[object, str]] = [
    (None, f"its {INDEX} does not name safetensors files"),
    ([], f"its {INDEX} does not name safetensors files"),
    ({}, f"its {INDEX} does not name safetensors files"),
    ({"wte.weight": 3}, f"its {INDEX} does not name safetensors files"),
    ({"wte.weight": "../x/shard.safetensors"}, f"its {INDEX} does not name safetensors files"),
    ({"wte.weight": "/etc/passwd"}, f"its {INDEX} does not name safetensors files"),
    ({"wte.weight": "pytorch_model.bin"}, f"its {INDEX} does not name safetensors files"),
    ({"wte.weight": "..safetensors\n"}, f"its {INDEX} does not name safetensors files"),
    ({"wte.weight": "none.safetensors"}, f"none.safetensors, which its {INDEX} names, is missing"),
    ({"wte.weight": "fifo.safetensors"}, f"fifo.safetensors, which its {INDEX} names, is missing"),
    ({"a": "shard.safetensors", "b": "same.safetensors"}, "' twice"),
    ({"a": "half.safetensors"}, "8 weights are missing: "),
]


@pytest.mark.parametrize(("shards", "message"), MAPS, ids=lambda each: ascii(each)[:40])
def test_invalid_shard_indexes(shards: object, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    tensors = load_file(path / FILE)
    (path / FILE).rename(path / "shard.safetensors")
    save_file(tensors, path / "same.safetensors")
    save_file(dict(list(tensors.items())[:8]), path / "half.safetensors")
    os.mkfifo(path / "fifo.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert message in refuse(path)


# Export and conversion


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_target_": None}, "the class 'None'"),
        ({"kv_channels": 16}, "its head size is 16; that of GPT-2 is hidden_size / num_attention_heads"),
        ({"activation": "swiglu"}, "activation 'swiglu' is not supported; supported are gelu, gelu_tanh"),
        ({"num_layers": 2}, "12 weights are missing: 'decoder.layers.1.input_layernorm.weight'"),
        ({"hidden_size": None}, "hidden_size in its configuration is not an integer from 1"),
    ],
)
def test_models_without_a_hugging_face_format(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        written(tmp_path / "new" / "x", config)
    assert str(caught.value).startswith(f"{tmp_path / 'new' / 'x'} cannot be written: ")
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_invalid_conversions(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    (tmp_path / "there").mkdir()
    for source, target, to, message in [
        (path, tmp_path / "y", "hf", "the source already has the Hugging Face format"),
        (path, tmp_path / "there", None, "exists: name another"),
        (tmp_path / "none.nemo", tmp_path / "there", "hf", "exists: name another"),
        (tmp_path / "a.nemo", tmp_path / "b.nemo", None, "both are .nemo archives"),
        (tmp_path / "there", tmp_path / "y", None, "there is not a checkpoint, a .nemo archive, a Hugging Face dir"),
    ]:
        with pytest.raises(UserError, match=message):
            convert(source, target, to)


def test_round_trip_through_nemo(tmp_path: Path) -> None:
    """Convert Hugging Face to .nemo and back, with the vocabulary of GPT-2."""
    whole = torch.randn(50304, 8, generator=torch.Generator().manual_seed(1))
    whole[50257:] = 0
    path = written(tmp_path / "x", {"make_vocab_size_divisible_by": 128}, 50257, **{"word_embeddings.weight": whole})
    convert(path, tmp_path / "x.nemo")
    convert(tmp_path / "x.nemo", tmp_path / "y", "hf")
    for name in ("config.json", FILE):
        assert (tmp_path / "y" / name).read_bytes() == (path / name).read_bytes()
