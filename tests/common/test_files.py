# SPDX-License-Identifier: Apache-2.0
"""Owned directories and durable writes."""

import errno
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.common.files import (
    MARKER,
    create_owned,
    identity_of,
    is_unmarked,
    refuse_replacing,
    remove_owned,
    replacing,
    sync,
    write_atomic,
)


def test_a_user_directory_is_neither_claimed_nor_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "features"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="was not created by bionemo"):
        create_owned(theirs, "features")
    with pytest.raises(UserError, match="was not created by bionemo"):
        remove_owned(theirs, "features", ".*")
    assert (theirs / "notes.txt").read_text() == "mine"


def test_an_owned_directory_keeps_its_identity_and_user_files(tmp_path: Path) -> None:
    ours = tmp_path / "features"
    create_owned(ours, "features", {"column": 3})
    assert identity_of(ours, "features") == {"column": 3}
    assert identity_of(ours, "parts") is None
    for text in ("{}", "[]", "3", '{"kind": "features"}', "{"):
        (ours / MARKER).write_text(text)
        assert identity_of(ours, "features") is None
    create_owned(tmp_path / "again", "features", {"column": 3})
    (tmp_path / "again" / MARKER).rename(ours / MARKER)
    (ours / "part-0.npy").write_text("x")
    (ours / "notes.txt").write_text("mine")
    remove_owned(ours, "features", r"part-\d+\.npy")
    assert [path.name for path in ours.iterdir()] == ["notes.txt"]
    (ours / "notes.txt").unlink()
    create_owned(ours, "features")
    remove_owned(ours, "features", r"part-\d+\.npy")
    assert not ours.exists()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    write_atomic(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert file.read_text() == "old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_directory_sync_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(os, "fsync", refuses)
    sync(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        sync(tmp_path / "file")


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    """An error names the target file, even if the system call names no file or the temporary file."""
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'") as caught, replacing(path) as new:
        new.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as caught, replacing(path):
        pass  # nothing was written
    assert caught.value.filename == str(path)
    with pytest.raises(KeyboardInterrupt), replacing(path) as new:
        new.write_text("half")
        raise KeyboardInterrupt
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    (tmp_path / "aside").mkdir()
    with replacing(path, tmp_path / "aside") as new:
        assert new.parent.name == "aside"
        new.write_text("new")
    assert path.read_text() == "new"
    assert not list((tmp_path / "aside").iterdir())


def test_a_directory_whose_creation_was_interrupted_is_claimed(tmp_path: Path) -> None:
    """A process was killed before it renamed the record; a directory with any other content is not claimed."""
    interrupted = tmp_path / "features"
    interrupted.mkdir()
    (interrupted / "..bionemo.json.0123456789ab.tmp").write_text('{"kind"')
    assert is_unmarked(interrupted)
    create_owned(interrupted, "features")
    assert identity_of(interrupted, "features") == {}
    assert [path.name for path in interrupted.iterdir()] == [MARKER]
    (interrupted / MARKER).rename(interrupted / "mine.json")
    assert not is_unmarked(interrupted)


def test_pipes_and_devices_are_written_and_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe: no process reads this pipe: start the reader first, or name a file"):
        write_atomic(pipe, "text")
    reader = subprocess.Popen(["cp", pipe, tmp_path / "received"])
    until = time.monotonic() + 60
    while True:
        try:
            write_atomic(pipe, "text\n" * 50_000)  # more than the pipe holds
            break
        except UserError:  # the reader has not started
            assert time.monotonic() < until
    assert reader.wait() == 0
    assert (tmp_path / "received").read_text() == "text\n" * 50_000
    assert stat.S_ISFIFO(pipe.stat().st_mode)

    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    for path in (null, Path("/dev/null")):
        write_atomic(path, "text")
        assert stat.S_ISCHR(path.stat().st_mode)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomic(Path("/dev/full"), "text")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the address of a socket is short
        server.bind("socket")
        with pytest.raises(UserError, match="socket is a socket: name a file"):
            write_atomic(tmp_path / "socket", "text")


def test_standard_output_in_a_file_is_appended_to(tmp_path: Path) -> None:
    code = "from pathlib import Path; from bionemo.common.files import write_atomic; print('a', flush=True); "
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", f"{code}write_atomic(Path('/dev/stdout'), 'b')"], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "a\nb"
    assert Path("/dev/stdout").is_symlink()


def test_only_files_of_this_project_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    refuse_replacing(path, b"<ours>", "--output")
    path.write_text("<ours> and more")
    refuse_replacing(path, b"<ours>", "--output")
    path.write_text(">protein\nMKV\n")
    with pytest.raises(UserError, match=r"html exists and was not written by this command: choose another --"):
        refuse_replacing(path, b"<ours>", "--output")
