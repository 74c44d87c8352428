# SPDX-License-Identifier: Apache-2.0
"""Any damage to a checkpoint is detected, and the previous one is used."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo import checkpoint
from bionemo.checkpoint import Piece, split_into_blocks
from bionemo.checkpoint.manifest import format_manifest
from bionemo.checkpoint.tensors import checksum_file
from bionemo.common.errors import UserError
from tests.checkpoint.samples import FILES, holds, newest, state, whole


class Damager:
    """Damages one random file of a checkpoint in one of many ways, and repairs it."""

    def __init__(self, victim: Path, other: Path, seed: int) -> None:
        self.victim, self.random = victim, random.Random(seed)
        self.contents = {name: (victim / name).read_bytes() for name in FILES}
        self.others = {name: (other / name).read_bytes() for name in FILES}
        self.ways: list[Callable[[bytearray], bytes | None]] = [
            self.flip, self.flip, self.flip_in_the_header, self.overwrite, self.exchange_bytes, self.insert,
            self.cut_out, self.truncate, self.append, self.append_space, self.other_checkpoint, self.other_file,
            self.make_unusable, self.make_empty,
        ]  # fmt: skip

    def damage(self) -> str:
        """Damage a file; return a description."""
        while True:
            self.name = self.random.choice(FILES)
            self.file = self.victim / self.name
            way = self.random.choice(self.ways)
            before = self.contents[self.name]
            after = way(bytearray(before))
            if after is None:
                break
            if after != before:
                self.file.write_bytes(after)
                break
        return f"{way.__name__} {self.name}"

    def repair(self) -> None:
        if self.file.is_dir() and not self.file.is_symlink():
            shutil.rmtree(self.file)
        elif not self.file.is_file() or self.file.is_symlink():
            self.file.unlink(missing_ok=True)
        self.file.write_bytes(self.contents[self.name])

    def random_range(self, content: bytearray) -> slice:
        begin, end = sorted(self.random.sample(range(len(content) + 1), 2))
        return slice(begin, end)

    def flip(self, content: bytearray) -> bytes:
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        return content

    def flip_in_the_header(self, content: bytearray) -> bytes:
        """Flip a bit in the header of a tensor file; anywhere in other files."""
        header = 8 + int.from_bytes(content[:8], "little") if "tensors" in self.name else len(content)
        content[self.random.randrange(header)] ^= 1 << self.random.randrange(8)
        return content

    def overwrite(self, content: bytearray) -> bytes:
        where = self.random_range(content)
        content[where] = bytes(where.stop - where.start) if self.random.random() < 0.5 else self.random.randbytes(
            where.stop - where.start
        )  # fmt: skip
        return content

    def exchange_bytes(self, content: bytearray) -> bytes:
        i, j = self.random.sample(range(len(content)), 2)
        content[i], content[j] = content[j], content[i]
        return content

    def insert(self, content: bytearray) -> bytes:
        at = self.random.randrange(len(content))
        content[at:at] = self.random.choice([b" ", b"\n", b"\0", self.random.randbytes(9)])
        return content

    def cut_out(self, content: bytearray) -> bytes:
        del content[self.random_range(content)]
        return content

    def truncate(self, content: bytearray) -> bytes:
        return content[: self.random.randrange(len(content))]

    def append(self, content: bytearray) -> bytes:
        return content + self.random.randbytes(self.random.randint(1, 20))

    def append_space(self, content: bytearray) -> bytes:
        """Append white space, which JSON ignores."""
        return content + self.random.choice([b" ", b"\n", b"\0", b"\t\n"])

    def other_checkpoint(self, content: bytearray) -> bytes:
        return self.others[self.name]

    def other_file(self, content: bytearray) -> bytes:
        return self.contents[self.random.choice(FILES)]

    def make_empty(self, content: bytearray) -> bytes:
        return b""

    def make_unusable(self, content: bytearray) -> None:
        """Remove the file, or replace it by a directory or a link to nothing."""
        self.file.unlink()
        match self.random.randrange(3):
            case 0:
                self.file.mkdir()
            case 1:
                self.file.symlink_to("nowhere")


def damage_often(first: Path, second: Path, times: int) -> None:
    damager = Damager(second, first, seed=times)
    seen = set()
    for _ in range(times):
        what = damager.damage()
        found, messages = newest(first.parent)
        assert found == first, what
        (reason,) = messages
        assert reason.startswith("step=2: "), what
        assert len(reason) > len("step=2: "), what
        assert "\n" not in reason
        seen.add(what)
        damager.repair()
    assert newest(first.parent) == (second, [])
    assert holds(second, 2)
    if times > 1000:
        assert len(seen) == len(set(damager.ways)) * len(FILES)


def test_damaged_files(two: tuple[Path, Path]) -> None:
    damage_often(*two, times=300)


@pytest.mark.slow
def test_damaged_files_10_000_times(two: tuple[Path, Path]) -> None:
    damage_often(*two, times=10_000)


def test_every_byte_of_the_smaller_files(two: tuple[Path, Path]) -> None:
    """Flips include changes of case and white space, which JSON may treat as equal."""
    for name in ("manifest.json", "state.json"):
        content = (two[1] / name).read_bytes()
        for place in range(len(content)):
            damaged = bytearray(content)
            damaged[place] ^= 0x20
            (two[1] / name).write_bytes(damaged)
            assert checkpoint.find_damage(two[1]), (name, place)
        (two[1] / name).write_bytes(content)
    assert checkpoint.find_damage(two[1]) == ""


@pytest.mark.parametrize("name", FILES)
def test_messages_about_defects(two: tuple[Path, Path], name: str) -> None:
    first, second = two
    content = (second / name).read_bytes()
    (second / name).unlink()
    assert newest(first.parent) == (first, [f"step=2: {name} is missing"])
    (second / name).write_bytes(content[:-1])
    ((_, text),) = ((found, why) for found, [why] in [newest(first.parent)])
    short = f"{name} has {len(content) - 1:,} bytes instead of {len(content):,}"
    assert text == f"step=2: {short}" or name == "manifest.json"
    (second / name).write_bytes(content[:-1] + b"~")
    assert name in newest(first.parent)[1][0] or name == "manifest.json"
    with pytest.raises(UserError, match=r"step=2 cannot be used: .*; choose another or remove it"):
        checkpoint.check(second)


def test_no_checkpoint_is_found_when_all_are_damaged(two: tuple[Path, Path]) -> None:
    for path in two:
        (path / "state.json").write_text("{}")
    found, messages = newest(two[0].parent)
    assert found is None
    assert [line.partition(":")[0] for line in messages] == ["step=2", "step=1"]


@pytest.mark.parametrize(
    "edit",
    [
        {"step": 3}, {"metrics": {}}, {"xxh3_128": {}}, {"seal": ""}, {"extra": 1}, [], None, "text", 7,
        {"format": 1}, {"format": "2"}, {"format": None},
    ],
    ids=str,
)  # fmt: skip
def test_edited_manifests_are_rejected(two: tuple[Path, Path], edit: Any) -> None:
    first, second = two
    manifest = json.loads((second / "manifest.json").read_text())
    text = json.dumps(manifest | edit if isinstance(edit, dict) else edit, indent=1)
    (second / "manifest.json").write_text(text)
    found, (messages,) = newest(first.parent)
    assert found == first
    assert messages.startswith("step=2: ")
    if isinstance(edit, dict) and "format" in edit:
        assert messages == f"step=2: its format is {edit['format']}; this version reads format 2"


def test_earlier_format_is_rejected(tmp_path: Path) -> None:
    """Its manifest has another checksum."""
    checkpoint.save(tmp_path / "a", state(1), [whole("w", torch.zeros(3))])
    (tmp_path / "a" / "manifest.json").write_text(
        json.dumps({"format": 1, "step": 1, "metrics": {}, "sha256": {"tensors.safetensors": "00"}, "seal": "00"})
    )
    assert newest(tmp_path) == (None, ["a: its format is 1; this version reads format 2"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 4), (2, 4)], "pieces of weights/matrix overlap"),  # covers as many values as the matrix has, and 2
        ([(0, 4), (3, 2)], "pieces of weights/matrix overlap"),  # as many values, but the last row is missing
        ([(0, 3), (4, 2)], "values of weights/matrix are missing"),
        ([(0, 4), (4, 3)], "a piece of weights/matrix exceeds its shape"),
        ([(4, 2), (0, 4)], ""),
    ],
)
def test_pieces_cover_each_tensor_once(tmp_path: Path, rows: list[tuple[int, int]], message: str) -> None:
    """`rows` are the first row and the number of rows of each piece of a matrix with 6 rows."""
    pieces = [Piece("weights/matrix", (6, 5), (first, 0), torch.zeros(count, 5)) for first, count in rows]
    checkpoint.save_distributed(tmp_path / "a", state(1), pieces, 0, lambda value: [value])
    assert checkpoint.find_damage(tmp_path / "a") == message


def test_blocks_of_rows_and_columns_cover_a_tensor(tmp_path: Path) -> None:
    """Tensor parallelism divides columns, the distributed optimizer ranges of the flattened array."""
    pieces = [
        Piece("weights/matrix", (6, 8), (offset[0], column + offset[1]), torch.zeros(size))
        for column in (0, 4)
        for start, stop in ((0, 7), (7, 24))
        for offset, size in split_into_blocks((6, 4), start, stop)
    ]
    checkpoint.save_distributed(tmp_path / "a", state(1), pieces, 0, lambda value: [value])
    assert checkpoint.find_damage(tmp_path / "a") == ""
    checkpoint.save_distributed(tmp_path / "b", state(1), pieces[1:], 0, lambda value: [value])
    assert checkpoint.find_damage(tmp_path / "b") == "values of weights/matrix are missing"


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("write", ["pickle", "torch"])
def test_a_pickle_is_never_loaded(two: tuple[Path, Path], write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checksums are valid."""
    monkeypatch.chdir(two[0].parent)
    file = two[1] / "tensors-0.safetensors"
    if write == "pickle":
        file.write_bytes(pickle.dumps(Command()))
    else:
        torch.save({"weights/matrix": Command()}, file)
    manifest = json.loads((two[1] / "manifest.json").read_text())
    del manifest["seal"]
    manifest["bytes"][file.name], manifest["xxh3_128"][file.name] = file.stat().st_size, checksum_file(file)
    (two[1] / "manifest.json").write_text(format_manifest(manifest))
    checkpoint.check(two[1])
    with pytest.raises(UserError, match="step=2 cannot be used: weights/matrix cannot be read"):
        checkpoint.Checkpoint(two[1]).read("weights/matrix")
    assert not Path("ran").exists()
    pickle.loads(pickle.dumps(Command()))  # loading it with pickle runs the command
    assert Path("ran").exists()
