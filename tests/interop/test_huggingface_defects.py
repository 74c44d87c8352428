# SPDX-License-Identifier: Apache-2.0
"""Directories that are not what they should be: each is refused in one line, nothing is run or written."""

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
from bionemo.interop.convert import convert
from bionemo.interop.huggingface import ARCHITECTURES, HuggingFaceModel, write

pytestmark = pytest.mark.usefixtures("sentinel")

CONFIG = {
    "_target_": "bionemo.models.gpt3.GPT3", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
    "ffn_hidden_size": 16, "max_position_embeddings": 6, "activation": "gelu_tanh", "kv_channels": None,
    "make_vocab_size_divisible_by": 8, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "init_method_std": 0.02,
}  # fmt: skip
WORDS = 11
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weights() -> dict[str, Tensor]:
    architecture = next(each for each in ARCHITECTURES if each.model_type == "gpt2")
    generator = torch.Generator().manual_seed(0)
    table = architecture.table(CONFIG, WORDS)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in table.items()}


def written(path: Path, config: dict[str, Any] | None = None, words: int = WORDS, **other: Tensor) -> Path:
    write(path, CONFIG | (config or {}), words, TensorsInMemory(path, weights() | other))
    return path


def refuse(path: Path) -> str:
    """See that a directory is refused in one line and left as it is; give the line."""
    before = sorted((file.name, file.lstat().st_size) for file in path.iterdir())
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(path)
    told = str(caught.value)
    assert told.startswith(f"{path} ")
    assert told.isprintable()
    assert len(told) < len(str(path)) + 300
    assert sorted((file.name, file.lstat().st_size) for file in path.iterdir()) == before
    return told.removeprefix(f"{path} is not opened: ")


def test_the_pieces_make_a_good_directory(tmp_path: Path) -> None:
    found = HuggingFaceModel(written(tmp_path / "x"))
    assert torch.equal(found.read("weights/position_embeddings.weight"), weights()["position_embeddings.weight"])


# config.json

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "its model_type is 'llama'; what can be converted is esm, gpt2"),
    ({"model_type": None}, "its model_type is 'None'"),
    ({"model_type": ["gpt2"]}, "its model_type is \"['gpt2']\""),
    ({"scale_attn_by_inverse_layer_idx": True}, "says scale_attn_by_inverse_layer_idx: 'True', of which False alone"),
    ({"reorder_and_upcast_attn": True}, "says reorder_and_upcast_attn: 'True', of which False alone is read"),
    ({"scale_attn_weights": False}, "says scale_attn_weights: 'False', of which True alone is read"),
    ({"add_cross_attention": True}, "says add_cross_attention: 'True', of which False alone is read"),
    ({"add_cross_attention": 0}, "says add_cross_attention: '0', of which False alone is read"),
    ({"tie_word_embeddings": False}, "says tie_word_embeddings: 'False', of which True alone is read"),
    ({"activation_function": "relu"}, "its activation_function is 'relu': gelu_new, gelu_pytorch_tanh, gelu are"),
    ({"activation_function": {}}, "its activation_function is '{}'"),
    ({"activation_function": "\x1b[2J\n"}, r"its activation_function is '\x1b[2J\n'"),
    ({"n_embd": 9}, "its n_embd 9 is not divisible by its n_head 2"),
    ({"n_embd": 16}, "its transformer.wte.weight is (11, 8), its configuration says (11, 16)"),
    ({"n_layer": 2}, "it lacks 12 weights: 'transformer.h.1.ln_1.weight', "),
    ({"n_layer": 10**6}, "its configuration gives no n_layer from 1 to 1000"),
    ({"n_inner": 32}, "its transformer.h.0.mlp.c_fc.weight is (8, 16), its configuration says (8, 32)"),
    ({"n_inner": -1}, "its configuration gives no n_inner from 1 to 1048576"),
    ({"n_positions": 7}, "its transformer.wpe.weight is (6, 8), its configuration says (7, 8)"),
    ({"vocab_size": 12}, "its transformer.wte.weight is (11, 8), its configuration says (12, 8)"),
    ({"vocab_size": "11"}, "its configuration gives no vocab_size from 1 to 1048576"),
    ({"vocab_size": True}, "its configuration gives no vocab_size from 1 to 1048576"),
    ({"vocab_size": 10**12}, "its configuration gives no vocab_size from 1 to 1048576"),
    ({"make_vocab_size_divisible_by": 0}, "its configuration gives no make_vocab_size_divisible_by from 1"),
    ({"layer_norm_epsilon": "1e-5"}, "its layer_norm_epsilon is '1e-5', no number from 0 on"),
    ({"layer_norm_epsilon": float("nan")}, "its layer_norm_epsilon is 'nan', no number from 0 on"),
    ({"attn_pdrop": [0.1]}, "its attn_pdrop is '[0.1]', no number from 0 on"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), SETTINGS, ids=lambda each: ascii(each)[:40])
