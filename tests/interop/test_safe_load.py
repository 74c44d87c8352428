# SPDX-License-Identifier: Apache-2.0
"""Malicious weight files are rejected in one line, and no code in them is executed."""

import io
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bionemo.interop.safe_load import load_tensors
from bionemo.interop.safe_tar import Member
from tests.interop.archives import CONFIG, MARK, OURS, WEIGHTS, archive, entry, nemo_state, refuse, same, saved, tiny

pytestmark = pytest.mark.usefixtures("sentinel")
STATE = nemo_state(tiny(), OURS)

# Pickles: explicit opcodes, so that no class of ours is needed to create them

TOUCH = f"open('{MARK}', 'w')"
CALLS: dict[str, tuple[Any, ...]] = {
    "os system": (f"touch {MARK}",),
    "posix system": (f"touch {MARK}",),
    "nt system": (f"touch {MARK}",),
    "os popen": (f"touch {MARK}",),
    "os mkdir": (MARK,),
    "os.path exists": (MARK,),
    "builtins eval": (TOUCH,),
    "builtins exec": (TOUCH,),
    "__builtin__ eval": (TOUCH,),
    "builtins open": (MARK, "w"),
    "io open": (MARK, "w"),
    "_io FileIO": (MARK, "w"),
    "_io BytesIO": (b"",),
    "builtins __import__": ("antigravity",),
    "importlib import_module": ("antigravity",),
    "builtins getattr": ("", "join"),
    "builtins compile": (TOUCH, "x", "exec"),
    "builtins bytearray": (1 << 40,),
    "builtins set": ([1],),
    "builtins print": ("x",),
    "collections Counter": ("x" * 9,),
    "_codecs encode": ("x", "latin1"),
    "subprocess Popen": (["touch", MARK],),
    "subprocess check_output": (["touch", MARK],),
    "commands getoutput": (f"touch {MARK}",),
    "pty spawn": (["touch", MARK],),
    "runpy run_path": (MARK,),
    "runpy run_module": ("this",),
    "timeit timeit": (TOUCH, "pass", 1),
    "cProfile run": (TOUCH,),
    "code InteractiveInterpreter": (),
    "ctypes CDLL": (MARK,),
    "marshal loads": (b"",),
    "pickle loads": (b"",),
    "_pickle loads": (b"",),
    "shelve open": (MARK,),
    "shutil copy": ("/etc/passwd", MARK),
    "pathlib PosixPath": (MARK,),
    "functools partial": (len,),
    "operator attrgetter": ("x",),
    "operator methodcaller": ("system", f"touch {MARK}"),
    "types FunctionType": (),
    "socket socket": (),
    "urllib.request urlopen": (f"file://{MARK}",),
    "webbrowser open": (f"file://{MARK}",),
    "numpy load": (MARK, None, True),
    "numpy._core.multiarray _reconstruct": (),
    "numpy.core.multiarray scalar": (),
    "torch load": (MARK,),
    "torch.serialization load": (MARK,),
    "torch.jit load": (MARK,),
    "torch.hub load": ("x/y", "z"),
    "torch.storage _load_from_bytes": (b"",),
    "torch.nn.modules.linear Linear": (1, 1),
    "torch.utils.cpp_extension load_inline": ("x", ""),
    "torch._utils _rebuild_wrapper_subclass": (),
    "torch._utils _rebuild_sparse_tensor": (),
    "torch._tensor _rebuild_from_type_v2": (),
    "torch Tensor": (),
    "torch device": ("cuda",),
    "omegaconf.dictconfig DictConfig": ({},),
    "nemo.core ModelPT": (),
    "bionemo.models.language_model load_model_class": ("os.system",),
    "logging os.system": (f"touch {MARK}",),
    "bionemo.config.targets os.system": (f"touch {MARK}",),
}  # fmt: skip


def plain(value: object, sentinel: Path) -> bytes:
    """Return the opcodes of an argument, without header and STOP."""
    text = repr(value).replace(MARK, str(sentinel)) if value is not len else "None"
    return pickle.dumps(eval(text), 2)[2:-1]


def reduced(call: str, sentinel: Path, form: str) -> bytes:
    """Return the opcodes of `call(*arguments)` in one of the four forms of pickle."""
    module, name = call.split()
    arguments = b"".join(plain(value, sentinel) for value in CALLS[call])
    named = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    if form == "GLOBAL":
        return named + b"(" + arguments + b"tR"
    if form == "STACK_GLOBAL":
        text = b"".join(b"X" + struct.pack("<I", len(part)) + part.encode() for part in (module, name))
        return text + b"\x93(" + arguments + b"tR"
    if form == "INST":
        return b"(" + arguments + b"i" + named[1:]
    return b"(" + named + arguments + b"o"  # OBJ


