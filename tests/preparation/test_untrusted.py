# SPDX-License-Identifier: Apache-2.0
"""With output directories prepared by an attacker, neither files outside nor user files are deleted."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bionemo.common.errors import UserError
from bionemo.common.files import create_owned
from bionemo.preparation.manifest import verify
from tests.support.staged_outputs import make, tree

STAGE = ".preparing-0123abcd"
DEEP = b'{"a":' * 100_000
INVALID = {
    "nothing": b"",
    "text": b"moves",
    "list": b"[]",
    "deep": DEEP,
    "bytes": b"\xff\xfe\0",
    "huge": b'"' + b"x" * (2 << 20) + b'"',
    "number": b"9" * 5000,
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return an output directory with a file and a directory of the user, next to a victim."""
    for name in ("victim/x", "o/precious/x", "o/mine.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    return tmp_path / "o"


def untouched(out: Path) -> bool:
    found = [out / "mine.txt", out / "precious/x", out.parent / "victim/x"]
    return all(path.read_text() == "precious" for path in found)


def refused(out: Path, *, force: bool = False) -> str:
    """Start twice and return the one-line error, which must be the same."""
    lines = []
    for _ in range(2):
        with pytest.raises(UserError) as error:
            make(out, force=force)
        lines.append(str(error.value))
    assert lines[0] == lines[1] and "\n" not in lines[0] and untouched(out)
    return lines[0]


def create_stage(out: Path, moves: object, marked: bool = True) -> Path:
    stage = out / STAGE
    if marked:
        create_owned(stage, "preparation")
    stage.mkdir(exist_ok=True)
    (stage / "moves.json").write_bytes(moves if isinstance(moves, bytes) else json.dumps(moves).encode())
    return stage


@pytest.mark.parametrize("name", ["../victim", "precious", "mine.txt"])
def test_a_staging_directory_without_the_marker_is_not_touched(
    out: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = create_stage(out, {name: False, "manifest.json": True}, marked=False)
    assert make(out) and untouched(out) and verify(out) == []
    assert (stage / "moves.json").exists()
    assert f"{stage} was not created by bionemo and is left as it is" in caplog.text
    assert not make(out)


@pytest.mark.parametrize(
    "moves",
    [
        *(
            {name: value}
            for name in ("../victim", "..", ".", "", "/etc", "a/b", "precious", "\n")
            for value in (0, False)
        ),
        {"../victim": True},
        {"train/../../victim": True},
        {"train": "yes"},
        {"train": None},
        {".preparing-00000000": True},
        *INVALID.values(),
    ],
)
def test_invalid_moves(out: Path, moves: object) -> None:
    stage = create_stage(out, moves)
    assert f"{stage} is not a valid staging directory" in refused(out)
    assert "remove it, then start again" in refused(out, force=True)
    shutil.rmtree(stage)
    assert make(out) and untouched(out)


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_list_of_moves_that_is_not_a_file(out: Path, kind: Callable[[Path], None]) -> None:
    stage = create_stage(out, {})
    (stage / "moves.json").unlink()
    kind(stage / "moves.json")
    assert "is not a valid staging directory" in refused(out)


def complete_stage(out: Path, **changes: Any) -> Path:
    """Create a staging directory with a complete data set."""
    make(out.parent / "made", **changes)
    stage = create_stage(out, {name: True for name in ("train", "val", "notes.txt", "manifest.json")})
    (out.parent / "made").rename(stage / "tree")
    return stage


def test_replaced_files_are_kept_unless_listed_in_the_manifest(out: Path) -> None:
    make(out)
    (out / "train/mine.csv").write_text("precious")
    (out / "val/x000.csv").write_text("changed since")
    complete_stage(out, seed=1)
    assert not make(out, seed=1)
    assert untouched(out) and verify(out) == []
    [kept] = out.glob("replaced-*")
    assert tree(kept) == {"train/mine.csv": b"precious", "val/x000.csv": b"changed since"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda stage: (stage / "tree/train/y.csv").write_text("x"),
        lambda stage: (stage / "tree/train/x000.csv").write_text("longer than it was"),
        lambda stage: ((stage / "tree/notes.txt").unlink(), (stage / "tree/notes.txt").symlink_to("/dev/zero")),
        lambda stage: (stage / "tree/train/link").symlink_to("/"),
        lambda stage: (stage / "replaced").symlink_to("/"),
        lambda stage: (stage / "tree/manifest.json").write_bytes(DEEP),
        lambda stage: ((stage / "tree").rename(stage / "t"), (stage / "tree").symlink_to(stage / "t")),
    ],
)
def test_a_changed_staging_directory(out: Path, damage: Callable[[Path], object]) -> None:
    stage = complete_stage(out)
    damage(stage)
    assert f"{stage} is not a valid staging directory" in refused(out)
    assert not (out / "manifest.json").exists()


def forged(out: Path, files: dict[str, Any]) -> None:
    content = {"format": "bionemo-prepared", "version": 1, "job": "tiny", "parameters": {"seed": 0}, "inputs": []}
    (out / "manifest.json").write_text(json.dumps({**content, "tallies": {}, "files": files, "versions": {}}))


ENTRY = {"size": 8, "sha256": "0" * 64, "rows": None}


@pytest.mark.parametrize(
    "name",
    [
        *("precious/x", "../victim/x", "/etc/passwd", "train/../precious/x", "..", "", "train", "a\nb", "train/x.csv"),
        *("train/x000.csv/../../mine.txt", "\udc80", ".preparing-00000000", "uf50/x000.csv"),
    ],
)
def test_a_manifest_with_names_that_no_preparation_writes(out: Path, name: str) -> None:
    forged(out, {name: ENTRY})
    assert f"{out / 'manifest.json'} is not a valid manifest (wrong type or value: files: " in refused(out)
    assert make(out, force=True) and untouched(out) and verify(out) == []


def test_a_manifest_that_lists_files_of_the_user(out: Path) -> None:
    (out / "train").mkdir()
    (out / "train/mine.csv").write_text("precious")
    (out / "notes.txt").write_text("precious")  # the data set has a file of this name
    forged(out, {name: ENTRY for name in ("mine.txt", "notes.txt", "train/x000.csv")})
    assert make(out, force=True) and untouched(out)
    [kept] = out.glob("replaced-*")
    assert tree(kept) == {"train/mine.csv": b"precious", "notes.txt": b"precious"}


def _changed(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *path, last = key.split("/")
        for part in path:
            content = content[part]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("job", [None, 1, []]),
        ("parameters", [None, [], 1]),
        ("inputs", [None, {}, [1], [{}], [{"source": 1, "size": 1, "sha256": ""}], [{"evil": 1}]]),
        ("tallies", [None, [], {"x": 1}, {"x": {}}, {"x": {"into": [1]}}, {"x": {"into": [], "read": "1"}}]),
        ("tallies/val/dropped", [1, {"x": "y"}, {"x": -1}]),
        ("tallies/val/written", [True, 1.5, -1, 10**30, None]),
        ("files", [None, [], {"train/x000.csv": 1}, {"train/x000.csv": {"size": -1, "sha256": "", "rows": 1}}]),
    ],
)
def test_manifests_of_other_types(out: Path, key: str, values: list[object]) -> None:
    make(out)
    good = json.loads((out / "manifest.json").read_text())
    for value in values:
        content = json.loads(json.dumps(good))
        _changed(key, value)(content)
        (out / "manifest.json").write_text(json.dumps(content))
        assert f"{out / 'manifest.json'} is not a valid manifest (" in refused(out)
        with pytest.raises(UserError, match="is not a valid manifest"):
            verify(out)


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID)
def test_invalid_manifests(out: Path, content: bytes) -> None:
    (out / "manifest.json").write_bytes(content)
    assert f"{out / 'manifest.json'} is not a valid manifest (" in refused(out)
    assert make(out, force=True) and verify(out) == [] and untouched(out)


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_manifests_that_are_not_files(out: Path, kind: Callable[[Path], None]) -> None:
    kind(out / "manifest.json")
    assert "is not a valid manifest (it is not a regular file)" in refused(out)
    assert make(out, force=True) and verify(out) == []


def test_shards_that_are_not_files(out: Path) -> None:
    make(out)
    (out / "train/x000.csv").unlink()
    os.mkfifo(out / "train/x000.csv")
    [problem] = verify(out)
    assert "train/x000.csv cannot be read (it is not a regular file)" in problem


def test_terminal_codes_of_a_manifest_are_not_printed(out: Path) -> None:
    make(out)
    path = out / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": "\\u001b[2J\\n"'))
    assert "seed='\\x1b[2J\\n', not 0" in refused(out)
