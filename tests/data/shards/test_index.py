# SPDX-License-Identifier: Apache-2.0
import errno
import json
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash
from filelock import FileLock
from safetensors.numpy import load_file

from bionemo.common.errors import UserError
from bionemo.data.shards import index, index_store, text_shards
from bionemo.data.shards.index import UNWRAPPED, ContentHash, FileState, RecordIndex, read_index, write_index
from bionemo.data.shards.index_store import index_paths, load_index
from bionemo.data.shards.source import _find_duplicates
from tests.support.sequence_files import open_sequences

SPEC = {"format": "test", "fields": ["id", "sequence"], "sequence": 1}


def table(width=(5, 3, 4)):
    part = [np.array(width, np.int64), np.array(width, np.int32)]
    return RecordIndex.join([RecordIndex([part[0], part[0] + 4], [part[1], part[1]], part[1], part[1], crlf=False)])


def same(a, b):
    return len(list(a.arrays())) == 6 and all(map(np.array_equal, a.arrays(), b.arrays())) and a.wrap == b.wrap


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
    write_index(location, SPEC, FileState.of(data), table())
    found = read_index(location, SPEC, FileState.of(data))
    assert same(found, table()) and found.wrap == UNWRAPPED
    assert load_file(location)["offset.1"].tolist() == [9, 7, 8]
    assert {name: array.dtype for name, array in load_file(location).items()} == {
        **dict.fromkeys(["offset.0", "offset.1"], np.int64),
        **dict.fromkeys(["length.0", "length.1", "letters", "width"], np.int32),
    }


def test_flipped_bits_and_truncation_are_detected(data):
    location, fingerprint = data.with_name("idx"), FileState.of(data)
    write_index(location, SPEC, fingerprint, table())
    whole = location.read_bytes()
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 1 << i % 8
        location.write_bytes(broken)
        assert read_index(location, SPEC, fingerprint) is None, i
        location.write_bytes(whole[:i])
        assert read_index(location, SPEC, fingerprint) is None, i
    location.write_bytes(whole + b"\0")
    assert read_index(location, SPEC, fingerprint) is None
    location.write_bytes(whole)
    assert same(read_index(location, SPEC, fingerprint), table())


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
    monkeypatch.setattr(index, "VERSION", index.VERSION + 1)
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


def test_timeout_while_another_process_builds(data, monkeypatch, caplog):
    monkeypatch.setattr(index_store, "_LOCK_SECONDS", 0.1)
    location = index_paths(data, SPEC, None)[0]
    with FileLock(f"{location}.lock"):
        assert same(load_index(data, SPEC, Builds(), None), table())
    assert "timeout while another process builds" in caplog.text


def build_slowly(log, message="built"):
    with log.open("a") as file:
        file.write(f"{message}\n")
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


def test_temporary_files_of_killed_processes_are_removed(data):
    location = index_paths(data, SPEC, None)[0]
    for age, name in ((1, "young"), (1_000_000, "old")):
        leftover = location.with_name(f".{location.name}.{name}.tmp")
        leftover.touch()
        os.utime(leftover, (time.time() - age,) * 2)
    load_index(data, SPEC, Builds(), None)
    assert [name.split(".")[-2] for name in files(data.parent) if name.endswith(".tmp")] == ["young"]


def test_a_file_that_changes_while_it_is_read_is_read_again(data):
    builds = Builds()

    def build(times):
        if builds.count < times:
            data.write_text(data.read_text() + "2,A\n")
        return builds()

    assert same(load_index(data, SPEC, partial(build, 2), None), table())
    assert builds.count == 3
    data.write_text("id,sequence\n")
    with pytest.raises(UserError, match="changes while it is read"):
        load_index(data, SPEC, partial(build, 99), None)


def test_a_progress_bar_is_shown_on_a_terminal(data, monkeypatch, capsys):
    monkeypatch.setattr(text_shards, "_PROGRESS_BAR_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    open_sequences("csv_mmap", [data], data_col=1)
    assert "indexing" in capsys.readouterr().err
    open_sequences("csv_mmap", [data], data_col=1)
    assert capsys.readouterr().err == ""


def test_many_small_files_are_indexed_with_one_open_file_each_and_not_flushed(data, monkeypatch, caplog):
    paths = [data.with_name(f"x{number:03}.csv") for number in range(200)]
    for path in paths:
        path.write_text(f"id,sequence\n1,MKV\n2,{path.stem}\n")
    flushed, listed = [], []
    monkeypatch.setattr(os, "fsync", flushed.append)
    monkeypatch.setattr(text_shards, "_PROGRESS_BAR_FILES", 200)
    text_shards._note_indexing.cache_clear()
    real = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: listed.append(pattern) or real(path, pattern))
    before = len(os.listdir("/proc/self/fd"))
    source = open_sequences("csv_mmap", paths, data_col=1)
    assert [source.text(399), len(source), flushed, len(listed)] == ["x199", 400, [], 1]
    assert len(os.listdir("/proc/self/fd")) - before <= 200
    assert "indexing 200 files (0 MiB), once" in caplog.messages
    caplog.clear()
    assert len(open_sequences("csv_mmap", paths, data_col=1)) == 400
    assert not caplog.messages