def weights_with(pickled: bytes, **records: bytes) -> bytes:
    """Return a file of torch.save with another pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WEIGHTS)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            if not (name.endswith("data.pkl") or name.split("/", 1)[1] in records):
                new.writestr(name, old.read(name))
        new.writestr("archive/data.pkl", pickled)
        for name, data in records.items():
            new.writestr(f"archive/{name}", data)
    return buffer.getvalue()


with zipfile.ZipFile(io.BytesIO(WEIGHTS)) as _zip:
    PICKLED = _zip.read("archive/data.pkl")


@pytest.mark.parametrize("form", ["GLOBAL", "STACK_GLOBAL", "INST", "OBJ"])
@pytest.mark.parametrize("call", CALLS)
def test_pickles_that_call_functions(call: str, form: str, sentinel: Path) -> None:
    code = reduced(call, sentinel, form)
    member = b"X\x17\x00\x00\x00model.lm_head.dense.bia" + code + b"s"
    inside = PICKLED[:3] + member + PICKLED[3:]  # as the first entry of a valid state dict
    for pickled in (b"\x80\x02" + code + b".", inside):
        assert "its weights contain code" in refuse(archive(sentinel.with_name("x"), CONFIG, weights_with(pickled)))


def test_pickles_of_this_test_work_with_pickle(sentinel: Path) -> None:
    for call in ("os system", "builtins exec", "posix system", "subprocess check_output"):
        for form in ("GLOBAL", "STACK_GLOBAL", "INST", "OBJ"):
            pickle.loads(b"\x80\x04" + reduced(call, sentinel, form) + b".")
            sentinel.unlink()


def tensor_of(storage: str = "FloatStorage", key: str = "0", numel: bytes = b"K\x08", shape: bytes = b"K\x08\x85",
              stride: bytes = b"K\x01\x85", offset: bytes = b"K\x00", tail: bytes = b"tR") -> bytes:  # fmt: skip
    """Return the opcodes of a tensor, as torch.save writes them, with any part replaced."""
    text = b"X" + struct.pack("<I", len(key)) + key.encode()
    identity = b"(X\x07\x00\x00\x00storagectorch\n" + storage.encode() + b"\n" + text
    identity += b"X\x03\x00\x00\x00cpu" + numel + b"tQ"
    rest = offset + shape + stride + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + rest + tail


def long(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


PAIRS = b"](" + b"K\x01K\x02\x86" * 3 + b"e"
ENTRY = b"X\x01\x00\x00\x00w"
TENSORS = {
    "longer than its storage": tensor_of(shape=b"K\x09\x85"),
    "beyond its storage": tensor_of(offset=b"K\x01"),
    "before its storage": tensor_of(offset=long(-1)),
    "repeated": tensor_of(shape=long(1 << 40) + b"\x85", stride=b"K\x00\x85"),
    "backwards": tensor_of(stride=long(-1) + b"\x85"),
    "negative": tensor_of(shape=long(-8) + b"\x85"),
    "with gaps": tensor_of(shape=b"K\x04\x85", stride=b"K\x02\x85"),
    "storage too long": tensor_of(numel=long(1 << 40)),
    "storage a little too long": tensor_of(numel=b"K\x09"),
    "storage too short": tensor_of(numel=b"K\x07"),
    "storage of negative length": tensor_of(numel=long(-8)),
    "storage whose length wraps": tensor_of(numel=long((1 << 62) + 8)),
    "storage of true length": tensor_of(numel=b"\x88"),
    "storage of no length": tensor_of(numel=b"N"),
    "storage of the wrong type": tensor_of("DoubleStorage"),
    "storage of unknown type": tensor_of("UntypedStorage"),
    "storage elsewhere": tensor_of(key="../data.pkl"),
    "storage missing": tensor_of(key="999"),
    "parts missing": tensor_of(tail=b"00tR"),
    "text": b"X\x01\x00\x00\x00x",
    "number": b"K\x01",
    "list": b"]",
    "dict": b"}",
    "dict with arguments": b"ccollections\nOrderedDict\n" + PAIRS + b"\x85R",
    "class": b"ccollections\nOrderedDict\n",
    "changed class": b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb",
    "changed function": b"ctorch._utils\n_rebuild_tensor_v2\nN}X\x08\x00\x00\x00__code__K\x01s\x86b",
    "called tensor": tensor_of() + b"(tR",
    "identity of nothing": b"(tQ",
    "identity of text": b"X\x01\x00\x00\x00xQ",
    "memo far away": b"Nr\xff\xff\xff\x7f",
    "memo of nothing": b"h\xff",
    "text without end": b"X\xff\xff\xff\x7fx",
    "bytes without end": b"\x8e" + b"\xff" * 8,
    "bytearray without end": b"\x96" + b"\xff" * 8,
    "long without end": b"\x8b\xff\xff\xff\x7f",
    "frame": b"\x95" + b"\xff" * 8 + b"N",
    "extension": b"\x82\x01",
    "old text": b"S'x'\n",
    "duplicate": b"N2",
    "buffer": b"\x97",
    "protocol": b"\x80\x05N",
    "unknown opcode": b"\xfe",
    "mark alone": b"t",
    "empty stack": b"s",
    "stop": b".",
    "nothing": b"",
    "lists in lists": b"]" * 100_000 + b"a" * 99_999,
    "tuples in tuples, as key": b"NsN" + b"\x85" * 1_000_000 + b"N",
    "some tuples in tuples, as key": b"NsN" + b"\x85" * 19_990 + b"N",
}


@pytest.mark.parametrize("tensor", TENSORS)
def test_invalid_tensors(tensor: str, tmp_path: Path) -> None:
    pickled = b"\x80\x02}" + ENTRY + TENSORS[tensor] + b"s."
    refuse(archive(tmp_path / "x", CONFIG, weights_with(pickled, **{"data/0": bytes(32)})))


def test_valid_tensor_of_this_test_is_read() -> None:
    pickled = b"\x80\x02}" + ENTRY + tensor_of() + b"s."
    data = weights_with(pickled, **{"data/0": np.arange(8, dtype=np.float32).tobytes()})
    found = load_tensors(Member(io.BytesIO(data), 0, len(data)))  # type: ignore[arg-type]
    assert same(found, {"w": torch.arange(8.0)})


@pytest.mark.parametrize(
    "state",
    [
        [], None, 3, "x", torch.zeros(3), {"state_dict": []}, {"state_dict": torch.zeros(3)}, {"state_dict": {}},
        {1: torch.zeros(3)}, {None: torch.zeros(3)}, {("a", "b"): torch.zeros(3)}, {"w": 3}, {"w": [torch.zeros(3)]},
        {"w": {"w": torch.zeros(3)}}, {"w": torch.zeros(3, 4).T}, {"w": torch.zeros(3, dtype=torch.complex64)},
        {"w": torch.zeros(3).to_sparse()}, {"w": torch.zeros(3, device="meta")}, {"w": np.zeros(3)},
        {"w": np.array([object], dtype=object)}, {"w": np.float32(3)}, {"w": nn.Linear(1, 1)}, {"w": torch.float32},
        {"w": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}, {"w": Path("/")}, {"w": {1, 2}},
        {"epoch": 1, "state_dict": {"w": 1}}, {"x" * 10_000: torch.zeros(1)}, {"\n\x1b[2J": torch.zeros(1)},
        {**STATE, "model.extra": torch.zeros(1)}, {k: v.long() for k, v in STATE.items()},
        {k: v.double() for k, v in STATE.items()}, {k: v[None] for k, v in STATE.items()},
        {k: v.reshape(-1) for k, v in STATE.items()}, {k: torch.tensor(0.0) for k in STATE},
        {k.replace("layers.0", "layers.9999"): v for k, v in STATE.items()},
        {k.replace("layers.0", "layers.-1"): v for k, v in STATE.items()},
        {k.replace("layers.0", "layers.٠"): v for k, v in STATE.items()},
        {**STATE, **{k.replace("model.", "model.module."): v for k, v in STATE.items()}},
    ],
)  # fmt: skip
def test_invalid_state_dicts(state: object, tmp_path: Path) -> None:
    refuse(archive(tmp_path / "x", CONFIG, saved(state)))


# Files of weights


def zipped(*records: tuple[str, bytes], method: int = zipfile.ZIP_STORED, source: bytes = WEIGHTS) -> bytes:
    """Return a file of torch.save, rewritten with additional records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        for name, data in records:
            new.writestr(name, data)
    return buffer.getvalue()


