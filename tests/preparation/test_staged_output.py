# SPDX-License-Identifier: Apache-2.0
"""An output directory contains either the old or the new data set after any failure."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bionemo.common.errors import UserError
from bionemo.common.lock import run_lock
from bionemo.preparation import staged_output
from bionemo.preparation.manifest import Manifest, verify
from bionemo.preparation.staged_output import StagedOutput, recover, stage_output
from tests.support.preparation import generated, left, parse, prepare, reference, shards, write
from tests.support.staged_outputs import DIRECTORIES, make, tree


def test_a_complete_data_set_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, staged_output.__name__)
    out = tmp_path / "a/b"
    assert make(out)
    assert sorted(tree(out)) == ["manifest.json", "notes.txt", "train/x000.csv", "val/x000.csv"]
    assert "val: 2 records read, 2 written to val/" in caplog.text
    before = {path: path.stat().st_mtime_ns for path in [out, *out.rglob("*")]}
    caplog.clear()
    with patch.object(staged_output, "run_lock", side_effect=AssertionError("it would write to the directory")):
        assert not make(out)
    assert f"{out} is prepared already; force=True" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in [out, *out.rglob("*")]} == before


def test_a_finished_directory_may_be_read_only(tmp_path: Path) -> None:
    make(tmp_path)
    for path in [*tmp_path.rglob("*"), tmp_path]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert not make(tmp_path)
        assert verify(tmp_path) == []
        if os.geteuid():
            with pytest.raises(UserError, match="cannot be written or read \\(Permission denied\\)"):
                make(tmp_path, force=True)
    finally:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o700)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"seed": 1}, "was prepared with seed=0, not 1: choose another output, or set force=True"),
        ({"files": 3}, "was prepared with files=None, not 3"),
        ({"seed": 0, "a": [1, {"b": None}]}, "was prepared with a=None"),
    ],
)
def test_other_data_sets_are_not_replaced_without_force(
    tmp_path: Path, parameters: dict[str, Any], message: str
) -> None:
    make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=message):
        make(tmp_path, **parameters)
    with (
        pytest.raises(UserError, match="contains tiny data: choose another output, or force=True"),
        stage_output(tmp_path, "other", {"seed": 0}, DIRECTORIES),
    ):
        pass
    assert tree(tmp_path) == before
    assert make(tmp_path, force=True, **parameters) and not make(tmp_path, **parameters)
    assert verify(tmp_path) == [] and (tree(tmp_path) != before)


def test_force_replaces_the_data_set_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path)
    index = ".idx-01234567"
    for name in ("raw/x.gz", "mine.txt", "train/other.csv", f"train/other.csv{index}", f"val/x000.csv{index}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    with stage_output(tmp_path, "other", {}, ("train", "test"), force=True) as made:
        assert made is not None
        made.write("test/x000.csv", b"id\n1\n", 1)
        made.write("train/x000.csv", b"id\n2\n", 1)
    # the old validation split must go: its records may be in the new training split
    assert sorted(name.partition("-")[0] for name in tree(tmp_path)) == [
        *("manifest.json", "mine.txt", "notes.txt", "raw/x.gz"),
        *("replaced", "replaced", "test/x000.csv", "train/x000.csv"),
    ]
    [kept] = tmp_path.glob("replaced-*")
    assert tree(kept) == {"train/other.csv": b"mine", f"train/other.csv{index}": b"mine"}
    assert verify(tmp_path) == []


@pytest.mark.parametrize("place", ["train", "val/x000.csv", "test"])
def test_other_files_are_not_replaced_without_force(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("precious")
    with pytest.raises(UserError, match=rf"{place.partition('/')[0]} exists and was not made by this preparation"):
        make(tmp_path)
    assert tree(tmp_path) == {place: b"precious"}
    assert make(tmp_path, force=True) and verify(tmp_path) == []
    [kept] = tmp_path.glob("replaced-*")
    assert tree(kept) == {place: b"precious"}
    shutil.rmtree(kept)
    assert sorted(tree(tmp_path)) == ["manifest.json", "notes.txt", "train/x000.csv", "val/x000.csv"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "bionemo-prepared", "version": 99}'])
def test_an_invalid_manifest_is_replaced_with_force(tmp_path: Path, content: str) -> None:
    make(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="force=True"):
        make(tmp_path)
    assert make(tmp_path, force=True) and verify(tmp_path) == []


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"id\n")])
def test_missing_or_changed_shards_are_noticed(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    make(tmp_path)
    damage(tmp_path / "val/x000.csv")
    with pytest.raises(
        UserError, match=r"val/x000.csv has changed since it was prepared: prepare it again with force=True"
    ):
        make(tmp_path)


class Interruption(BaseException):
    """An exception like KeyboardInterrupt."""


@pytest.mark.parametrize("error", [RuntimeError, Interruption, UserError])
@pytest.mark.parametrize("finished", [False, True])
def test_an_error_keeps_the_old_data_set(tmp_path: Path, error: type[BaseException], finished: bool) -> None:
    if finished:
        make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(error), stage_output(tmp_path, "tiny", {"seed": 1}, DIRECTORIES, force=True) as made:
        assert made is not None
        made.write("train/x000.csv", b"id\n1\n", 1)
        (made.scratch / "rows").write_bytes(b"123")
        raise error
    assert tree(tmp_path) == before and {path.name for path in left(tmp_path)} == {
        name.partition("/")[0] for name in before
    }


def test_inconsistent_record_counts_are_a_defect(tmp_path: Path) -> None:
    for change in ({"read": 3}, {"dropped": {"empty": 1}}, {"letters_read": 9}):
        with (
            pytest.raises(AssertionError, match=r"^x: "),
            stage_output(tmp_path / "out", "tiny", {}, DIRECTORIES) as made,
        ):
            assert made is not None
            tally = made.add_counts("x", "train")
            tally.read = tally.written = made.write_csv("train/x000.csv", ["id"], [[1], [2]])
            for key, value in change.items():
                setattr(tally, key, value)
        assert not left(tmp_path / "out")


LOCK = ".prepare.lock"  # an empty one remains if the process is killed before its last operation
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Run a function in a process that is killed before the n-th call that changes a directory.

    Returns:
        Whether it was killed; False: it ended normally.
    """
    process = os.fork()
    if process:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status in (0, -9)
        return status == -9
    try:
        left = call

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*args: Any, **kwargs: Any) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), 9)
                return real(*args, **kwargs)

            return wrapper

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_the_next_start_completes_a_killed_preparation(tmp_path: Path) -> None:
    text = generated(30)
    expected = reference(parse(text.encode()), 1, 1, 0, 2)
    source, out, call, finished = tmp_path / "x.fasta", tmp_path / "out", 0, 0
    while True:
        write(tmp_path, text)
        died = killed_at(call, lambda: prepare(source, out))
        found = Manifest.read(out)
        assert found is None or verify(out) == []  # a manifest implies a complete data set
        assert found is not None or died
        if complete := [*out.glob(".preparing-*/moves.json")]:
            source.unlink()  # the data set is complete: the source is not read again
        prepare(source, out)
        finished += bool(complete)
        assert shards(out) == expected
        assert {path.name for path in out.iterdir()} - {LOCK} == {"manifest.json", "test", "train", "val"}
        shutil.rmtree(out)
        if not died:
            break
        call += 1
    assert call > 20 and finished > 5


