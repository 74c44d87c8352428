# SPDX-License-Identifier: Apache-2.0
"""Downloads from a local server with scripted failures."""

import errno
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from bionemo.common.errors import UserError
from bionemo.preparation import download
from bionemo.preparation.download import fetch
from bionemo.preparation.urls import find_source, join_source, redact_url

CONTENT = bytes(range(256)) * 40
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@dataclass
class Site:
    """Content of the server, its scripted answers, and the requests it received."""

    content: bytes = CONTENT
    tag: str | None = '"one"'
    ranges: bool = True
    length: bool = True  # the answer includes it
    span: int = len(CONTENT)  # maximum number of bytes in a response to a range request
    script: list[int | tuple[int, dict[str, str]] | bytes] = field(default_factory=list)
    """Number of bytes after which the connection is closed, an error, or a raw answer."""
    cut_always: int | None = None
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = dict(handler.headers)
        self.requests.append(headers)
        step = self.script.pop(0) if self.script else self.cut_always
        if isinstance(step, bytes):
            handler.wfile.write(step)
            return
        if isinstance(step, tuple):
            handler.send_response(step[0])
            for key, value in {**step[1], "Content-Length": "0"}.items():
                handler.send_header(key, value)
            handler.end_headers()
            return
        start = int(headers["Range"].removeprefix("bytes=").partition("-")[0]) if "Range" in headers else 0
        if not self.ranges or headers.get("If-Range", self.tag) != self.tag:
            start = 0
        if start >= len(self.content) > 0:
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(self.content)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        end = min(start + self.span, len(self.content)) if start else len(self.content)
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
        if self.length:
            handler.send_header("Content-Length", str(end - start))
        if self.tag:
            handler.send_header("ETag", self.tag)
        handler.end_headers()
        handler.wfile.write(self.content[start : end if step is None else start + step])


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "_BLOCK", 100)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}/dir/x.bin"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the delays between attempts, which are skipped."""
    delays: list[float] = []
    monkeypatch.setattr(download, "sleep", lambda delay: delays.extend([delay] * (delay > 0)))
    return delays


def starts(site: Site) -> list[str | None]:
    return [request.get("Range") for request in site.requests]


def leave(into: Path, url: str, content: bytes, version: str | None) -> None:
    (into / "x.bin.part").write_bytes(content)
    if version is not None:
        (into / ".x.bin.download.json").write_text(json.dumps({"url": url, "version": version}))


def whole(path: Path) -> None:
    assert path.name == "x.bin" and path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".x.bin.download.json", "x.bin"]


@pytest.mark.parametrize("checksum", [None, SHA256, f"MD5:{hashlib.md5(CONTENT).hexdigest().upper()}"])
def test_a_file_is_downloaded_once(
    tmp_path: Path, site: Site, checksum: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole(fetch(site.url, tmp_path / "new", checksum))
    assert "already" not in caplog.text
    whole(fetch(site.url, tmp_path / "new", checksum))
    assert "exists already" in caplog.text
    assert starts(site) == [None]


def test_an_empty_file_is_a_file(tmp_path: Path, site: Site) -> None:
    site.content = b""
    assert fetch(site.url, tmp_path).read_bytes() == b""


def test_an_interrupted_download_is_resumed(tmp_path: Path, site: Site, waits: list[float]) -> None:
    site.script = [1000, 2000]
    whole(fetch(site.url, tmp_path, SHA256))
    assert starts(site) == [None, "bytes=1000-", "bytes=3000-"]
    assert site.requests[1]["If-Range"] == '"one"'
    assert waits == [1, 1]  # each attempt downloads more of the file


def test_the_next_start_resumes(tmp_path: Path, site: Site, waits: list[float]) -> None:
    site.script = [700] + [(503, {})] * 4
    with pytest.raises(UserError, match=r"dir/x.bin cannot be downloaded \(the server answers 503 .*is resumed"):
        fetch(site.url, tmp_path)
    assert waits == [1, 4, 16, 64] and len(site.requests) == 5
    site.script.clear()
    whole(fetch(site.url, tmp_path))
    assert starts(site)[-1] == "bytes=700-"


def test_a_busy_server_may_request_a_delay(tmp_path: Path, site: Site, waits: list[float]) -> None:
    site.script = [(503, {"Retry-After": "7"}), (429, {"Retry-After": "100000"}), (500, {})]
    whole(fetch(site.url, tmp_path))
    assert waits == [7, 1, 600, 4, 16]


def test_a_server_may_send_fewer_bytes_than_requested(tmp_path: Path, site: Site) -> None:
    site.script, site.span = [1000], 5000
    whole(fetch(site.url, tmp_path))
    assert starts(site) == [None, "bytes=1000-", "bytes=6000-"]


@pytest.mark.parametrize(
    ("left", "version", "ranges", "requests"),
    [
        (CONTENT[:500], '"one"', True, "bytes=500-"),
        (b"x" * 500, '"zero"', True, "bytes=500-"),  # changed on the server: If-Range returns the whole file
        (b"x" * 500, '"one"', False, "bytes=500-"),  # ranges are ignored
        (b"x" * 500, None, True, None),  # a partial file of unknown origin
        (CONTENT, '"one"', True, f"bytes={len(CONTENT)}-"),  # complete: status 416
        (CONTENT + b"x", '"one"', True, f"bytes={len(CONTENT) + 1}-"),  # too long: status 416, then restart
    ],
)
def test_partial_files_are_used_if_possible(
    tmp_path: Path, site: Site, left: bytes, version: str | None, ranges: bool, requests: str | None
) -> None:
    site.ranges = ranges
    leave(tmp_path, site.url, left, version)
    whole(fetch(site.url, tmp_path))
    assert starts(site) == [requests] + [None] * (len(left) > len(CONTENT))


def test_a_file_that_changes_is_downloaded_from_the_start(tmp_path: Path, site: Site) -> None:
    site.script = [1000]
    site.content, site.tag = b"old" * 1000, '"old"'

    def change(_: float) -> None:
        site.content, site.tag = CONTENT, '"one"'

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "sleep", change)
        whole(fetch(site.url, tmp_path))


