# SPDX-License-Identifier: Apache-2.0
"""Damaged and malicious `.nemo` archives are rejected in one line; no code in them is executed, nothing is written."""

import gzip
import pickle
import random
import struct
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert
from bionemo.formats.nemo_archive import read
from bionemo.formats.safe_load import load_tensors
from tests.formats.archives import (
    CONFIG,
    GOOD,
    MARK,
    OURS,
    WEIGHTS,
    archive,
    as_yaml,
    entry,
    nemo_state,
    refuse,
    same,
    saved,
    tar,
    tiny,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("sentinel")
STATE = nemo_state(tiny(), OURS)
CALLS: dict[str, tuple[Any, ...]] = {
    "os system": (f"touch {MARK}",),
    "builtins eval": (f"open('{MARK}', 'w')",),
    "builtins getattr": ("", "join"),
    "io open": (MARK, "w"),
    "importlib import_module": ("antigravity",),
    "subprocess check_output": (["touch", MARK],),
    "torch load": (MARK,),
    "torch.hub load": ("x/y", "z"),
    "nemo.core ModelPT": (),
    "bionemo.models.language_model load_model_class": ("os.system",),
}


def test_valid_archive_is_read(tmp_path: Path) -> None:
    assert same(read(tar(tmp_path / "x", GOOD)).weights, OURS)


def pickled_call(call: str, sentinel: Path) -> bytes:
    """Return the opcodes of `call(*arguments)`."""
    values = (pickle.dumps(eval(repr(value).replace(MARK, str(sentinel))), 2)[2:-1] for value in CALLS[call])
    return b"c" + call.replace(" ", "\n").encode() + b"\n(" + b"".join(values) + b"tR"


@pytest.mark.parametrize("call", CALLS)
def test_pickles_that_call_functions(call: str, sentinel: Path) -> None:
    name = b"model.lm_head.dense.bias"
    buffer = BytesIO()
    with zipfile.ZipFile(BytesIO(WEIGHTS)) as old, zipfile.ZipFile(buffer, "w") as new:
        for record in old.namelist():
            data = old.read(record)
            if record.endswith("data.pkl"):  # as the first entry of a valid state dict
                item = b"X" + struct.pack("<I", len(name)) + name + pickled_call(call, sentinel) + b"s"
                data = data[:3] + item + data[3:]
            new.writestr(record, data)
    message = refuse(archive(sentinel.with_name("x"), CONFIG, buffer.getvalue()))
    assert "contain other objects than tensors" in message


def test_pickles_of_this_test_work_with_pickle(sentinel: Path) -> None:
    for call in ("os system", "subprocess check_output"):
        pickle.loads(b"\x80\x04" + pickled_call(call, sentinel) + b".")
        sentinel.unlink()


@pytest.mark.parametrize(
    "state",
    [
        [], None, 3, torch.zeros(3), {"state_dict": []}, {"state_dict": {}}, {1: torch.zeros(3)}, {"w": 3},
        {"w": {"w": torch.zeros(3)}}, {"w": torch.zeros(3).to_sparse()}, {"w": torch.zeros(3, device="meta")},
        {"w": np.zeros(3)}, {"w": nn.Linear(1, 1)}, {"w": Path("/")}, {"x" * 10_000: torch.zeros(1)},
        {"\n\x1b[2J": torch.zeros(1)}, {**STATE, "model.extra": torch.zeros(1)},
        {k: v.long() for k, v in STATE.items()}, {k: v.double() for k, v in STATE.items()},
        {k: v[None] for k, v in STATE.items()}, {k: torch.tensor(0.0) for k in STATE},
        {k.replace("layers.0", "layers.9999"): v for k, v in STATE.items()},
        {**STATE, **{k.replace("model.", "model.module."): v for k, v in STATE.items()}},
    ],
)  # fmt: skip
def test_invalid_state_dicts(state: object, tmp_path: Path) -> None:
    refuse(archive(tmp_path / "x", CONFIG, saved(state)))


def test_parameters_and_entries_without_value_are_read() -> None:
    file = BytesIO(saved({"state_dict": {"w": nn.Parameter(torch.arange(8.0)), "state": None}}))
    assert same(load_tensors(file), {"w": torch.arange(8.0)})


@pytest.mark.parametrize(
    "data",
    [b"", b"weights", b"PK\x03\x04", WEIGHTS[: len(WEIGHTS) // 2], WEIGHTS[-200:],
     WEIGHTS.replace(b"data.pkl", b"data.pkk"), pickle.dumps({"w": 1})],
    ids=range(7),
)  # fmt: skip
def test_invalid_weight_files(data: bytes, tmp_path: Path) -> None:
    refuse(archive(tmp_path / "x", CONFIG, data))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("name", ["./model_config.yaml", "./model_weights.ckpt"])
def test_members_that_are_not_regular_files(name: str, kind: bytes, tmp_path: Path) -> None:
    others = [member for member in GOOD if member[0].name != name]
    refuse(tar(tmp_path / "x", [entry(name, kind=kind, linkname="/etc/passwd"), *others]))


def test_other_members_are_not_extracted(sentinel: Path) -> None:
    file = tar(sentinel.with_name("x"), [*GOOD, entry(f"../{MARK}", b"x"), entry(str(sentinel), b"x")])
    assert same(read(file).weights, OURS)


def test_truncated_archives(tmp_path: Path) -> None:
    data = tar(tmp_path / "x", GOOD).read_bytes().rstrip(b"\0")
    for length in [*range(0, 1600, 97), *range(1600, len(data), 701)]:
        (tmp_path / "x").write_bytes(data[:length])
        refuse(tmp_path / "x")
        (tmp_path / "x").write_bytes(gzip.compress(data, 1)[: length // 2])
        refuse(tmp_path / "x")


def test_compressed_bomb(tmp_path: Path) -> None:
    zeros = entry("./zeros", bytes(40 << 20))
    assert "expands to more than 20 times its size" in refuse(tar(tmp_path / "x", [*GOOD, zeros], "w:gz"))


def test_flipped_bits_are_detected_or_harmless(tmp_path: Path) -> None:
    data = tar(tmp_path / "x", GOOD).read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(150):
        flipped = bytearray(data)
        for _ in range(draw.choice([1, 1, 8])):
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "x").write_bytes(flipped)
        try:
            assert same(read(tmp_path / "x").weights, OURS)
        except UserError as error:
            refused += str(error).isprintable()
    assert refused > 50


@pytest.mark.parametrize(
    "text",
    [f"!!python/object/apply:os.system ['touch {MARK}']", f"a: [1, {{b: !!python/object/apply:os.system ['{MARK}']}}]",
     "a: !!python/name:os.system", "a: !!python/module:antigravity", "a: !mine 3", "a: " + "[" * 20_000,
     "a: " + "x" * (1 << 20), "", "[1]", "a: 1\n---\nb: 2", "1: 2", "a:\n\t- b", "a: 'x",
     "a: &a {b: *a}", "a: !!set {b, c}", "a: !!binary aGk="],
    ids=range(16),
)  # fmt: skip
def test_invalid_configurations(text: str, sentinel: Path) -> None:
    data = text.replace(MARK, str(sentinel)).encode()
    assert "its configuration is" in refuse(archive(sentinel.with_name("x"), data, WEIGHTS))


VALUES = [None, True, 0, -1, 1.5, float("nan"), float("inf"), "8", "${oc.env:HOME}", [8], {"a": 8}, 10**18, "x" * 1000]
KEYS = ["hidden_size", "num_attention_heads", "ffn_hidden_size", "num_layers", "max_position_embeddings",
        "make_vocab_size_divisible_by", "kv_channels"]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:16])
def test_invalid_sizes(key: str, value: Any, tmp_path: Path) -> None:
    if (key, value) == ("kv_channels", None):
        return
    message = refuse(archive(tmp_path / "x", as_yaml(tiny() | {key: value}), WEIGHTS))
    assert f"{key} in its configuration is not an integer from 1 to " in message


CLASSES = [["os.system"], {"a": 1}, 3, True, 1.5, "os.system", "bionemo.models.language_model.os", "x" * 10_000, "\n",
           "bionemo.model.protein.esm1nv.esm1nv_model.os.system", "bionemo.models.esm1nv.ESM1nv "]  # fmt: skip


@pytest.mark.parametrize("key", ["target", "_target_", "bionemo_class"])
@pytest.mark.parametrize("target", CLASSES, ids=lambda target: ascii(target)[:30])
def test_unknown_classes(target: Any, key: str, tmp_path: Path) -> None:
    assert "have no .nemo format" in refuse(archive(tmp_path / "x", as_yaml(tiny() | {key: target}), WEIGHTS))


def test_interpolations_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolvers neither read environment variables nor allocate memory."""
    monkeypatch.setenv("CANARY_VARIABLE", "canary-value")
    for key, value in {
        "activation": "${oc.env:CANARY_VARIABLE}",
        "layernorm_epsilon": "${multiply:[1],300000000}",
        "seq_length": "${.hidden_size}",
        "tokenizer": {"vocab_file": "${oc.env:CANARY_VARIABLE}"},
    }.items():
        path = archive(tmp_path / "x.nemo", as_yaml({**tiny(), "hidden_size": 8, key: value}), WEIGHTS)
        if key == "tokenizer":  # not read by this model
            assert bionemo.load(path, "cpu").network.config.tokenizer.vocab_file == "${oc.env:CANARY_VARIABLE}"
            continue
        with pytest.raises(UserError, match=key) as caught:
            bionemo.load(path, "cpu")
        assert "canary-value" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_existing_archive_is_not_overwritten(tmp_path: Path, sentinel: Path) -> None:
    (tmp_path / "mine.nemo").write_text("mine")
    archive(tmp_path / "x.nemo", CONFIG, WEIGHTS)
    convert(tmp_path / "x.nemo", tmp_path / "weights")
    with pytest.raises(UserError, match=r"mine\.nemo exists: name another target"):
        convert(tmp_path / "weights", tmp_path / "mine.nemo")
    assert (tmp_path / "mine.nemo").read_text() == "mine"