@pytest.mark.parametrize("call", range(4))
def test_the_next_start_completes_interrupted_moves(tmp_path: Path, call: int) -> None:
    text = generated(30)
    source, out, more, real = write(tmp_path, text), tmp_path / "out", call, os.rename

    def failing(*args: Any) -> None:
        nonlocal more
        more -= 1
        if more < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*args)

    with (
        patch.object(os, "rename", failing),
        pytest.raises(UserError, match=r"cannot be written or read \(Input/outp"),
    ):
        prepare(source, out)
    assert Manifest.read(out) is None
    source.unlink()  # the data set is complete: the source is not read again
    prepare(source, out)
    assert shards(out) == reference(parse(text.encode()), 1, 1, 0, 2)
    assert {path.name for path in left(out)} == {"manifest.json", "test", "train", "val"}


@pytest.mark.slow
def test_killed_while_replacing_another_data_set(tmp_path: Path) -> None:
    text = generated(30)
    source, out, call, states = write(tmp_path, text), tmp_path / "out", 0, set()
    old, new = (reference(parse(text.encode()), val, 1, 0, 2) for val in (3, 0))
    while True:
        prepare(source, out, val_size=3)
        died = killed_at(call, lambda: prepare(source, out, val_size=0, force=True))
        found = Manifest.read(out)
        assert found is None or (verify(out) == [] and shards(out) in (old, new))
        states.add(found.parameters["val_size"] if found else None)
        try:
            prepare(source, out, val_size=0)
        except UserError as error:
            assert "was prepared with val_size=3, not 0" in str(error)
            assert shards(out) == old
            prepare(source, out, val_size=0, force=True)
        assert shards(out) == new
        assert {path.name for path in out.iterdir()} - {LOCK} == {"manifest.json", "test", "train"}
        shutil.rmtree(out)
        if not died:
            break
        call += 1
    assert states == {3, 0, None}