def test_weak_tags_are_not_trusted(tmp_path: Path, site: Site) -> None:
    site.tag, site.script = 'W/"one"', [1000]
    whole(fetch(site.url, tmp_path))
    assert starts(site) == [None, None]


@pytest.mark.parametrize("ranges", [True, False])
def test_download_stops_when_attempts_receive_nothing_new(tmp_path: Path, site: Site, ranges: bool) -> None:
    site.ranges, site.cut_always = ranges, 0 if ranges else 300
    with pytest.raises(UserError, match="cannot be downloaded") as error:
        fetch(site.url, tmp_path)
    assert len(site.requests) == 5 and "\n" not in str(error.value)
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize("status", [404, 403, 401, 410])
def test_refusals_are_not_retried(tmp_path: Path, site: Site, status: int, waits: list[float]) -> None:
    site.script = [(status, {})]
    with pytest.raises(UserError, match=f"dir/x.bin was refused with {status} .*: check"):
        fetch(site.url, tmp_path)
    assert len(site.requests) == 1 and not waits and not list(tmp_path.iterdir())


def test_a_wrong_download_is_removed(tmp_path: Path, site: Site) -> None:
    wrong = "md5:" + "0" * 32
    with pytest.raises(UserError, match=f"{hashlib.md5(CONTENT).hexdigest()}, expected {'0' * 32}: .*removed"):
        fetch(site.url, tmp_path, wrong)
    assert not list(tmp_path.iterdir())
    site.content = b"of another version"
    fetch(site.url, tmp_path)
    site.content = CONTENT
    whole(fetch(site.url, tmp_path, SHA256))
    (tmp_path / "x.bin").write_text("mine")
    (tmp_path / ".x.bin.download.json").unlink()
    with pytest.raises(UserError, match=r"x\.bin has sha256 \w+, .* was not downloaded by bionemo: move it away"):
        fetch(site.url, tmp_path, SHA256)
    assert (tmp_path / "x.bin").read_text() == "mine"


def test_a_download_of_unknown_length_is_refused(tmp_path: Path, site: Site) -> None:
    site.length = False
    with pytest.raises(UserError, match=r"x\.bin: the server does not send the length .*: set a checksum"):
        fetch(site.url, tmp_path)
    assert not list(tmp_path.iterdir())
    whole(fetch(site.url, tmp_path, SHA256))
    zipped = fetch(site.url.replace("x.bin", "y.gz"), tmp_path)  # truncated gzip data is an error when it is read
    assert zipped.read_bytes() == CONTENT


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(CONTENT), CONTENT)


def test_chunked_encoding_must_end(tmp_path: Path, site: Site) -> None:
    site.script = [CHUNKED, CHUNKED + b"5\r\nab", CHUNKED + b"0\r\n\r\n"]
    whole(fetch(site.url, tmp_path))
    assert len(site.requests) == 3


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (b"/dir/x.bin", "or redirects to an invalid one"),
        (b"http://[::1", "is not a valid URL, or redirects to an invalid one"),
        (b"http://" + b"a" * 70 + b".example/", "is not a valid URL, or redirects to an invalid one"),
        (b"http://host:99999999/", "is not a valid URL, or redirects to an invalid one"),
        (b"\xff\xfe", "is not a valid URL, or redirects to an invalid one"),
        (b"file:///etc/passwd", "is not a valid URL, or redirects to an invalid one"),
    ],
)
def test_invalid_redirects(tmp_path: Path, site: Site, location: bytes, message: str, waits: list[float]) -> None:
    site.script = [
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close\r\nLocation: " + location + b"\r\n\r\n"
    ] * 40
    with pytest.raises(UserError, match=message) as error:
        fetch(site.url, tmp_path)
    assert "\n" not in str(error.value) and not waits and not list(tmp_path.iterdir())


