# SPDX-License-Identifier: Apache-2.0
import errno
import multiprocessing
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file

from bionemo.common.errors import UserError
from bionemo.data.shards import index, records
from bionemo.data.shards.index import FileState, RecordIndex, index_paths, load_index, read_index, write_index
from tests.support.sequence_files import open_sequences

SPEC = {"format": "test"}


def table(count=3):
    sizes = np.arange(count, dtype=np.int32)
    return RecordIndex(sizes.astype(np.int64), sizes + np.int64(4), sizes, sizes, 1, "hash")


def same(a, b):
    return all(map(np.array_equal, a.arrays().values(), b.arrays().values())) and a.stops == b.stops


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Return a data file; the user's cache is in another directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "data" / "x.csv"
    path.parent.mkdir()
    path.write_text("id,sequence\n1,MKV\n")
    return path


class Builds:
    """Counts how often an index is built."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return table()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_index_is_a_safetensors_file(data):
    location = data.with_name("idx")
    write_index(location, "state", table())
    assert same(read_index(location, "state"), table()) and read_index(location, "other state") is None
    assert load_file(location)["sequence"].tolist() == [4, 5, 6]


def test_flipped_bits_and_truncation_are_detected(data):
    location = data.with_name("idx")
    write_index(location, "state", table())
    whole = location.read_bytes()
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 1 << i % 8
        location.write_bytes(broken)
        found = read_index(location, "state")
        assert found is None or found.arrays().keys() == table().arrays().keys(), i
        if i >= len(whole) - 72:  # the arrays
            assert found is None, i
        location.write_bytes(whole[:i])
        assert read_index(location, "state") is None, i


def test_a_large_index_is_mapped(data):
    location = data.with_name("idx")
    write_index(location, "state", table(10_000))
    found = read_index(location, "state")
    assert same(found, table(10_000)) and found.file is not None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\x40\x42\x0f\0\0\0\0\0" + b"[" * 1_000_000]
)
def test_invalid_index_files_are_replaced(data, content):
    location, builds = index_paths(data, SPEC, None)[0], Builds()
    location.write_bytes(content)
    assert same(load_index(data, SPEC, builds, None), table())
    assert same(load_index(data, SPEC, builds, None), table()) and builds.count == 1


def change_text(path):
    state = path.stat()
    path.write_text(path.read_text().replace("MKV", "MKL"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        change_text,  # same size and modification time
        lambda path: path.write_text(path.read_text() + "2,A\n"),
        lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns + 1)),
    ],
)
def test_an_index_of_an_earlier_state_is_not_used(data, change):
    builds = Builds()
    load_index(data, SPEC, builds, None)
    load_index(data, SPEC, builds, None)
    assert builds.count == 1
    change(data)
    load_index(data, SPEC, builds, None)
    assert builds.count == 2


@pytest.mark.parametrize("location", [0, 1_000, (1 << 20) - 1])
def test_samples_cover_the_beginning_and_end_of_a_large_file(data, location):
    content = bytearray(np.random.default_rng(0).bytes(1 << 20))
    data.write_bytes(content)
    before = FileState.of(data)
    content[location] ^= 1
    data.write_bytes(content)
    os.utime(data, ns=(0, before.mtime_ns))
    after = FileState.of(data)
    assert (after.size, after.mtime_ns) == (before.size, before.mtime_ns) and after != before


def test_an_index_of_other_columns_another_version_or_another_file_is_not_used(data, monkeypatch):
    builds, other_spec = Builds(), {**SPEC, "columns": [1, 2]}
    location = index_paths(data, SPEC, None)[0]
    load_index(data, other_spec, builds, None)
    shutil.copy(index_paths(data, other_spec, None)[0], location)
    load_index(data, SPEC, builds, None)
    assert builds.count == 2
    monkeypatch.setattr(index, "_VERSION", index._VERSION + 1)
    load_index(data, SPEC, builds, None)
    assert builds.count == 3
    another = data.with_name("y.csv")
    another.write_text("id,sequence\n1,LLL\n")
    shutil.copy(location, index_paths(another, SPEC, None)[0])
    load_index(another, SPEC, builds, None)
    assert builds.count == 4


def test_the_index_is_next_to_the_data_or_in_index_mapping_dir(data, tmp_path, monkeypatch):
    load_index(data, SPEC, Builds(), None)
    (name,) = set(files(data.parent)) - {"x.csv"}
    assert name.startswith("x.csv.idx-")
    load_index(data, SPEC, Builds(), data.parent)
    assert set(files(data.parent)) == {"x.csv", name}
    load_index(data, SPEC, Builds(), tmp_path / "maps")
    assert files(tmp_path / "maps") == [str(data.relative_to("/").with_name(name))]
    monkeypatch.chdir(tmp_path / "data")
    load_index(Path("../data/x.csv"), SPEC, Builds(), tmp_path / "more")
    assert files(tmp_path / "more") == [f"data/{name}"]


@pytest.mark.parametrize("trouble", ["read-only", "full"])
def test_the_next_directory_is_used_if_one_cannot_be_written(data, tmp_path, monkeypatch, caplog, trouble):
    """/proc and a failing rename represent read-only and full disks, because root may write anywhere."""
    folder, builds = "/proc/none", Builds()
    if trouble == "full":
        folder, real = tmp_path / "full", os.replace

        def rename(old, new):
            if str(folder) in str(new):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(old, new)

        monkeypatch.setattr(os, "replace", rename)
    for _ in range(2):
        assert same(load_index(data, SPEC, builds, folder), table())
    assert builds.count == 1 and not caplog.messages
    assert [str(data.relative_to("/"))] == [name.split(".idx-")[0] for name in files(tmp_path / "cache/bionemo/index")]
    assert files(data.parent) == ["x.csv"] and (trouble != "full" or files(folder) == [])


def test_without_a_writable_directory_the_index_stays_in_memory(data, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    source = open_sequences("csv_mmap", [data], data_col=1, index_mapping_dir="/proc/none")
    assert source.text(0) == "MKV" and source.lengths.tolist() == [3]
    assert len(caplog.messages) == 1 and "kept in memory" in caplog.text
    assert files(data.parent) == ["x.csv"]


@pytest.mark.parametrize("error", [NotImplementedError("flock"), OSError(errno.ENOLCK, "No locks available")])
def test_file_systems_without_locks(data, monkeypatch, error):
    def acquire(*args, **kwargs):
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    builds = Builds()
    assert same(load_index(data, SPEC, builds, None), table()) and builds.count == 1
    assert len(files(data.parent)) == 2


def test_timeout_while_another_process_builds(data, monkeypatch):
    monkeypatch.setattr(index, "_LOCK_SECONDS", 0.1)
    location = index_paths(data, SPEC, None)[0]
    with FileLock(f"{location}.lock"):
        assert same(load_index(data, SPEC, Builds(), None), table())
    assert location.exists()


def build_slowly(log):
    with log.open("a") as file:
        file.write("built\n")
    time.sleep(0.2)
    return table()


def race(data, log, barrier):
    barrier.wait()
    found = load_index(data, SPEC, partial(build_slowly, log), None)
    with log.open("a") as file:
        file.write(f"right {same(found, table())}\n")


def test_four_processes_build_once(data, tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier, log = fork.Barrier(4), tmp_path / "log"
    processes = [fork.Process(target=race, args=(data, log, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(log.read_text().splitlines()) == ["built", *["right True"] * 4]
    assert len(files(data.parent)) == 2  # the data and its index: no locks, no temporary files


def test_a_file_that_changes_while_it_is_read_is_an_error(data):
    def build():
        data.write_text("id,sequence\n")
        return table()

    with pytest.raises(UserError, match="changes while it is read"):
        load_index(data, SPEC, build, None)
    assert files(data.parent) == ["x.csv"]


def test_a_progress_bar_is_shown_on_a_terminal(data, monkeypatch, capsys):
    monkeypatch.setattr(records, "_NOTED_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    open_sequences("csv_mmap", [data], data_col=1)
    assert "indexing" in capsys.readouterr().err


def test_many_small_files_are_indexed_with_one_open_file_each_and_not_flushed(data, monkeypatch, caplog):
    paths = [data.with_name(f"x{number:03}.csv") for number in range(200)]
    for path in paths:
        path.write_text(f"id,sequence\n1,MKV\n2,{path.stem}\n")
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    monkeypatch.setattr(records, "_NOTED_FILES", 200)
    before = len(os.listdir("/proc/self/fd"))
    source = open_sequences("csv_mmap", paths, data_col=1)
    assert [source.text(399), len(source), flushed] == ["x199", 400, []]
    assert len(os.listdir("/proc/self/fd")) - before <= 200
    assert "indexing 200 files (0 MiB), once" in caplog.messages
    caplog.clear()
    assert len(open_sequences("csv_mmap", paths, data_col=1)) == 400
    assert not caplog.messages


def test_an_error_in_the_data_leaves_no_files_behind(data):
    data.write_text("id,sequence\n1\n")
    with pytest.raises(UserError, match="1 column"):
        open_sequences("csv_mmap", [data], data_col=1)
    assert files(data.parent) == ["x.csv"]