def script() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), buffer)
    return buffer.getvalue()


def numpy_objects() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"w": 1}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def old_tar() -> bytes:
    """Return a file in the format of torch before 0.1.10, a tar of pickles."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as packed:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info, data = entry(name, pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2))
            packed.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def bomb() -> bytes:
    with zipfile.ZipFile(io.BytesIO(WEIGHTS)) as old:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as new:
            for name in old.namelist():
                method = zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
                new.writestr(name, bytes(1 << 22) if name.endswith("data/0") else old.read(name), method)
    return buffer.getvalue()


def overlapping() -> bytes:
    """Return an archive with many directory entries for one record, like a zip bomb."""
    data = bytearray(zipped(*((f"archive/data/{i + 100}", bytes(4)) for i in range(50))))
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        name = bytes(data[at + 46 : at + 46 + struct.unpack_from("<H", data, at + 28)[0]])
        if name.startswith(b"archive/data/1") and len(name) > 14:
            struct.pack_into("<II", data, at + 20, 1 << 30, 1 << 30)
    return bytes(data)


FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"weights",
    "PK": lambda: b"PK\x03\x04",
    "empty zip": lambda: b"PK\x05\x06" + bytes(18),
    "noise": lambda: random.Random(1).randbytes(5000),
    "PK and noise": lambda: b"PK\x03\x04" + random.Random(1).randbytes(5000),
    "old format": lambda: saved(STATE, _use_new_zipfile_serialization=False),
    "oldest format": old_tar,
    "bare pickle": lambda: pickle.dumps({"w": 1}),
    "bare code": lambda: b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR.",
    "numpy": numpy_objects,
    "TorchScript": script,
    "program": lambda: zipped(("archive/code/__torch__.py", b"import os")),
    "constants": lambda: zipped(("archive/constants.pkl", PICKLED)),
    "second pickle": lambda: zipped(("archive/other.pkl", PICKLED)),
    "second top": lambda: zipped(("other/data.pkl", PICKLED)),
    "twice": lambda: zipped(("archive/data.pkl", b"\x80\x02}.")),
    "twice, other case": lambda: zipped(("archive/DATA.pkl", b"\x80\x02}.")),
    "traversal": lambda: zipped(("../SENTINEL", b"x")),
    "traversal below": lambda: zipped(("archive/../SENTINEL", b"x")),
    "traversal in data": lambda: zipped(("archive/data/../../SENTINEL", b"x")),
    "absolute": lambda: zipped(("/SENTINEL", b"x")),
    "compressed": lambda: zipped(method=zipfile.ZIP_DEFLATED),
    "bzip2": lambda: zipped(method=zipfile.ZIP_BZIP2),
    "bomb": bomb,
    "overlapping": overlapping,
    "long pickle": lambda: weights_with(b"\x80\x02" + b"N0" * (3 << 20) + b"}."),
    "no pickle": lambda: WEIGHTS.replace(b"data.pkl", b"data.pkk"),
    "before it": lambda: b"#!/bin/sh\n" + WEIGHTS,
    "half": lambda: WEIGHTS[: len(WEIGHTS) // 2],
    "end": lambda: WEIGHTS[-200:],
    "other byte order": lambda: weights_with(PICKLED, byteorder=b"litter"),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_weight_files(name: str, tmp_path: Path) -> None:
    refuse(archive(tmp_path / "x", CONFIG, FILES[name]()))


def test_two_archives_in_one_file_are_refused(tmp_path: Path) -> None:
    """zipfile finds the second archive and torch's reader the first: the checked bytes would not be the loaded ones.

    Both have the same layout, so the offsets in the last end-of-directory record are valid for both.
    """
    other = {name: weight + 1 for name, weight in STATE.items()}
    both = saved(other) + saved(STATE)
    seen_by_torch = torch.load(io.BytesIO(both), weights_only=True)
    assert all(torch.equal(seen_by_torch[name], other[name]) for name in STATE if not name.endswith("lm_head.bias"))
    message = refuse(archive(tmp_path / "x", CONFIG, both))
    assert "bytes around the zip archive" in message


def test_zip_comments_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO(saved(STATE))
    with zipfile.ZipFile(buffer, "a") as file:
        file.comment = b"x" * 30
    assert "bytes around" in refuse(archive(tmp_path / "x", CONFIG, buffer.getvalue()))