def test_a_download_of_other_origin_or_truncated_later(tmp_path: Path, site: Site) -> None:
    path = fetch(site.url, tmp_path)
    with pytest.raises(
        UserError, match=r"x\.bin was downloaded from .*/dir/x\.bin, not .*/other/x\.bin: move it away"
    ):
        fetch(site.url.replace("/dir/", "/other/"), tmp_path)
    os.truncate(path, 100)
    whole(fetch(site.url, tmp_path))


def test_an_unreachable_server(tmp_path: Path, site: Site, waits: list[float]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match=r"x\.bin cannot be downloaded \(Connection refused\)") as error:
            fetch(f"http://me:secret@127.0.0.1:{unused.getsockname()[1]}/x.bin?key=secret", tmp_path)
    assert "secret" not in str(error.value) and waits == [1, 4, 16, 64]


def test_credentials_are_sent_to_the_server_only(tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bionemo")
    site.script = [500, (503, {})]
    whole(fetch(site.url.replace("//", "//me:secret@") + "?key=secret", tmp_path))
    assert site.requests[0]["Authorization"].startswith("Basic ")
    assert "secret" not in caplog.text and "downloading http://127.0.0.1" in caplog.text


def test_a_full_disk_keeps_the_received_bytes(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(UserError, match=r"x\.bin: no space left on the disk; free disk space and start again"):
        fetch(site.url, tmp_path)
    assert len(site.requests) == 1 and (tmp_path / "x.bin.part").exists()
    monkeypatch.undo()
    whole(fetch(site.url, tmp_path))


def test_local_files_are_neither_moved_nor_changed(tmp_path: Path) -> None:
    path = tmp_path / "a b.txt"
    path.write_bytes(CONTENT)
    for source in (str(path), path.as_uri()):
        assert fetch(source, tmp_path / "never", SHA256) == path
    with pytest.raises(UserError, match=rf"{path} has md5 \w+, expected 0+: "):
        fetch(str(path), tmp_path, "md5:" + "0" * 32)
    assert path.read_bytes() == CONTENT and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("source", "checksum", "message"),
    [
        ("{tmp}/none.txt", None, "none.txt does not exist"),
        ("{tmp}", SHA256, "cannot be written or read .Is a directory"),
        ("{tmp}", "md5:12", "checksum=md5:12 is not valid"),
        ("http://127.0.0.1:1/x", "sha1:" + "0" * 40, "checksum=sha1:0+ is not valid"),
        ("http://127.0.0.1:1/x", "sha256:" + "g" * 64, "is not valid: give md5:"),
        ("http://127.0.0.1:1/dir/", None, "contains no file name"),
        ("http://127.0.0.1:1/%2e%2e", None, "contains no file name"),
        ("http://[::1/x", None, "is not a valid URL"),
        ("http://127.0.0.1:port/x", None, "is not a valid URL"),
        ("s3://me:secret@bucket/x?key=secret", None, "s3://bucket/x: s3:// is not supported"),
    ],
)
def test_mistakes(tmp_path: Path, source: str, checksum: str | None, message: str, waits: list[float]) -> None:
    with pytest.raises(UserError, match=message) as error:
        fetch(source.replace("{tmp}", str(tmp_path)), tmp_path / "into", checksum)
    assert not waits and "\n" not in str(error.value) and "secret" not in str(error.value)


def test_locating_a_file_in_directories_and_below_urls(tmp_path: Path, site: Site) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "zipped.gz").write_text("")
    for base, name, file in (str(tmp_path), "plain", "plain"), (tmp_path.as_uri(), "zipped", "zipped.gz"):
        assert fetch(find_source(base, name), tmp_path) == tmp_path / file
    with pytest.raises(UserError, match=r"none does not exist: check the source"):
        fetch(find_source(str(tmp_path), "none"), tmp_path)
    source = find_source(f"{site.url.removesuffix('/x.bin')}?key=secret", "x.bin")
    whole(fetch(source, tmp_path / "into"))
    assert redact_url(source) == site.url


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (redact_url, "https://me:secret@host:80/a@b/c?key=1#x", "https://host:80/a@b/c"),
        (redact_url, "HTTP://host/a", "HTTP://host/a"),
        (redact_url, "/a/b?c@d", "/a/b?c@d"),
        (lambda base: join_source(base, "b"), "http://me@host/a/?key=1", "http://me@host/a/b?key=1"),
        (lambda base: join_source(base, "b"), "http://host", "http://host/b"),
        (lambda base: join_source(base, "b"), "a/", "a/b"),
    ],
)
def test_urls(function: Callable[[str], str], given: str, expected: str) -> None:
    assert function(given) == expected