def test_duplicates_are_found_by_reading_each_file_once(tmp_path, monkeypatch):
    paths = [tmp_path / f"x{number:03}.csv" for number in range(100)]
    for number, path in enumerate(paths):
        path.write_text(f"id,sequence\n{number % 99:03},MKV\n")
    read, real = [], FileState.of
    monkeypatch.setattr(FileState, "of", classmethod(lambda _, path: read.append(path) or real(path)))
    assert _find_duplicates(paths) == [(paths[99], paths[0])]
    assert sorted(read) == paths


def test_an_error_in_the_data_leaves_no_files_behind(data):
    data.write_text("id,sequence\n1\n")
    with pytest.raises(UserError, match="1 column"):
        open_sequences("csv_mmap", [data], data_col=1)
    assert files(data.parent) == ["x.csv"]


def large(path):
    """Return a data file larger than its samples."""
    path.write_text("id,sequence\n" + "".join(f"{i},{'MKV' * 300}\n" for i in range(2_000)))
    return path


def test_a_file_replaced_between_the_samples_with_equal_size_and_time_is_indexed_again(data):
    large(data)
    before, fingerprint = data.stat(), FileState.of(data)
    assert len(open_sequences("csv_mmap", [data], data_col=1)) == 2_000
    content = bytearray(data.read_bytes())
    ends = [location for location in range(20_000, 60_000) if content[location] == ord("\n")]
    content[ends[0]] = ord("M")  # one record fewer, between the first and the second sample
    content[content.index(b",", ends[0])] = ord("M")
    data.write_bytes(content)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FileState.of(data) == fingerprint
    assert len(open_sequences("csv_mmap", [data], data_col=1)) == 1_999


def test_data_that_was_copied_with_its_index_is_hashed_once_and_not_indexed_again(data, tmp_path, monkeypatch):
    large(data)
    open_sequences("csv_mmap", [data], data_col=1)
    copy = tmp_path / "copy"
    time.sleep(0.02)
    shutil.copytree(data.parent, copy, copy_function=shutil.copy2)
    assert (copy / "x.csv").stat().st_ctime_ns != data.stat().st_ctime_ns
    hashed = []
    digest = ContentHash.digest
    monkeypatch.setattr(ContentHash, "digest", lambda self: hashed.append(1) or digest(self))
    monkeypatch.setattr("bionemo.data.shards.csv_shards.CsvSource._scan", None)  # indexing would fail
    for _ in range(2):
        assert len(open_sequences("csv_mmap", [copy / "x.csv"], data_col=1)) == 2_000
        assert len(open_sequences("csv_mmap", [data], data_col=1)) == 2_000
    assert len(hashed) == 1


def test_copies_may_share_an_index(data, tmp_path, monkeypatch):
    """This happens on nodes with local copies of the data and a shared index directory."""
    large(data)
    open_sequences("csv_mmap", [data], data_col=1, index_mapping_dir=tmp_path / "shared")
    times = []
    for _ in range(2):
        time.sleep(0.02)
        shutil.copy2(data, data.with_name("new"))
        os.replace(data.with_name("new"), data)
        times.append(data.stat().st_ctime_ns)
        monkeypatch.setattr("bionemo.data.shards.csv_shards.CsvSource._scan", None)
        open_sequences("csv_mmap", [data], data_col=1, index_mapping_dir=tmp_path / "shared")
    (location,) = (path for path in (tmp_path / "shared").rglob("*.idx-*"))
    spec = json.loads(json.loads(location.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")["__metadata__"]["spec"])
    found = read_index(location, spec, FileState.of(data))
    assert set(times) <= set(found.ctimes_ns) and len(found.ctimes_ns) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("offset", 1 << 40), ("offset", -1), ("length", 1000), ("length", -1), ("letters", 1000), ("letters", -1)],
)
def test_an_index_with_offsets_outside_the_data_is_not_used(data, name, value):
    location, forged, builds = index_paths(data, SPEC, None)[0], table(), Builds()
    array = getattr(forged, name)
    (array[0] if isinstance(array, list) else array)[1] = value
    write_index(location, SPEC, FileState.of(data), replace(forged, ctimes_ns=(data.stat().st_ctime_ns,)))
    assert read_index(location, SPEC, FileState.of(data)) is None
    assert same(load_index(data, SPEC, builds, None), table()) and builds.count == 1


@pytest.mark.parametrize("wrap", [-1, 1 << 40, "x", None])
def test_an_index_with_invalid_line_widths_is_not_used(data, wrap):
    location = data.with_name("idx")
    write_index(location, SPEC, FileState.of(data), replace(table(), wrap=wrap))
    assert read_index(location, SPEC, FileState.of(data)) is None


@pytest.mark.parametrize("block", [16, 1 << 20])
@pytest.mark.parametrize(
    ("impl", "content"),
    [
        ("csv_mmap", b"id,sequence\n1,MKV\n2,MA\n"),
        ("csv_mmap", b"\xef\xbb\xbfid,sequence\n1,MKV\n2,MA"),
        ("csv_mmap", b"id,sequence\r\n1,MKV\r\n\r\n"),
        ("fasta_fields_mmap", b"\n\n>a\nMKV\nMA\n>b\nM"),
    ],
)
def test_the_hash_of_an_index_is_that_of_the_whole_file(data, monkeypatch, impl, content, block):
    monkeypatch.setattr("bionemo.data.shards.blocks.BLOCK_BYTES", block)
    data.write_bytes(content)
    (shard,) = open_sequences(impl, [data], **({"data_col": 1} if impl == "csv_mmap" else {}))._shards
    assert shard.record_index.content == xxhash.xxh3_128(content).hexdigest()
