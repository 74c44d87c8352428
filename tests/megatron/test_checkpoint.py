# SPDX-License-Identifier: Apache-2.0
"""Checkpoints hold everything, notice every damage, and survive kills and full disks."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo.errors import UserError
from bionemo.megatron import checkpoint

FORK = multiprocessing.get_context("fork")  # nothing to import again
STATE: dict[str, Any] = {
    "global_step": 7,
    "metrics": {"val_loss": 2.5},
    "nested": {"list": [1, [2.5, None], (True, False, ("a", {3: "int key", "3": "text key", (1, 2): "pair"}))]},
    "empty": {"dict": {}, "list": [], "tuple": (), "text": ""},
    "numbers": [float("inf"), -float("inf"), 0.1 + 0.2, -0.0, 2**70, 1e-310],
    "text": 'α 𝛽 " \\ \n $tensor',
    "imitations": [{"$tensor": "0"}, {"$tuple": [1]}, {"$dict": []}],
    "tensors": {
        "bf16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(4).half(),
        "int": torch.arange(-5, 5),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).T,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    },
}


def same(found: Any, expected: Any) -> bool:
    """Equal in type and to the bit, all the way down."""
    if type(found) is not type(expected):
        return False
    match expected:
        case torch.Tensor():
            alike = (found.shape, found.dtype) == (expected.shape, expected.dtype)
            return alike and torch.equal(bits(found), bits(expected))
        case dict():
            return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
        case list() | tuple():
            return len(found) == len(expected) and all(map(same, found, expected))
    return repr(found) == repr(expected)  # tells -0.0 from 0.0, and nan is nan


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def small(step: int) -> dict[str, Any]:
    return {"global_step": step, "metrics": {"val_loss": step / 10}, "w": torch.full((20,), float(step))}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step={step}", small(step))
    return tmp_path / "step=1", tmp_path / "step=2"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def newest(directory: Path) -> tuple[Path | None, list[str]]:
    heard: list[str] = []
    return checkpoint.newest(directory, lambda path, why: heard.append(f"{path.name}: {why}")), heard


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", STATE)
    assert same(checkpoint.load(tmp_path / "a"), STATE)
    assert names(tmp_path) == {"a"}


def test_files_are_json_and_safetensors_and_hold_no_objects(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", STATE)
    assert names(tmp_path / "a") == {"tensors.safetensors", "state.json", "manifest.json"}
    for name in ("state.json", "manifest.json"):
        json.loads((tmp_path / "a" / name).read_text())
    content = (tmp_path / "a" / "tensors.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")  # the format: size of a JSON header, the header, numbers
    spans = [entry["data_offsets"] for entry in json.loads(content[8:header]).values()]
    assert max(end for _, end in spans) == len(content) - header
    with pytest.raises(TypeError, match="not PosixPath"):
        checkpoint.save(tmp_path / "b", {"global_step": 1, "path": tmp_path})
    assert names(tmp_path) == {"a"}


def test_every_flipped_byte_is_noticed(two: tuple[Path, Path]) -> None:
    first, second = two
    for file in sorted(second.iterdir()):
        content = file.read_bytes()
        places = range(len(content)) if len(content) < 600 else random.Random(0).sample(range(len(content)), 400)
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= 1 << (place % 8)
            file.write_bytes(damaged)
            assert checkpoint.defect(second), (file.name, place)
            if place % 50 == 0:
                found, heard = newest(first.parent)
                assert found == first, (file.name, place)
                assert heard[0].startswith("step=2: ")
                with pytest.raises(UserError, match="step=2 cannot be used"):
                    checkpoint.load(second)
        file.write_bytes(content)
    assert newest(first.parent) == (second, [])


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_short_or_missing_file_is_noticed(two: tuple[Path, Path], name: str) -> None:
    first, second = two
    content = (second / name).read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        (second / name).write_bytes(content[:size])
        assert checkpoint.defect(second), size
        assert newest(first.parent)[0] == first
    (second / name).unlink()
    found, heard = newest(first.parent)
    assert (found, heard) == (first, [f"step=2: {name} is missing"])


@pytest.mark.parametrize(
    "edit",
    [
        {"step": 3}, {"step": "2"}, {"step": None}, {"metrics": {}}, {"sha256": {}}, {"format": 2}, {"seal": ""},
        {"sha256": None}, {"extra": 1}, [], None, "text",
    ],
    ids=str,
)  # fmt: skip
def test_an_edited_manifest_is_not_believed(two: tuple[Path, Path], edit: Any) -> None:
    first, second = two
    manifest = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps(manifest | edit if isinstance(edit, dict) else edit))
    found, heard = newest(first.parent)
    assert found == first
    assert len(heard) == 1


def test_other_directories_are_left_alone(two: tuple[Path, Path]) -> None:
    (two[0].parent / "notes").mkdir()
    (two[0].parent / "file.txt").touch()
    assert newest(two[0].parent) == (two[1], [])
    assert newest(two[0].parent / "nowhere") == (None, [])


def test_a_name_can_be_written_again(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / "last", small(step))
        assert checkpoint.load(tmp_path / "last")["global_step"] == step
    checkpoint.save(tmp_path / "other", small(3))
    checkpoint.link(tmp_path / "other", tmp_path / "last")
    assert checkpoint.load(tmp_path / "last")["global_step"] == 3
    assert names(tmp_path) == {"last", "other"}


def test_two_names_of_one_checkpoint_stand_alone(two: tuple[Path, Path]) -> None:
    first, _ = two
    second_name = first.with_name("best")
    checkpoint.link(first, second_name)
    assert (first / "state.json").samefile(second_name / "state.json")
    checkpoint.remove(first)
    assert not first.exists()
    assert checkpoint.load(second_name)["global_step"] == 1


def test_without_hard_links_a_copy_is_made(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint.link(two[0], two[0].with_name("best"))
    assert not (two[0] / "state.json").samefile(two[0].with_name("best") / "state.json")
    assert checkpoint.load(two[0].with_name("best"))["global_step"] == 1


def save_under_a_limit(directory: Path, limit: int, message: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoint.save(directory / "step=3", small(3) | {"big": torch.zeros(50_000), "text": "x" * 300_000})
    except UserError as error:
        message.put(str(error))


@pytest.mark.parametrize("limit", [1000, 250_000], ids=["tensors", "state"])
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(two: tuple[Path, Path], limit: int) -> None:
    """A process that may not write so large a file meets the same error, at either file."""
    message = FORK.SimpleQueue()
    process = FORK.Process(target=save_under_a_limit, args=(two[0].parent, limit, message))
    process.start()
    process.join()
    text = message.get()
    assert "step=3 could not be written" in text
    assert "make room" in text
    assert "\n" not in text
    assert names(two[0].parent) == {"step=1", "step=2"}
    assert newest(two[0].parent) == (two[1], [])


def test_a_disk_that_fills_while_copying_is_one_line(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(UserError, match="No space left on device"):
        checkpoint.link(two[0], two[0].with_name("best"))
    assert names(two[0].parent) == {"step=1", "step=2"}


def save_without_end(directory: Path, step: int, saved: Any) -> None:
    while True:
        step += 1
        last = directory / f"step={step}-last"
        checkpoint.save(last, {"global_step": step, "w": torch.full((300_000,), float(step))})
        saved.value = step
        checkpoint.link(last, directory / "best")
        for old in checkpoint.complete(directory):
            if old not in (last, directory / "best"):
                checkpoint.remove(old)


def kill_while_saving(directory: Path, kills: int) -> None:
    """Kill a process that saves without end at any moment: what it had saved, or later, is there and whole."""
    saved, generator = FORK.Value("q", 0, lock=False), random.Random(0)
    for _ in range(kills):
        process = FORK.Process(target=save_without_end, args=(directory, saved.value, saved))
        process.start()
        time.sleep(generator.uniform(0.02, 0.15))
        process.kill()
        process.join()
        found, heard = newest(directory)
        if saved.value:
            assert found is not None
            state = checkpoint.load(found)
            assert state["global_step"] >= saved.value
            assert (state["w"] == state["global_step"]).all()
            assert not heard
        checkpoint.clean(directory)
        assert not list(directory.glob("*.unfinished"))
    assert saved.value > 0


def test_a_kill_while_saving_never_loses_the_checkpoint_before(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=25)


@pytest.mark.slow
def test_a_thousand_kills_while_saving(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=1000)