def test_settings_that_are_not_read(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = written(tmp_path / "x") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert told in refuse(tmp_path / "x")


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "n_embd", "n_head", "n_layer", "n_positions"])
def test_settings_that_are_missing(key: str, tmp_path: Path) -> None:
    config = written(tmp_path / "x") / "config.json"
    settings = json.loads(config.read_text())
    del settings[key]
    config.write_text(json.dumps(settings))
    assert key in refuse(tmp_path / "x")


TEXTS = [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
         b'{"n_embd": ' + b"9" * 5000 + b"}", b'{"a": "' + b"x" * (1 << 24) + b'"}']  # fmt: skip


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:10]))
def test_texts_that_are_no_settings(text: bytes, file: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    (path / FILE).unlink()
    (path / file).write_bytes(text)
    assert f"its {file} " in refuse(path)


# Tensors


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


WTE, QKV = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda t: without(t, QKV), f"it lacks 1 weights: '{QKV}'"),
    "none": (lambda t: {}, "it lacks 16 weights: "),
    "too many": (lambda t: t | {"h.1.ln_1.bias": torch.ones(8)}, "has 1 unknown weights: 'transformer.h.1.ln_1.bias'"),
    "cross attention": (
        lambda t: t | {"transformer.h.0.crossattention.q_attn.weight": torch.ones(8, 8)},
        "it has 1 unknown weights: 'transformer.h.0.crossattention.q_attn.weight'",
    ),
    "a strange name": (lambda t: t | {"\x1b[2J" + "x" * 500: torch.ones(1)}, "it has 1 unknown weights: "),
    "not transposed": (
        lambda t: t | {QKV: t[QKV].T.contiguous()},
        f"its {QKV} is (24, 8), its configuration says (8, 24)",
    ),
    "flat": (lambda t: t | {QKV: t[QKV].flatten()}, f"its {QKV} is (192,), its configuration says (8, 24)"),
    "numbers": (lambda t: t | {QKV: t[QKV].int()}, f"its {QKV} is of type I32; F32, F16 and BF16 are read"),
    "long": (lambda t: t | {QKV: t[QKV].double()}, f"its {QKV} is of type F64"),
    "another head": (
        lambda t: t | {"lm_head.weight": t[WTE] + 1},
        f"its lm_head.weight is not its {WTE}: a table of its own for the last product is not read",
    ),
    "a head of another shape": (lambda t: t | {"lm_head.weight": t[WTE][:5].clone()}, "its lm_head.weight is not its"),
    "a head of another type": (lambda t: t | {"lm_head.weight": t[WTE].half()}, "its lm_head.weight is not its"),
    "twice": (lambda t: t | {"wte.weight": t[WTE].clone()}, f"it has '{WTE}' twice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit(kind: str, tmp_path: Path) -> None:
    spoil, told = TENSORS[kind]
    file = written(tmp_path / "x") / FILE
    save_file(spoil(load_file(file)), file, {"format": "pt"})
    assert told in refuse(tmp_path / "x")


def test_files_that_are_no_safetensors(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"]
)
def test_pickles_are_not_opened(name: str, sentinel: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    pickled = pickle.dumps(Exploit(sentinel))
    (path / FILE).unlink()
    (path / name).write_bytes(pickled)
    told = refuse(path)
    assert told.startswith(f"{name} could run code when it is read: ")
    assert "save_pretrained" in told
    (path / FILE).write_bytes(pickled)
    assert refuse(path).startswith(f"its {FILE} cannot be read (")


def test_without_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    (path / FILE).unlink()
    assert refuse(path) == f"it has neither {FILE} nor {INDEX}"
    (path / FILE).symlink_to("nowhere")
    assert refuse(path) == f"it has neither {FILE} nor {INDEX}"
    (path / FILE).unlink()
    os.mkfifo(path / FILE)
    assert refuse(path) == f"it has neither {FILE} nor {INDEX}"


MAPS: list[tuple[object, str]] = [
    (None, f"its {INDEX} does not name files of weights"),
    ([], f"its {INDEX} does not name files of weights"),
    ({}, f"its {INDEX} does not name files of weights"),
    ({"wte.weight": 3}, f"its {INDEX} does not name files of weights"),
    ({"wte.weight": "../x/shard.safetensors"}, f"its {INDEX} does not name files of weights"),
    ({"wte.weight": "/etc/passwd"}, f"its {INDEX} does not name files of weights"),
    ({"wte.weight": "pytorch_model.bin"}, f"its {INDEX} does not name files of weights"),
    ({"wte.weight": "..safetensors\n"}, f"its {INDEX} does not name files of weights"),
    ({"wte.weight": "none.safetensors"}, f"it has no none.safetensors, which its {INDEX} names"),
    ({"wte.weight": "fifo.safetensors"}, f"it has no fifo.safetensors, which its {INDEX} names"),
    ({"a": "shard.safetensors", "b": "same.safetensors"}, "' twice"),
    ({"a": "half.safetensors"}, "it lacks 8 weights: "),
]


@pytest.mark.parametrize(("shards", "told"), MAPS, ids=lambda each: ascii(each)[:40])
def test_shards_that_are_not_there(shards: object, told: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    tensors = load_file(path / FILE)
    (path / FILE).rename(path / "shard.safetensors")
    save_file(tensors, path / "same.safetensors")
    save_file(dict(list(tensors.items())[:8]), path / "half.safetensors")
    os.mkfifo(path / "fifo.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert told in refuse(path)


# Writing, and what leads to it


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"_target_": "bionemo.models.esm1nv.ESM1nv"},
            "it is of the class 'bionemo.models.esm1nv.ESM1nv'; what can be",
        ),
        ({"_target_": None}, "it is of the class 'None'"),
        ({"kv_channels": 16}, "its heads are of 16, GPT-2's of hidden_size / num_attention_heads"),
        ({"activation": "swiglu"}, "its activation 'swiglu' is none of gelu, gelu_tanh"),
        ({"num_layers": 2}, "it lacks 12 weights: 'decoder.layers.1.input_layernorm.weight'"),
        ({"hidden_size": None}, "its configuration gives no hidden_size from 1"),
    ],
)
def test_models_that_have_no_such_form(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        written(tmp_path / "new" / "x", config)
    assert str(caught.value).startswith(f"{tmp_path / 'new' / 'x'} is not written: ")
    assert told in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_conversions_that_are_none(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    (tmp_path / "there").mkdir()
    for source, target, to, told in [
        (path, tmp_path / "y", "hf", "it is Hugging Face's already"),
        (path, tmp_path / "there", None, "exists: name another"),
        (tmp_path / "none.nemo", tmp_path / "there", "hf", "exists: name another"),
        (tmp_path / "a.nemo", tmp_path / "b.nemo", None, "both are .nemo archives"),
        (tmp_path / "there", tmp_path / "y", None, "a checkpoint needs no conversion between layouts"),
    ]:
        with pytest.raises(UserError, match=told):
            convert(source, target, to)


def test_an_archive_and_back(tmp_path: Path) -> None:
    """From Hugging Face to v1's archive of NeMo's GPT and back, where the vocabulary is GPT-2's."""
    whole = torch.randn(50304, 8, generator=torch.Generator().manual_seed(1))
    whole[50257:] = 0
    path = written(tmp_path / "x", {"make_vocab_size_divisible_by": 128}, 50257, **{"word_embeddings.weight": whole})
    convert(path, tmp_path / "x.nemo")
    convert(tmp_path / "x.nemo", tmp_path / "y", "hf")
    for name in ("config.json", FILE):
        assert (tmp_path / "y" / name).read_bytes() == (path / name).read_bytes()
