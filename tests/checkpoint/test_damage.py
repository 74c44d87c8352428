# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a checkpoint's files is noticed, and the one before is taken."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo import checkpoint
from bionemo.common.errors import UserError
from tests.checkpoint.samples import FILES, holds, newest, state, whole


class Vandal:
    """Damages one file of a checkpoint at random, in one of many ways, and puts it back."""

    def __init__(self, victim: Path, other: Path, seed: int) -> None:
        self.victim, self.random = victim, random.Random(seed)
        self.contents = {name: (victim / name).read_bytes() for name in FILES}
        self.others = {name: (other / name).read_bytes() for name in FILES}
        self.ways: list[Callable[[bytearray], bytes | None]] = [
            self.flip, self.flip, self.flip_in_the_header, self.overwrite, self.exchange_bytes, self.insert,
            self.cut_out, self.truncate, self.append, self.append_space, self.other_checkpoint, self.other_file,
            self.make_unusable, self.make_empty,
        ]  # fmt: skip

    def strike(self) -> str:
        """Do something; say what."""
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

    def stretch(self, content: bytearray) -> slice:
        begin, end = sorted(self.random.sample(range(len(content) + 1), 2))
        return slice(begin, end)

    def flip(self, content: bytearray) -> bytes:
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        return content

    def flip_in_the_header(self, content: bytearray) -> bytes:
        """Of a file of tensors; anywhere in the others."""
        header = 8 + int.from_bytes(content[:8], "little") if "tensors" in self.name else len(content)
        content[self.random.randrange(header)] ^= 1 << self.random.randrange(8)
        return content

    def overwrite(self, content: bytearray) -> bytes:
        where = self.stretch(content)
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
        del content[self.stretch(content)]
        return content

    def truncate(self, content: bytearray) -> bytes:
        return content[: self.random.randrange(len(content))]

    def append(self, content: bytearray) -> bytes:
        return content + self.random.randbytes(self.random.randint(1, 20))

    def append_space(self, content: bytearray) -> bytes:
        """JSON would not mind."""
        return content + self.random.choice([b" ", b"\n", b"\0", b"\t\n"])

    def other_checkpoint(self, content: bytearray) -> bytes:
        return self.others[self.name]

    def other_file(self, content: bytearray) -> bytes:
        return self.contents[self.random.choice(FILES)]

    def make_empty(self, content: bytearray) -> bytes:
        return b""

    def make_unusable(self, content: bytearray) -> None:
        """Missing, or a directory, a link or a pipe in its place."""
        self.file.unlink()
        match self.random.randrange(5):
            case 0:
                self.file.mkdir()
            case 1:
                os.mkfifo(self.file)  # who opens it waits for ever
            case 2:
                self.file.symlink_to("nowhere")
            case 3:
                outside = self.victim.parent / "outside"
                outside.write_bytes(content)
                self.file.symlink_to(outside)  # the content is right


def strike_often(first: Path, second: Path, times: int) -> None:
    vandal = Vandal(second, first, seed=times)
    seen = set()
    for _ in range(times):
        what = vandal.strike()
        found, heard = newest(first.parent)
        assert found == first, what
        (reason,) = heard
        assert reason.startswith("step=2: "), what
        assert len(reason) > len("step=2: "), what
        assert "\n" not in reason
        seen.add(what)
        vandal.repair()
    assert newest(first.parent) == (second, [])
    assert holds(second, 2)
    if times > 1000:
        assert len(seen) == len(set(vandal.ways)) * len(FILES)


def test_hundreds_of_damages(two: tuple[Path, Path]) -> None:
    strike_often(*two, times=300)


@pytest.mark.slow
def test_ten_thousand_damages(two: tuple[Path, Path]) -> None:
    strike_often(*two, times=10_000)


def test_every_byte_of_the_smaller_files(two: tuple[Path, Path]) -> None:
    """Case of letters and white space too: JSON takes some of it for the same."""
    for name in ("manifest.json", "state.json"):
        content = (two[1] / name).read_bytes()
        for place in range(len(content)):
            damaged = bytearray(content)
            damaged[place] ^= 0x20
            (two[1] / name).write_bytes(damaged)
            assert checkpoint.defect(two[1]), (name, place)
        (two[1] / name).write_bytes(content)
    assert checkpoint.defect(two[1]) == ""


@pytest.mark.parametrize("name", FILES)
def test_what_is_said_of_it(two: tuple[Path, Path], name: str) -> None:
    first, second = two
    content = (second / name).read_bytes()
    (second / name).unlink()
    assert newest(first.parent) == (first, [f"step=2: {name} is missing"])
    (second / name).mkdir()
    assert newest(first.parent) == (first, [f"step=2: {name} is not a plain file"])
    (second / name).rmdir()
    (second / name).write_bytes(content[:-1])
    ((_, said),) = ((found, why) for found, [why] in [newest(first.parent)])
    short = f"{name} has {len(content) - 1:,} bytes instead of {len(content):,}"
    assert said == f"step=2: {short}" or name == "manifest.json"
    (second / name).write_bytes(content[:-1] + b"~")
    assert name in newest(first.parent)[1][0] or name == "manifest.json"
    with pytest.raises(UserError, match=r"step=2 cannot be used: .*; take another or remove it"):
        checkpoint.check(second)


def test_all_of_them_damaged_is_nothing_to_go_on_from(two: tuple[Path, Path]) -> None:
    for path in two:
        (path / "state.json").write_text("{}")
    found, heard = newest(two[0].parent)
    assert found is None
    assert [line.partition(":")[0] for line in heard] == ["step=2", "step=1"]


@pytest.mark.parametrize(
    "edit",
    [
        {"step": 3}, {"step": "2"}, {"step": None}, {"metrics": {}}, {"xxh3_128": {}}, {"seal": ""}, {"bytes": {}},
        {"xxh3_128": None}, {"extra": 1}, [], None, "text", 7, {"format": 1}, {"format": "2"}, {"format": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_edited_manifest_is_not_believed(two: tuple[Path, Path], edit: Any) -> None:
    first, second = two
    manifest = json.loads((second / "manifest.json").read_text())
    text = json.dumps(manifest | edit if isinstance(edit, dict) else edit, indent=1)
    (second / "manifest.json").write_text(text)
    found, (heard,) = newest(first.parent)
    assert found == first
    assert heard.startswith("step=2: ")
    if isinstance(edit, dict) and "format" in edit:
        assert heard == f"step=2: format {edit['format']} is not the 2 of this version"


def test_a_checkpoint_of_the_format_before_is_named_so(tmp_path: Path) -> None:
    """Its manifest was sealed in another way."""
    checkpoint.save(tmp_path / "a", state(1), [whole("w", torch.zeros(3))])
    (tmp_path / "a" / "manifest.json").write_text(
        json.dumps({"format": 1, "step": 1, "metrics": {}, "sha256": {"tensors.safetensors": "00"}, "seal": "00"})
    )
    assert newest(tmp_path) == (None, ["a: format 1 is not the 2 of this version"])
