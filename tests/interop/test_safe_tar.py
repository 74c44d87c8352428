# SPDX-License-Identifier: Apache-2.0
"""Malicious tar archives and configurations are rejected in one line, and nothing is written."""

import gzip
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

import bionemo
from bionemo.common.errors import UserError
from bionemo.interop.convert import convert
from bionemo.interop.nemo_archive import read
from tests.interop.archives import CONFIG, GOOD, MARK, OURS, WEIGHTS, archive, as_yaml, entry, refuse, same, tar, tiny

pytestmark = pytest.mark.usefixtures("sentinel")


def test_valid_archive_is_read(tmp_path: Path) -> None:
    assert same(read(tar(tmp_path / "x", GOOD)).weights, OURS)


# Tar members

NAMES = [
    "/SENTINEL", "//SENTINEL", "../SENTINEL", "./../SENTINEL", "a/../../SENTINEL", "../" * 60 + "SENTINEL", "..",
    "a/..", "a/../model_config.yaml", "/model_weights.ckpt", "..\\SENTINEL", "C:\\SENTINEL", "a\nb", "a\x1b[2Jb",
    "a\u202eb", "x" * 300,
]  # fmt: skip
KINDS = {
    "file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE,
    "character": tarfile.CHRTYPE, "block": tarfile.BLKTYPE, "fifo": tarfile.FIFOTYPE, "contiguous": tarfile.CONTTYPE,
    "sparse": tarfile.GNUTYPE_SPARSE,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
def test_unsafe_member_names(name: str, kind: str, sentinel: Path) -> None:
    name = name.replace(MARK, sentinel.name)
    bad = entry(name, kind=KINDS[kind], linkname=str(sentinel))
    refuse(tar(sentinel.with_name("x"), [*GOOD, bad]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("file", "directory")])
@pytest.mark.parametrize("name", ["./model_config.yaml", "./model_weights.ckpt", "./tokenizer.model", "./mp_rank_00"])
@pytest.mark.parametrize("target", ["/etc/passwd", "../SENTINEL", "model_config.yaml"])
def test_members_of_other_types(name: str, kind: str, target: str, sentinel: Path) -> None:
    others = [member for member in GOOD if member[0].name != name]
    refuse(tar(sentinel.with_name("x"), [entry(name, kind=KINDS[kind], linkname=target), *others]))


def header(size: bytes | None = None, kind: bytes = tarfile.REGTYPE, name: str = "./extra") -> bytes:
    """Return a header block with any bytes as size and a valid checksum."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if size is not None:
        block[124:136] = size.ljust(12, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes) -> bytes:
    padded = records + bytes(-len(records) % 512)
    return header(b"%011o" % len(records), tarfile.XHDTYPE) + padded


def record(text: str) -> bytes:
    length = next(n for n in range(len(text) + 3, len(text) + 9) if n == len(text) + len(str(n)) + 2)
    return f"{length} {text}\n".encode()


BLOCKS = {
    "twice": header(name="model_config.yaml"),
    "twice, other spelling": header(name=".//./model_weights.ckpt"),
    "directory of a file's name": header(kind=tarfile.DIRTYPE, name="./model_config.yaml"),
    "directory with bytes": header(b"00000001000", tarfile.DIRTYPE),
    "larger than the archive": header(b"77777777777"),
    "larger than any disk": header(b"\x80" + b"\x7f" * 11),
    "negative": header(b"\xff" * 12),
    "no number": header(b"NaN"),
    "pax: larger than any disk": pax(record("size=99999999999999999999")) + header(),
    "pax: negative": pax(record("size=-512")) + header(),
    "pax: no number": pax(record("size=nan")) + header(),
    "pax: sparse": pax(record("GNU.sparse.realsize=99999999999")) + header(),
    "pax: path": pax(record("path=../SENTINEL")) + header(),
    "pax: link": pax(record("linkpath=/etc/passwd")) + header(kind=tarfile.SYMTYPE),
    "pax: twice": pax(record("path=model_config.yaml")) + header(),
    "pax: no length": pax(b"path=x\n") + header(),
    "pax: wrong length": pax(b"99 path=x\n") + header(),
    "pax: zero length": pax(b"0 path=x\n") + header(),
    "pax: long length": pax(b"9" * 5000 + b" path=x\n") + header(),
    "pax: too long": pax(record("comment=" + "x" * 70_000)) + header(),
    "pax: for all": header(kind=tarfile.XGLTYPE),
    "long name": header(kind=tarfile.GNUTYPE_LONGNAME),
    "long link": header(kind=tarfile.GNUTYPE_LONGLINK),
    "unknown kind": header(kind=b"Z"),
    "wrong checksum": header()[:500] + b"x" * 12,
    "no header": b"x" * 512,
    "ten thousand members": header(kind=tarfile.XHDTYPE) * 10_001,
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_invalid_headers(blocks: str, compressed: bool, tmp_path: Path) -> None:
    members = tar(tmp_path / "x", GOOD).read_bytes()
    end = len(members) - len(members.rstrip(b"\0")) & ~511
    data = members[:-end] + BLOCKS[blocks] + bytes(1024)
    (tmp_path / "x").write_bytes(gzip.compress(data, 1) if compressed else data)
    refuse(tmp_path / "x")


def test_truncated_archives(tmp_path: Path) -> None:
    data = tar(tmp_path / "x", GOOD).read_bytes().rstrip(b"\0")
    for length in [*range(0, 1600, 97), *range(1600, len(data), 701)]:
        (tmp_path / "x").write_bytes(data[:length])
        refuse(tmp_path / "x")
        (tmp_path / "x").write_bytes(gzip.compress(data, 1)[: length // 2])
        refuse(tmp_path / "x")


def test_compressed_bombs(tmp_path: Path) -> None:
    zeros = entry("./zeros", bytes(40 << 20))
    assert "expands to more than 20 times its size" in refuse(tar(tmp_path / "x", [*GOOD, zeros], "w:gz"))
    (tmp_path / "x").write_bytes(gzip.compress((tmp_path / "x").read_bytes()))
    refuse(tmp_path / "x")
    (tmp_path / "x").write_bytes(gzip.compress(b"") * 1000)
    refuse(tmp_path / "x")


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


# Configurations

TEXTS = {
    "call": f"!!python/object/apply:os.system ['touch {MARK}']",
    "call, nested": f"a: [1, {{b: !!python/object/apply:os.system ['touch {MARK}']}}]",
    "call as key": f"? !!python/object/apply:os.system ['touch {MARK}']\n: 1",
    "new": "!!python/object/new:subprocess.Popen [['id']]",
    "object": "!!python/object:builtins.object {}",
    "name": "a: !!python/name:os.system",
    "module": "a: !!python/module:antigravity",
    "whole tag": f"a: !<tag:yaml.org,2002:python/object/apply:os.system> ['touch {MARK}']",
    "tag directive": f"%TAG ! tag:yaml.org,2002:python/\n---\na: !object/apply:os.system ['touch {MARK}']",
    "tuple": "a: !!python/tuple [1]",
    "binary": "a: !!binary aGVsbG8=",
    "set": "a: !!set {b}",
    "own tag": "a: !mine 3",
    "no tag": "a: ! 3",
    "laughs": "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(9)),
    "itself": "a: &a [*a]",
    "merge": "a: &a {b: 1}\nc: {<<: *a}",
    "deep lists": "a: " + "[" * 20_000,
    "deep mappings": "a: " + "{a: " * 20_000,
    "deep indents": "".join(" " * i + "a:\n" for i in range(1200)),
    "long": "a: " + "x" * (1 << 20),
    "empty": "",
    "list": "[1]",
    "number": "3",
    "two documents": "a: 1\n---\nb: 2",
    "number as key": "1: 2",
    "list as key": "? [a]\n: 1",
    "long number": "a: " + "9" * 6000,
    "zeros": "\0\0\0\0",
    "no text": "\udcff\udcfe",
    "tabs": "a:\n\t- b",
    "unfinished": "a: 'x",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_invalid_configurations(text: str, sentinel: Path) -> None:
    data = TEXTS[text].replace(MARK, str(sentinel)).encode(errors="surrogateescape")
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


def test_integers_too_long_for_a_message(tmp_path: Path) -> None:
    for key in (b"hidden_size", b"target"):
        text = CONFIG + key + b": 0x" + b"f" * 6000 + b"\n"  # the last of two equal keys counts
        refuse(archive(tmp_path / "x", text, WEIGHTS))


CLASSES = [["os.system"], {"a": 1}, 3, True, 1.5, "os.system", "bionemo.models.language_model.os", "x" * 10_000, "\n",
           "bionemo.model.protein.esm1nv.esm1nv_model.os.system", "bionemo.models.esm1nv.ESM1nv "]  # fmt: skip


@pytest.mark.parametrize("key", ["target", "_target_", "bionemo_class"])
@pytest.mark.parametrize("target", CLASSES, ids=lambda target: ascii(target)[:30])
def test_unknown_classes(target: Any, key: str, tmp_path: Path) -> None:
    assert "have no .nemo format" in refuse(archive(tmp_path / "x", as_yaml(tiny() | {key: target}), WEIGHTS))


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 60_000, "1" + "0" * 4300])
def test_sizes_of_thousands_of_digits(digits: str, tmp_path: Path) -> None:
    """Python does not convert strings of more than 4,300 digits to integers."""
    data = tar(tmp_path / "x", GOOD).read_bytes().rstrip(b"\0")
    data += bytes(-len(data) % 512) + pax(record(f"size={digits}")) + header() + bytes(1024)
    (tmp_path / "x").write_bytes(data)
    refuse(tmp_path / "x")


def test_interpolations_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolvers neither read environment variables nor allocate memory."""
    monkeypatch.setenv("CANARY_VARIABLE", "canary-value")
    for key, value in {
        "activation": "${oc.env:CANARY_VARIABLE}",
        "layernorm_epsilon": "${multiply:[1],300000000}",
        "encoder_seq_length": "???",
        "seq_length": "${.hidden_size}",
        "tokenizer": {"vocab_file": "${oc.env:CANARY_VARIABLE}"},
    }.items():
        path = archive(tmp_path / "x.nemo", as_yaml({**tiny(), "hidden_size": 8, key: value}), WEIGHTS)
        with pytest.raises(UserError, match="is not evaluated") as caught:
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
