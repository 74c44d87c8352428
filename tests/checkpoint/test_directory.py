# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are created atomically; disk errors are reported in one line and lose nothing."""

import ctypes
import errno
import multiprocessing
import os
import resource
import shutil
import stat
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo import checkpoint
from bionemo.checkpoint import Piece, directory
from bionemo.common.errors import UserError
from tests.checkpoint.samples import FILES, holds, names, newest, save, state, together, weights, whole

FORK = multiprocessing.get_context("fork")  # nothing to import again


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_several_processes_write_one_checkpoint(tmp_path: Path, processes: int) -> None:
    save(tmp_path / "runs" / "a", 3, processes)
    assert holds(tmp_path / "runs" / "a", 3)
    assert names(tmp_path / "runs") == {"a"}
    assert checkpoint.load_manifest(tmp_path / "runs" / "a")["step"] == 3
    assert checkpoint.load_manifest(tmp_path / "runs" / "a")["metrics"] == {"val_loss": 1 / 3}


@pytest.mark.parametrize("order", permutations(("1-last", "step=20-last", "step=3")))
def test_newest_checkpoint_has_the_highest_step(tmp_path: Path, order: tuple[str, ...]) -> None:
    places = [tmp_path / "checkpoints" / name for name in order]
    for step, place in enumerate(places, 9):  # step numbers are compared as numbers, not as text
        save(place, step)
    assert checkpoint.list_complete(tmp_path / "checkpoints") == places[::-1]
    assert newest(tmp_path / "checkpoints") == (places[2], [])
    shutil.rmtree(places[2])
    assert newest(tmp_path / "checkpoints") == (places[1], [])


def test_other_directories_are_left_alone(two: tuple[Path, Path]) -> None:
    (two[0].parent / "notes").mkdir()
    (two[0].parent / "file.txt").touch()
    assert newest(two[0].parent) == (two[1], [])
    assert newest(two[0].parent / "nowhere") == (None, [])
    checkpoint.remove_unfinished(two[0].parent)
    checkpoint.remove_unfinished(two[0].parent / "nowhere")
    assert names(two[0].parent) == {"step=1", "step=2", "notes", "file.txt"}


def test_existing_checkpoints_are_replaced(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "last", step)
        assert holds(tmp_path / "last", step)
    save(tmp_path / "other", 3)
    checkpoint.link(tmp_path / "other", tmp_path / "last")
    assert holds(tmp_path / "last", 3)
    assert names(tmp_path) == {"last", "other"}


class Killed(BaseException):
    """Ends a save like a kill, without cleanup."""


