# SPDX-License-Identifier: Apache-2.0
"""Any file operation may fail: the error is one line, the output is atomic, and the next start completes it."""

import builtins
import errno
import gc
import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bionemo.common.errors import UserError, describe
from bionemo.preparation import sequences, zinc
from bionemo.preparation.manifest import Manifest, verify
from tests.support.preparation import generated, inline, make_job, shards, write
from tests.support.preparation_zinc import job

CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "open", "write")
Prepare = Callable[[Path], object]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in this process, and skip fsync."""
    monkeypatch.setattr(sequences, "worker_pool", inline)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Faults:
    """Makes the n-th call on files of a directory fail; for a full disk, the next two calls as well."""

    def __init__(self, call: int, code: int) -> None:
        self.left, self.code, self.failed = call, code, False

    def check(self) -> None:
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.code == errno.ENOSPC and self.left > -4):
            self.failed = True
            raise OSError(self.code, os.strerror(self.code))

    @contextmanager
    def active(self) -> Iterator[None]:
        def failing(real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                self.check()
                return real(*args, **kwargs)

            return wrapper

        real_open = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wax"):
                self.check()
            return real_open(file, mode, *args, **kwargs)

        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in CALLS:
                monkeypatch.setattr(os, name, failing(getattr(os, name)))
            monkeypatch.setattr(io, "open", opened)
            monkeypatch.setattr(builtins, "open", opened)
            yield


def of_sequences(tmp_path: Path) -> Prepare:
    source = write(tmp_path, generated(30))
    return lambda out: sequences.prepare(make_job(source, out, num_preprocess_workers=0))


def of_molecules(tmp_path: Path) -> Prepare:
    source = tmp_path / "a.smi"
    source.write_text("".join(f"{'C' * (size + 1)} Z{size}\n" for size in range(30)))
    return lambda out: zinc.prepare(job(source, out, train_size=10, val_size=5, test_size=5))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("kind", [of_sequences, of_molecules])
def test_any_file_operation_may_fail(tmp_path: Path, code: int, kind: Callable[[Path], Prepare]) -> None:
    run = kind(tmp_path)
    run(tmp_path / "reference")
    expected, out, call = shards(tmp_path / "reference"), tmp_path / "out", 0
    while True:
        faults = Faults(call, code)
        with faults.active():
            try:
                run(out)
            except Exception as error:
                line = describe(error)
                assert line is not None, repr(error)
        if not faults.failed:
            break
        found = Manifest.read(out)
        assert found is None or verify(out) == []
        for lock in out.glob(".prepare.lock*"):  # as if the process had exited
            lock.unlink()
        run(out)
        assert shards(out) == expected and verify(out) == []
        assert {path.name for path in out.iterdir()} - {".prepare.lock"} == {"manifest.json", "test", "train", "val"}
        shutil.rmtree(out)
        call += 1
    assert call > 30


def test_directories_that_cannot_be_flushed(tmp_path: Path) -> None:
    run = of_sequences(tmp_path)

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with patch.object(os, "fsync", fsync):
        run(tmp_path / "out")
    assert verify(tmp_path / "out") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Create an empty file system of a size in kilobytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs permission to mount")

    def resized(kilobytes: int) -> Path:
        shutil.rmtree(disk / "o", ignore_errors=True)
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)
        return disk / "o" / "out"

    yield resized
    gc.collect()  # tracebacks keep files open
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("kind", [of_sequences, of_molecules])
def test_too_little_space_is_an_error_before_the_work_starts(
    tmp_path: Path, kind: Callable[[Path], Prepare], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = kind(tmp_path), tmp_path / "out"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(UserError, match=r"out: the preparation needs about 0.00 GB of disk space, and 0.00 GB are"):
        run(out)
    assert not out.exists()


@pytest.mark.parametrize("kind", [of_sequences, of_molecules])
def test_a_full_disk(tmp_path: Path, kind: Callable[[Path], Prepare], small_disk: Callable[[int], Path]) -> None:
    run, ended = kind(tmp_path), []
    for size in (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 400):
        out = small_disk(size)
        try:
            run(out)
            ended.append(True)
        except Exception as error:
            ended.append(False)
            assert re.search("no space left on the disk; no output was written|GB of disk space", str(describe(error)))
            assert not out.exists()
    assert not ended[0] and ended[-1]