def _flip(path: Path, place: int = -2) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda out: _flip(out / "train/x001.csv"),
            "train/x001.csv has changed since it was written: its checksum differs",
        ),
        (
            lambda out: _flip(out / "val/x000.csv", 0),
            "val/x000.csv has changed since it was written: its checksum differs",
        ),
        (lambda out: (out / "test/x000.csv").unlink(), "test/x000.csv cannot be read (No such file or directory)"),
        (lambda out: shutil.rmtree(out / "test"), "test/x000.csv cannot be read (No such file or directory)"),
        (
            lambda out: os.truncate(out / "train/x000.csv", 99),
            "train/x000.csv has changed since it was written: its size di",
        ),
        (
            lambda out: os.truncate(out / "val/x000.csv", (out / "val/x000.csv").stat().st_size - 1),
            "val/x000.csv has changed since it was written: its size differ",
        ),
        (
            lambda out: (out / "test/x000.csv").open("ab").write(b"M"),
            "test/x000.csv has changed since it was written: its si",
        ),
        (lambda out: _flip(out.parent / "x.fasta"), "x.fasta is not the file that was read"),
        (lambda out: (out.parent / "x.fasta").open("ab").write(b"\n"), "x.fasta is not the file that was read"),
        (
            lambda out: _edit(out / "manifest.json", lambda m: m["tallies"]["x.fasta"].update(read=31)),
            "x.fasta: 31 records read, 30 written, 0 dropped",
        ),
        (
            lambda out: _edit(out / "manifest.json", lambda m: m["tallies"]["x.fasta"].update(read=29, written=29)),
            "x.fasta: 29 records written, but the shards contain 30",
        ),
        (
            lambda out: _edit(out / "manifest.json", lambda m: m["tallies"]["x.fasta"].update(letters_written=1)),
            " letters read, 1 written, 0 dropped",
        ),
        (
            lambda out: _edit(out / "manifest.json", lambda m: m["files"].pop("train/x001.csv")),
            "x.fasta: 30 records written, but the shards contain 16",
        ),
    ],
)
def test_verify_notices(tmp_path: Path, damage: Callable[[Path], object], problem: str) -> None:
    out = tmp_path / "out"
    prepare(write(tmp_path, generated(30)), out)
    damage(out)
    [found] = verify(out)
    assert problem in found


def test_verify_accepts_missing_inputs(tmp_path: Path) -> None:
    prepare(source := write(tmp_path, generated(30)), tmp_path / "out")
    source.unlink()  # an input may have been deleted
    assert verify(tmp_path / "out") == []
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"contains no manifest.json: it was not prepared, or its preparation was interrupted"
    ):
        verify(tmp_path / "out")


def _slowly(out: Path) -> None:
    with stage_output(out, "tiny", {"seed": 0}, DIRECTORIES) as made:
        if made is None:
            return
        with (out.parent / "log").open("a") as log:
            log.write(f"{os.getpid()}\n")
        assert len([*out.glob(".preparing-*")]) == 1
        time.sleep(0.2)
        made.write("train/x000.csv", b"id\n1\n", 1)


def test_one_of_several_processes_prepares_the_data(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_slowly, args=(tmp_path / "out",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1
    assert verify(tmp_path / "out") == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "train"]


def test_a_process_that_waited_holds_the_lock(tmp_path: Path) -> None:
    waiting, entered, leave = threading.Event(), threading.Event(), threading.Event()

    def wait_and_enter() -> None:
        waiting.set()
        with run_lock(tmp_path, LOCK, wait=True):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=wait_and_enter)
    with run_lock(tmp_path, LOCK, wait=True):
        thread.start()
        waiting.wait(20)
        assert not entered.wait(0.1)
    assert entered.wait(20)
    with pytest.raises(UserError, match="is in use by another run"), run_lock(tmp_path, LOCK):
        pass
    leave.set()
    thread.join()
    assert not left(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disk_is_reported_in_one_line(tmp_path: Path, workers: int) -> None:
    source = write(tmp_path, generated(30))
    with (
        patch.object(StagedOutput, "path", lambda *_: Path("/dev/full")),  # a device that is always full
        pytest.raises(UserError, match="no space left on the disk; no output was written") as error,
    ):
        prepare(source, tmp_path / "out", workers)
    assert "\n" not in str(error.value) and not left(tmp_path / "out")
    prepare(source, tmp_path / "out")


@pytest.mark.parametrize("name", [".preparing-my notes", ".preparing-0123abcd"])
def test_directories_of_the_user_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    recover(tmp_path)
    assert (tmp_path / name / "thesis.txt").read_text() == "mine"


def test_an_invalid_output_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match=r"file.* cannot be written or read \((File exists|Not a directory)\)"):
            make(tmp_path / place)
    assert (tmp_path / "file").read_text() == "x"