@pytest.mark.parametrize("call", range(5))
def test_replacing_can_be_interrupted_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Before, between and after the renames the old or the new checkpoint is found, and one of them remains."""
    save(tmp_path / "last", 1)
    rename, calls = os.rename, 0

    def dies(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > call // 2:
            if call % 2:
                rename(source, target)
            raise Killed
        rename(source, target)

    monkeypatch.setattr(os, "rename", dies)
    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(Killed):
        save(tmp_path / "last", 2)
    monkeypatch.undo()
    found, messages = newest(tmp_path)
    assert found is not None
    step = checkpoint.load_manifest(found)["step"]
    assert (holds(found, step), messages) == (True, [])
    assert step == (2 if call >= 3 else 1)
    assert len(checkpoint.list_complete(tmp_path)) == 1  # no checkpoint is counted twice among the best
    checkpoint.remove_unfinished(tmp_path)
    assert holds(found, step)
    assert names(tmp_path) == {found.name}
    save(tmp_path / "last", 3)
    assert names(tmp_path) == {"last"}


def test_linked_checkpoints_are_independent(two: tuple[Path, Path]) -> None:
    first, _ = two
    best = first.with_name("best")
    (first / "someone's notes").mkdir()
    checkpoint.link(first, best)
    assert (first / "state.json").samefile(best / "state.json")
    assert names(best) == {*FILES}
    checkpoint.remove(first)
    assert names(first) == {"someone's notes"}  # it is not moved
    assert newest(first.parent)[0] != first
    assert holds(best, 1)


def test_without_hard_links_a_copy_is_made_and_flushed(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    flush = directory.sync
    monkeypatch.setattr(directory, "sync", lambda path: (flushed.append(path.name), flush(path)))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    best = two[0].with_name("best")
    checkpoint.link(two[0], best)
    assert not (two[0] / "state.json").samefile(best / "state.json")
    assert flushed == [*sorted(names(best), key=flushed.index), "best.unfinished", two[0].parent.name]
    assert holds(best, 1)


def test_leftovers_are_ignored_and_removed(two: tuple[Path, Path]) -> None:
    """Leftovers are incomplete directories, and links created by users."""
    parent = two[0].parent
    (parent / "step=3.unfinished").mkdir()
    (parent / "step=4.unfinished").mkdir()
    (parent / "step=4.unfinished" / "state.json").touch()
    outside = parent.parent / f"{parent.name}-outside"
    two[0].rename(outside)
    two[0].symlink_to(outside)
    assert newest(parent) == (two[1], [])
    checkpoint.remove(two[0])
    assert names(parent) == {"step=2", "step=3.unfinished", "step=4.unfinished"}
    assert holds(outside, 1)
    for step in (3, 4):
        save(parent / f"step={step}", step)
    (parent / "step=5.unfinished").symlink_to(outside)
    checkpoint.remove_unfinished(parent)
    assert names(parent) == {"step=2", "step=3", "step=4"}
    assert holds(outside, 1)


def test_user_files_are_never_deleted(two: tuple[Path, Path]) -> None:
    """Test directories of any name."""
    parent = two[0].parent
    for name in ("thesis.unfinished", "step=1.replaced", "step=2", "step=5"):
        (parent / name).mkdir(exist_ok=True)
        (parent / name / "thesis.tex").write_text("precious")
    (parent / "step=4.unfinished").write_text("precious")
    checkpoint.remove_unfinished(parent)
    save(parent / "step=2", 2)
    checkpoint.remove(parent / "step=2")
    for step in (4, 5):  # existing names
        with pytest.raises(UserError, match=r"File exists|is not a checkpoint"):
            save(parent / f"step={step}", step)
    assert (parent / "step=4.unfinished").read_text() == "precious"
    places = {path.parent.name for path in parent.rglob("thesis.tex")}
    assert len(places) == 4
    assert {name.partition(".")[0] for name in places} == {"thesis", "step=1", "step=2", "step=5"}
    assert holds(two[0], 1)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_file_systems_without_directory_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    for step in (1, 2):
        save(tmp_path / "last", step)
        assert holds(tmp_path / "last", step)
    checkpoint.link(tmp_path / "last", tmp_path / "best")
    assert names(tmp_path) == {"last", "best"}


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("a piece that is none")], ids=str
)
def test_failure_of_one_process_ends_the_save_on_all(tmp_path: Path, failing: int, error: Exception) -> None:
    save(tmp_path / "a", 1)

    class Fails(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise error

    pieces: Any = [[whole(f"w{rank}", torch.ones(3))] for rank in range(3)]
    pieces[failing] = Fails()
    with pytest.raises((UserError, ValueError), match=str(error).rpartition("] ")[2]) as caught:
        together(tmp_path / "b", state(2), pieces)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == {"a"}
    assert newest(tmp_path) == (tmp_path / "a", [])


@pytest.mark.parametrize("bad", [{"path": Path("x")}, {"global_step": None}], ids=["no JSON", "no step"])
def test_invalid_state_leaves_nothing(tmp_path: Path, bad: dict[str, Any]) -> None:
    found = {key: value for key, value in (state(1) | bad).items() if value is not None}
    with pytest.raises((TypeError, KeyError), match=r"not PosixPath|global_step"):
        checkpoint.save(tmp_path / "a", found, [])
    with pytest.raises((TypeError, KeyError, UserError), match=r"not PosixPath|global_step"):
        together(tmp_path / "a", found, [[], [], []])
    assert names(tmp_path) == set()


def in_a_process(work: Callable[[], object]) -> str:
    """Call a function in a subprocess; return the message of its UserError, or "" if there is none."""
    messages = FORK.SimpleQueue()

    def message() -> None:
        try:
            work()
            messages.put("")
        except UserError as error:
            messages.put(str(error))
        except BaseException as error:
            messages.put(f"failed: {error!r}")

    process = FORK.Process(target=message)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return str(messages.get())


def one_line(text: str, reason: str) -> None:
    assert f"could not be written ({reason}): free disk space or choose another exp_manager.exp_dir" in text
    assert "\n" not in text


def large(directory: Path) -> None:
    """Save 1 MB of tensors and 300 KB of state."""
    checkpoint.save(directory / "step=3", state(3) | {"text": "x" * 300_000}, [whole("w", torch.zeros(250_000))])


@pytest.mark.parametrize("limit", [300, 200_000, 1_000_010], ids=["at once", "tensors", "their end"])
def test_file_size_limit_is_one_line_and_leaves_nothing(two: tuple[Path, Path], limit: int) -> None:
    """A limit on the file size causes the same error as a full disk."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        large(two[0].parent)

    one_line(in_a_process(limited), "File too large")
    assert names(two[0].parent) == {"step=1", "step=2"}
    assert newest(two[0].parent) == (two[1], [])


NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18


def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    """Mount a file system in a namespace of this process, as root of a user namespace if needed."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    user = os.getuid()
    call(libc.unshare(NEW_MOUNTS | (NEW_USER if user else 0)))
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    call(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
    call(libc.mount(source.encode(), bytes(target), kind.encode(), flags, options.encode()))
    if flags & BIND:
        call(libc.mount(source.encode(), bytes(target), kind.encode(), flags | REMOUNT | READ_ONLY, None))


def on_a_mount(work: Callable[[], object], *arguments: Any) -> str:
    def mounted() -> None:
        try:
            mount(*arguments)
        except OSError as error:
            raise UserError(f"no mount: {error}") from error
        work()

    if (text := in_a_process(mounted)).startswith("no mount"):
        pytest.skip(text)
    return text


@pytest.mark.parametrize("room", [600, 1200, 1500], ids=["tensors", "state", "link"])
def test_full_file_system(tmp_path: Path, room: int) -> None:
    """Use a small tmpfs."""

    def work() -> None:
        for step in (1, 2):
            save(tmp_path / f"step={step}", step)
        try:
            large(tmp_path)
            os.link = lambda *_: os.rename("nowhere", "nowhere")
            checkpoint.link(tmp_path / "step=3", tmp_path / "best")
        finally:
            assert names(tmp_path) == {"step=1", "step=2"} | ({"step=3"} if room == 1500 else set())
            assert newest(tmp_path)[1] == []
            assert holds(tmp_path / "step=2", 2)

    one_line(on_a_mount(work, "tmpfs", tmp_path, "tmpfs", 0, f"size={room}k"), "No space left on device")


def test_read_only_directory(two: tuple[Path, Path]) -> None:
    parent = two[0].parent

    def work() -> None:
        with pytest.raises(UserError, match="Read-only"):
            checkpoint.link(two[0], parent / "best")
        with pytest.raises(UserError, match="Read-only"):
            save(two[0], 3)
        checkpoint.remove_unfinished(parent)
        large(parent)

    one_line(on_a_mount(work, str(parent), parent, "", BIND), "Read-only file system")
    assert names(parent) == {"step=1", "step=2"}
    assert holds(two[0], 1)


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        save(tmp_path / "file" / "a", 1)
    one_line(str(caught.value), "File exists")


def test_pieces_may_come_from_a_generator(tmp_path: Path) -> None:
    def each() -> Any:
        for name, values in weights(1).items():
            yield Piece(name, tuple(values.shape), (0,) * values.ndim, values)

    checkpoint.save(tmp_path / "a", state(1), each())
    assert holds(tmp_path / "a", 1)
