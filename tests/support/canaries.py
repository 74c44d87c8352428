"""Canary secrets under secret names and in URLs, and a search for them that is independent of redaction."""

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import h5py

_number = count(1)
_OWN = re.compile(r"Qx\d\dzKp\d{6}Wv\d\d")


def _value() -> str:
    number = next(_number)
    return f"Qx{number:02}zKp{number * 7919:06}Wv{number:02}"


ENVIRONMENT = {
    name: _value()
    for name in [
        "WANDB_API_KEY", "WANDB_KEY", "GITHUB_PAT", "MYSQL_PWD", "HF_TOKEN", "NGC_API_KEY", "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN", "PGPASSWORD", "DB_PASS", "AZURE_STORAGE_SAS", "OPENAI_KEY", "SERVICE_AUTH", "MY_DSN",
        "SESSION_COOKIE", "SIGNING_PRIVATE_KEY", "SLACK_WEBHOOK_URL", "APP_CREDENTIALS", "RAY_AUTH_TOKEN",
        "KEY_PASSPHRASE",
    ]
}  # fmt: skip
NAMES = {
    name: _value()
    for name in [
        "api_key", "apikey", "wandbKey", "auth", "authorization", "private_key", "token", "access_token", "dsn",
        "passphrase",
        "pwd", "secret", "client-secret", "credential", "access_key", "sas", "signature", "cookie", "bearer",
        "session_key", "password", "authToken", "github_pat", "connection_string", "refreshToken",
    ]
}  # fmt: skip
URLS = {
    "download": f"https://user:{_value()}@host.example/data.gz",
    "port": f"https://user:{_value()}@host.example:8080/data.gz?page=2",
    "database": f"postgres://user:{_value()}@host.example:5432/db",
    "no user": f"redis://:{_value()}@host.example/0",
}
ALL = [*ENVIRONMENT.values(), *NAMES.values(), *URLS.values()]


def search(directory: Path, texts: list[str]) -> list[str]:
    """Return all places with a canary: in files and their names, archive members, and texts."""
    regex = re.compile("|".join(match[0] for text in ALL if (match := _OWN.search(text))).encode())
    hits = []
    places = [("output", text.encode()) for text in texts]
    for path in sorted(directory.rglob("*")):
        places.append((f"name of {path}", str(path.relative_to(directory)).encode()))
        if path.is_file() and not path.is_symlink():
            places += [(str(path.relative_to(directory)), content) for content in _contents(path)]
    for place, content in places:
        for variant in (content, re.sub(rb"[\s\\\0]+", b"", content)):
            if match := regex.search(variant):
                hits.append(f"{place}: {variant[max(match.start() - 60, 0) : match.end() + 20]!r}")
    return hits


def _contents(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    yield content
    if content[:2] == b"\x1f\x8b":
        yield gzip.decompress(content)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name.encode() + b"\n" + archive.read(name)
    if path.suffix in (".nemo", ".tar") or tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                data = archive.extractfile(member)
                inner = data.read() if data else b""
                yield member.name.encode() + b"\n" + inner
                if inner[:2] == b"PK":
                    with zipfile.ZipFile(io.BytesIO(inner)) as weights:
                        yield from (weights.read(name) for name in weights.namelist() if "/data/" not in name)
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            found: list[str] = []
            file.visititems(lambda name, item: found.append(f"{name} {dict(item.attrs)}"))
            yield f"{dict(file.attrs)} {found}".encode()
