"""Canary secrets with their names, formats and places, and a search for them that is independent of redaction."""

import base64
import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import quote

import h5py

_number = count(1)


def _value(form: str = "{}") -> str:
    """Return a unique value; the search looks for its inner part, whatever surrounds it."""
    number = next(_number)
    return form.format(f"Qx{number:02}zKp{number * 7919:06}Wv{number:02}")


ENVIRONMENT = {
    name: _value(form)
    for name, form in {
        "WANDB_API_KEY": "{}", "WANDB_KEY": "{}", "GITHUB_PAT": "{}", "MYSQL_PWD": "{}", "HF_TOKEN": "{}",
        "NGC_API_KEY": "{}", "AWS_SECRET_ACCESS_KEY": "a/b+{}=", "AWS_SESSION_TOKEN": "{}", "PGPASSWORD": "it's {}!",
        "DB_PASS": 'a"b\\{}', "AZURE_STORAGE_SAS": "sv=1&x={}", "OPENAI_KEY": "{}", "SERVICE_AUTH": "{}",
        "MY_DSN": "{}",
        "SESSION_COOKIE": "{}", "SIGNING_PRIVATE_KEY": "line one {}\nline two", "SLACK_WEBHOOK_URL": "{}",
        "APP_CREDENTIALS": "{{'k': '{}'}}", "RAY_AUTH_TOKEN": "ä {}", "KEY_PASSPHRASE": "correct horse {} staple",
    }.items()
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
_LONG = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"
FORMATS = {
    kind: prefix + f"{next(_number):02}" + suffix
    for kind, (prefix, suffix) in {
        "hugging face": ("hf" + "_", _LONG), "github": ("gh" + "p_", _LONG),
        "fine-grained": ("github" + "_pat_", _LONG),
        "gitlab": ("gl" + "pat-", _LONG[:20]), "openai": ("s" + "k-", _LONG), "aws": ("AK" + "IA", "ABCDEFGH234567"),
        "slack": ("xo" + "xb-", "123456789012-abcdefABCDEF"), "ngc": ("nv" + "api-", _LONG),
        "jwt": ("ey" + "J", f"hbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{_LONG}.sig-{_LONG[:9]}"),
        "pem": ("-----BEGIN PRIVATE" + " KEY-----\nMIIE", f"{_LONG}\n{_LONG[::-1]}\n-----END PRIVATE" + " KEY-----\n"),
        "google": ("AI" + "za", _LONG),
    }.items()
}  # fmt: skip
URLS = {
    "password": "https://user:{}@host.example/data.gz",
    "password with a slash": "https://user:p@{}/x@host.example/data.gz",
    "user alone": "https://{}@host.example/data.gz",
    "signed by AWS": "https://host.example/data.gz?X-Amz-Expires=60&X-Amz-Signature={}",
    "signed by Google": "https://host.example/data.gz?X-Goog-Signature={}&X-Goog-Expires=60",
    "shared access": "https://host.example/data.gz?sv=2022&sig={}",
    "token": "https://host.example/data.gz?access_token={}",
    "key": "https://host.example/data.gz?key={}#top",
    "within another": "https://host.example/?next=https%3A%2F%2Fuser%3A{}%40other.example",
    "database": "postgres://user:{}@host.example:5432/db",
}
URLS = {kind: url.format(_value()) for kind, url in URLS.items()}
TEXTS = {
    "export": "--export=WANDB_API_KEY={},HOME",
    "option": "--password {}",
    "variable": "NAME=x MYSQL_PWD={} train",
    "json": '{{"api_key": "{}"}}',
    "header": "curl -H 'Authorization: Bearer {}'",
    "yaml": "user: me\npassword: {}\n",
    "block": "token: |\n  {}\n",
}
TEXTS = {kind: text.format(_value()) for kind, text in TEXTS.items()}
ALL = [*ENVIRONMENT.values(), *NAMES.values(), *FORMATS.values(), *URLS.values(), *TEXTS.values()]


def needles() -> dict[str, str]:
    """Return the search terms: the unique part of each canary, and complete tokens."""
    own = [re.search(r"Qx\d\dzKp\d{6}Wv\d\d", text) for text in ALL]
    found = {match[0]: "of its own" for match in own if match}
    return found | {text[:24].split("\n")[0] if kind != "pem" else text[30:54]: kind for kind, text in FORMATS.items()}


def search(directory: Path, texts: list[str]) -> list[str]:
    """Return all places with a canary: in files and their names, archive members, and texts."""
    patterns = [(needle, form) for needle in needles() for form in _forms(needle)]
    regex = re.compile(b"|".join(re.escape(form) for _, form in patterns))
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


def _forms(needle: str) -> Iterator[bytes]:
    yield needle.encode()
    yield quote(needle, safe="").encode()
    yield json.dumps(needle)[1:-1].encode()
    yield needle.encode().hex().encode()
    for offset in range(3):
        yield base64.b64encode(bytes(offset) + needle.encode())[4:-4]
        yield base64.urlsafe_b64encode(bytes(offset) + needle.encode())[4:-4]


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
