# SPDX-License-Identifier: Apache-2.0
"""Data sets in object stores, read from an S3 server on this machine, with dummy credentials."""

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fsspec.registry import _registry

from bionemo.common.errors import HostError, UserError
from bionemo.config.compose import load
from bionemo.config.schema import ProteinDataConfig
from bionemo.data import store
from bionemo.data.files import check_files_exist, cluster_members, split_files
from bionemo.data.proteins.splits import open_split
from bionemo.data.store import fetch, local_path
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES

boto3 = pytest.importorskip("boto3")
s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

ROOT = "s3://bucket/sets/mine"
CSV = b"record_id,record_name,sequence_length,sequence\n"
FETCH = """
import sys
from bionemo.data.store import fetch
fetch(sys.argv[1], "train", lambda files: ["train/x000.csv", "train/x001.csv"])
"""


def shard(*sequences: str) -> bytes:
    return CSV + b"".join(f"{i},n{i},{len(text)},{text}\n".encode() for i, text in enumerate(sequences))


FILES = {f"{name}/x00{i}.csv": shard("MKV" * (i + 1), name.upper()) for name in ("train", "val") for i in range(2)}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret-but-hidden")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(store.LIMIT, raising=False)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    end_run()
    for item in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=item["Key"])
    client.delete_bucket(Bucket="bucket")


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the objects that were read since its last call."""
    caplog.set_level(logging.INFO, "werkzeug")

    def take() -> list[str]:
        found = re.findall(r"GET /bucket/sets/mine/(\S+) HTTP", caplog.text)
        caplog.clear()
        return found

    return take


def end_run() -> None:
    """Release the locks of this process, as its end does."""
    for lock in store._fetched.values():
        lock.close()
    store._fetched.clear()


def upload(s3: Any, files: dict[str, bytes], manifest: bool = True, prefix: str = "sets/mine") -> None:
    for name, content in files.items():
        s3.put_object(Bucket="bucket", Key=f"{prefix}/{name}", Body=content)
    if manifest:
        s3.put_object(Bucket="bucket", Key=f"{prefix}/manifest.json", Body=describe(files))


def describe(files: dict[str, bytes]) -> bytes:
    entries = {name: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in files.items()}
    return json.dumps({"format": "bionemo-prepared", "version": 1, "files": entries}).encode()


def fetch_all(root: str = ROOT, split: str = "train") -> dict[str, bytes]:
    """Fetch a split as a new process does; return the files in the cache."""
    end_run()
    fetch(root, split, lambda files: [name for name in sorted(files) if name.startswith(f"{split}/")])
    return cached(root)


def cached(root: str = ROOT) -> dict[str, bytes]:
    directory = local_path(root, root)
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix in (".csv", ".mmap", ".tmp")]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def of(split: str) -> dict[str, bytes]:
    return {name: content for name, content in FILES.items() if name.startswith(split)}


@pytest.mark.parametrize("manifest", [True, False])
def test_a_split_is_fetched_once(s3: Any, requests: Callable[[], list[str]], manifest: bool) -> None:
    upload(s3, FILES, manifest)
    assert fetch_all() == of("train")
    assert set(of("train")) <= set(requests())
    assert fetch_all() == of("train")
    assert set(requests()) <= {"manifest.json"}
    assert fetch_all(split="val") == FILES
    assert set(requests()) - {"manifest.json"} == set(of("val"))
    fetch(ROOT, "val", lambda files: pytest.fail("the second call in a process does nothing"))
    assert requests() == []


@pytest.mark.parametrize("manifest", [True, False])
def test_changed_objects_are_fetched_again(s3: Any, requests: Callable[[], list[str]], manifest: bool) -> None:
    upload(s3, FILES, manifest)
    fetch_all()
    requests()
    changed = FILES | {"train/x001.csv": FILES["train/x001.csv"].replace(b"K", b"R")}  # of the same size
    upload(s3, changed, manifest)
    assert fetch_all()["train/x001.csv"] == changed["train/x001.csv"] != FILES["train/x001.csv"]
    assert set(requests()) - {"manifest.json"} == {"train/x001.csv"}


def test_a_file_missing_in_the_cache_is_fetched_again(s3: Any) -> None:
    upload(s3, FILES)
    fetch_all()
    (local_path(ROOT, ROOT) / "train" / "x000.csv").unlink()
    assert fetch_all() == of("train")


def test_several_blocks(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK_BYTES", 10_000)
    content = {"train/x000.csv": np.random.default_rng(0).bytes(123_456), "train/x001.csv": b""}
    upload(s3, content)
    assert fetch_all() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            FILES["train/x001.csv"][:-5],
            r"train/x001\.csv has 6\d bytes and the tag \w+, but 7\d bytes and \w+ are stated",
        ),
        (FILES["train/x001.csv"].replace(b"K", b"R"), r"train/x001\.csv has (7\d) bytes .* but \1 bytes and"),
        (None, r"s3://bucket/sets/mine cannot be read \(.*(train/x001|does not exist|not found).*\)"),
    ],
)
def test_objects_unlike_the_manifest(s3: Any, content: bytes | None, message: str) -> None:
    upload(s3, FILES)
    if content is None:
        s3.delete_object(Bucket="bucket", Key="sets/mine/train/x001.csv")
    else:
        upload(s3, {"train/x001.csv": content}, manifest=False)
    with pytest.raises(UserError, match=message) as error:
        fetch_all()
    assert "\n" not in str(error.value)
    assert set(cached()) <= {"train/x000.csv"}
    upload(s3, FILES)
    assert fetch_all() == of("train")


def test_a_damaged_manifest(s3: Any) -> None:
    for text in (b"{", b'{"files": {"a": 3}}'):
        s3.put_object(Bucket="bucket", Key="sets/mine/manifest.json", Body=text)
        with pytest.raises(UserError, match=r"s3://bucket/sets/mine/manifest\.json is not a valid manifest"):
            fetch_all()


@pytest.mark.parametrize(
    ("root", "variables", "message"),
    [
        ("s3://none/x", {}, r"s3://none/x cannot be read \(The specified bucket does not exist\)"),
        (ROOT, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, r"cannot be read \(Could not connect.*AWS_ENDPOINT_URL"),
        (
            ROOT,
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
            r"\(Unable to locate credentials\): .* credentials in AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
        ),
        ("foo://bucket/x", {}, r"foo://bucket/x cannot be read \(Protocol not known: foo\)"),
        ("http://127.0.0.1:9/x", {}, r"http://127\.0\.0\.1:9/x cannot be read \(Cannot connect to host"),
    ],
)
def test_stores_that_cannot_be_read(
    s3: Any, monkeypatch: pytest.MonkeyPatch, root: str, variables: dict[str, str | None], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(HostError, match=message) as error:
        fetch_all(root)
    assert "\n" not in str(error.value) and "not-a-secret-but-hidden" not in str(error.value)


def test_refused_credentials(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(s3fs.S3FileSystem, "cat_file", refuse)
    with pytest.raises(HostError, match=r"mine cannot be read \(Access Denied\): .*AWS_ACCESS_KEY_ID") as error:
        fetch_all()
    assert "not-a-secret-but-hidden" not in str(error.value)


def test_a_missing_package_is_named(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"s3:// requires the extra 'store' of bionemo"):
        fetch_all()


def test_an_interrupted_fetch(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(s3, FILES)
    monkeypatch.setattr(store, "_BLOCK_BYTES", 16)
    read, calls = s3fs.core.S3File.read, []

    def interrupted(self: Any, length: int = -1) -> bytes:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(self, length)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(s3fs.core.S3File, "read", interrupted)
        fetch_all()
    assert cached() == {}
    (local_path(ROOT, ROOT) / "train").mkdir(parents=True, exist_ok=True)
    (local_path(ROOT, ROOT) / "train" / ".x000.csv.0123456789ab.tmp").touch()  # after SIGKILL
    assert fetch_all() == of("train")


def test_a_full_disk(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(s3, FILES)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(
        HostError, match=r"mine \(train\) needs 0\.00 GB, and 0\.00 GB are available in .*free disk space"
    ):
        fetch_all()
    assert cached() == {}


def test_data_sets_that_are_not_used_are_evicted(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 300_000
    roots = [f"s3://bucket/{name}" for name in "abcd"]
    for number, root in enumerate(roots):
        upload(s3, {"train/x000.csv": bytes([number]) * size}, prefix=root[-1])
        if number < 3:
            fetch_all(root)
            os.utime(local_path(root, root).with_suffix(".used"), (number, number))
    monkeypatch.setenv(store.LIMIT, "0.00095")
    end_run()
    with store._lock(local_path(roots[0], roots[0]).with_suffix(".used"), store.fcntl.LOCK_SH):  # the oldest is in use
        fetch_all(roots[3])
    assert [len(cached(root)) for root in roots] == [1, 0, 1, 1]
    assert fetch_all(roots[1]) == {"train/x000.csv": b"\1" * size}
    assert [len(cached(root)) for root in roots] == [0, 1, 1, 1]
    monkeypatch.setenv(store.LIMIT, "0.0001")
    with pytest.raises(HostError, match=rf"raise {store.LIMIT}"):
        fetch_all(roots[0])
    monkeypatch.setenv(store.LIMIT, "much")
    with pytest.raises(HostError, match=rf"{store.LIMIT}=much is not a number of GB"):
        fetch_all(roots[0])


def test_two_processes_fetch_once(s3: Any, requests: Callable[[], list[str]]) -> None:
    upload(s3, FILES)
    requests()
    command = [sys.executable, "-c", FETCH, ROOT]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert cached() == of("train")
    assert sum("2 files" in output for output in outputs) == 1
    assert sorted(requests()) == ["manifest.json", "manifest.json", *of("train")]


@cache
def composed(name: str) -> ProteinDataConfig:
    return load(
        name, [f"model.data.dataset_path={ROOT}"], EXAMPLES / ("esm2nv" if "2" in name else "esm1nv") / "conf"
    ).model.data


def data_config(train: str, val: str = "x000", name: str = "pretrain_small") -> ProteinDataConfig:
    data = deepcopy(composed(name))
    data.train.range, data.val.range = train, val
    return data


def test_files_of_the_configuration(s3: Any, requests: Callable[[], list[str]]) -> None:
    upload(s3, FILES)
    data = data_config("x[000..001]", "x001")
    check_files_exist(data_config("x000", "x001"))
    assert set(cached()) == {"train/x000.csv", "val/x001.csv"}
    check_files_exist(data)  # another range, in the same process
    assert set(cached()) == {"train/x000.csv", "train/x001.csv", "val/x001.csv"}
    assert [path.read_bytes() for path in split_files(data, "train")] == list(of("train").values())
    assert [path.name for path in split_files(data, "val")] == ["x001.csv"]
    found = open_split(data, "train", 62, load_tokenizer("esm1nv"))
    assert [found.source.text(i) for i in range(4)] == ["MKV", "TRAIN", "MKVMKV", "TRAIN"]


def test_missing_objects_are_named(s3: Any) -> None:
    upload(s3, FILES, manifest=False)
    with pytest.raises(
        UserError, match=r"1 of 3 data files not found in s3.*: train/x002\.csv; it contains train/x000\.csv"
    ):
        check_files_exist(data_config("x[000..002]"))
    empty = data_config("x[000..049]")
    empty.dataset_path = empty.train.dataset_path = "s3://bucket/none"
    with pytest.raises(UserError, match=r"50 of 50 data files not found in s3://bucket/none: .*contains no files"):
        check_files_exist(empty)
    assert cached() == {}


def test_the_training_data_is_not_fetched_for_a_test(s3: Any) -> None:
    upload(s3, FILES)
    data = data_config("x[000..049]", "x[000..001]")
    assert not open_split(data, "val", 62, load_tokenizer("esm1nv")).notes
    assert set(cached()) == set(of("val"))


@pytest.mark.parametrize("sampled", [None, False])
def test_clusters(s3: Any, sampled: bool | None) -> None:
    counts, starts = np.array([1, 2], np.uint64), np.array([0, 1], np.uint64)
    files = {
        "uf50/train/x000.csv": shard("MKV", "MKL"), "uf50/val/x000.csv": shard("AAA"),
        "uf50/train/counts.mmap": counts.tobytes(), "uf50/train/starts.mmap": starts.tobytes(),
        "uf90/uf90_csvs/x000.csv": shard("MKV", "MKL", "MRL"),
    }  # fmt: skip
    upload(s3, files)
    data = data_config("x000", name="pretrain_esm2_8M")
    assert data.train.uf90 is not None
    data.train.uf90.dataset.uf90_csvs, data.train.sample_from_map = "x000", sampled
    split = open_split(data, "train", 62, load_tokenizer("esm2nv"))
    if sampled is None:
        assert split.clusters is not None and len(split.source) == 3
        assert set(cached()) - {"uf50/val/x000.csv"} >= {name for name in files if "val" not in name}
    else:
        assert cluster_members(data) is None and len(split.source) == 2
    assert open_split(data, "val", 62, load_tokenizer("esm2nv")).source.text(0) == "AAA"


def test_plain_shards_of_esm2(s3: Any) -> None:
    upload(s3, FILES)
    data = data_config("x000", name="pretrain_esm2_8M")
    check_files_exist(data)
    assert set(cached()) == {"train/x000.csv", "val/x000.csv"}
    assert open_split(data, "train", 62, load_tokenizer("esm2nv")).source.text(0) == "MKV"


class _Files(BaseHTTPRequestHandler):
    """Answers HEAD, GET and ranges from a dict; `cut` bytes are missing at the end of every body."""

    def __init__(self, files: dict[str, bytes], cut: int, *arguments: Any) -> None:
        self.files, self.cut = files, cut
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(found[1]), min(int(found[2]) + 1, len(content))) if found else (0, len(content))
        self.send_response(206 if found else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        if found:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            cut = self.cut if "manifest" not in self.path else 0
            self.wfile.write(content[begin : end - cut])

    do_HEAD = do_GET


@pytest.mark.parametrize(("files", "cut", "message"), [
    ({**FILES, "manifest.json": describe(FILES)}, 0, None),
    ({**FILES, "manifest.json": describe(FILES)}, 5, r"set cannot be read \(.*(payload|Payload|not enough|length)"),
    (FILES, 0, r"http://127\.0\.0\.1:\d+/set has no manifest\.json, which names its files"),
])  # fmt: skip
def test_a_web_server(s3: Any, files: dict[str, bytes], cut: int, message: str | None) -> None:
    handler = partial(_Files, {f"/set/{name}": content for name, content in files.items()}, cut)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}/set"
        if message is None:
            assert fetch_all(root) == of("train")
        else:
            with pytest.raises(UserError, match=message):
                fetch_all(root)
            assert cached(root) == {}
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "root", "end"),
    [("s3://b/x", "s3://b/x", ""), ("s3://b/x/", "s3://b/x", ""), ("s3://b/x/uf50", "s3://b/x", "uf50"),
     ("s3://b/x/uf50/a", "s3://b/x/", "uf50/a")],
)  # fmt: skip
def test_directories_of_a_data_set(path: str, root: str, end: str) -> None:
    assert local_path(path, root) == local_path("s3://b/x", None) / end


def test_different_data_sets_have_different_directories() -> None:
    urls = ["s3://b/x", "s3://b/x-y", "s3://b/x/y", "gs://b/x", "s3://b-x/y"]
    assert len({local_path(url, None) for url in urls}) == len(urls)
    assert local_path("s3://b/xy", "s3://b/x") == local_path("s3://b/xy", None)
    assert local_path("/data/x", "s3://b/x") == Path("/data/x")
