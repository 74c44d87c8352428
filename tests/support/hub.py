# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers huggingface_hub like the Hugging Face hub, and places for its cache."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

NAME, COMMIT, OLDER = "lab/esm2", "a" * 40, "b" * 40


@dataclass
class Hub:
    """Repositories and what the server does with requests for them."""

    url: str = ""
    commits: dict[str, dict[str, Path]] = field(default_factory=dict)  # by name and commit
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER, "refs/pr/1": OLDER})
    status: int = 200  # of all answers, if it is another one
    headers: dict[str, str] = field(default_factory=dict)  # of these answers
    fails: str = "/"  # part of the paths that are answered so
    token: str = ""  # required for files
    delay: float = 0.0  # seconds before a file is sent
    requests: list[str] = field(default_factory=list)  # METHOD PATH
    tokens: set[str] = field(default_factory=set)  # values of the header Authorization

    def files(self) -> list[str]:
        """Return the names of the files that were sent."""
        return sorted(
            each.rpartition("/")[2] for each in self.requests if each.startswith("GET") and "/resolve/" in each
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def _send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":
            self._send(200, b"{}")
            return
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.status != 200 and hub.fails in path:
            self._send(hub.status, **hub.headers)
            return
        parts = path.removeprefix("/api/models").split("/")[1:]
        name, action, rest = "/".join(parts[:2]), parts[2], parts[3:]
        commits = hub.commits.get(name)
        if commits is None:
            self._send(404, X_Error_Code="RepoNotFound")
            return
        if action == "resolve":
            self._file(hub, commits, rest[0], "/".join(rest[1:]))
            return
        revision = "/".join(rest)
        commit = hub.refs.get(revision, revision)
        if commit not in commits:
            self._send(404, X_Error_Code="RevisionNotFound")
        elif action == "revision":
            self._send(200, json.dumps({"id": name, "sha": commit, "siblings": []}).encode())
        else:
            entries = [
                {"type": "file", "path": str(each.relative_to(commits[commit])), "size": each.stat().st_size,
                 "oid": _etag(each)}
                for each in sorted(commits[commit].rglob("*")) if each.is_file()
            ]  # fmt: skip
            self._send(200, json.dumps(entries).encode())

    def _file(self, hub: Hub, commits: dict[str, Path], commit: str, file: str) -> None:
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, X_Error_Code="GatedRepo")
            return
        found = commits[commit] / file
        if self.command == "GET":
            time.sleep(hub.delay)
        self._send(200, found.read_bytes(), ETag=f'"{_etag(found)}"', X_Repo_Commit=commit)

    do_GET = do_HEAD = _answer


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve(model: Path, older: Path | None = None, name: str = NAME) -> Iterator[Hub]:
    """Serve a directory as a model, and another one as its older commit."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", {name: {COMMIT: model, OLDER: older or model}})
    server.hub = hub  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def connect(monkeypatch: pytest.MonkeyPatch, home: Path, endpoint: str = "") -> Path:
    """Let huggingface_hub in this process use a server (none: it is offline) and a cache below `home`; return that.

    The library has read the environment when it was imported.
    """
    values = {
        "ENDPOINT": endpoint or "http://127.0.0.1:9", "HF_HUB_OFFLINE": not endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN_PATH": str(home / "token"),
        "AGENT_HARNESSES_PATH": str(home / "agents"),
    }  # fmt: skip
    for key, value in values.items():
        monkeypatch.setattr(huggingface_hub.constants, key, value)
    return home / "hub"


def environment(home: Path, endpoint: str) -> dict[str, str]:
    """Return the same settings for another process."""
    return {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "" if endpoint else "1"}
