# SPDX-License-Identifier: Apache-2.0
"""Files from the web: resumed where they stopped, tried again when the line is bad, checked when they are complete."""

import errno
import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import requests
from urllib3.exceptions import HTTPError, TimeoutError

from bionemo.common.redaction import redact_text
from bionemo.errors import UserError
from bionemo.preparation.progress import progress

log = logging.getLogger(__name__)
_WAITS = (1.0, 4.0, 16.0, 64.0)  # seconds between attempts, as long as none of them brings the file further
_LONGEST = 600.0  # seconds that a server may ask us to wait
_TIMEOUT = (20.0, 60.0)  # seconds to connect, and without a byte
_BLOCK = 1 << 16  # what is lost at most when the connection is cut
_DIGITS = {"md5": 32, "sha256": 64}
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


def fetch(source: str, into: Path, checksum: str | None = None) -> Path:
    """Make a file available: one on this machine as it is, one on the web by downloading it.

    A download grows in `<name>.part`, and goes on there when it was interrupted; only a complete file gets its name.
    A file that has its name already is not asked for again, unless it fails the checksum.

    Args:
        source: a path, or a file, http or https URL.
        into: directory for a download; made if it is not there.
        checksum: `md5:` or `sha256:` and the digest in hex; None: not checked.

    Returns:
        Where the file is.

    Raises:
        UserError: when there is no such file, it cannot be had or written, or it is not the expected one.
    """
    expected = _parse(checksum) if checksum is not None else None
    path = into / _name(source) if is_url(source) else _local(source)
    try:
        if not is_url(source):
            _accept(path, expected)
        elif not _there(path, expected):
            into.mkdir(parents=True, exist_ok=True)
            _download(source, path, expected)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{into}: no space left on the disk for {path.name}: free some and start again, the download goes on "
                "where it stopped"
            ) from error
        where = error.filename or path
        raise UserError(f"{where} cannot be written or read ({error.strerror}): check path and permissions") from error
    return path


def locate(base: str, name: str, into: Path) -> Path:
    """Find a file in a directory, where it may be gzipped as `<name>.gz`, or download it from below a base URL.

    Args:
        base: directory or base URL.
        name: of the file.
        into: directory for a download.

    Raises:
        UserError: as `fetch`.
    """
    if is_url(base):
        return fetch(join(base, name), into)
    path = Path(join(base, name))
    for found in (path, path.with_name(f"{path.name}.gz")):
        if found.is_file():
            return found
    raise UserError(f"{path} is not there, nor {path.name}.gz: check the source")


def is_url(source: str) -> bool:
    """Whether something has to be downloaded."""
    return source.lower().startswith(("http://", "https://"))


def join(base: str, name: str) -> str:
    """Give the path or URL of what lies below a directory or base URL; a query stays at the end."""
    if not is_url(base):
        return str(_local(base) / name)
    parts = _split(base)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def public(source: str) -> str:
    """Strip a URL of what may be secret: user, password, query and fragment; a path stays as it is."""
    return redact_text(re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", source, flags=re.DOTALL))


def _local(source: str) -> Path:
    scheme, found, _ = source.partition("://")
    if not found:
        return Path(source)
    if scheme.lower() != "file":
        raise UserError(f"{public(source)}: {scheme}:// cannot be read: give a path, or a file, http or https URL")
    return Path(unquote(_split(source).path))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise UserError(f"{public(url)} is no valid URL: check the address") from error


def _name(url: str) -> str:
    name = unquote(_split(url).path.rpartition("/")[2])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{public(url)} names no file: give the URL of one")
    return name


def _parse(checksum: str) -> tuple[str, str]:
    kind, _, digest = checksum.strip().lower().partition(":")
    if len(digest) != _DIGITS.get(kind) or not re.fullmatch("[0-9a-f]+", digest):
        raise UserError(f"checksum={checksum} is not understood: give md5:... or sha256:... in hexadecimal digits")
    return kind, digest


def _mismatch(path: Path, expected: tuple[str, str] | None) -> str | None:
    """Say how a file's checksum differs from the expected one; None: it does not, or none is expected."""
    if expected is None:
        return None
    kind, wanted = expected
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file, progress(f"checking {path.name}", path.stat().st_size) as advance:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return None if digest.hexdigest() == wanted else f"has {kind} {digest.hexdigest()}, expected was {wanted}"


def _accept(path: Path, expected: tuple[str, str] | None) -> None:
    """Take a file on this machine as it is."""
    if not path.exists():
        raise UserError(f"{path} is not there: check the source")
    if wrong := _mismatch(path, expected):
        raise UserError(f"{path} {wrong}: it is another file, or the checksum is not its own")


def _there(path: Path, expected: tuple[str, str] | None) -> bool:
    """Whether an earlier download is complete, and the right one."""
    if not path.is_file():
        return False
    if wrong := _mismatch(path, expected):
        log.info("%s %s: downloading it again", path, wrong)
        return False
    log.info("%s is there already: not downloaded again; remove it to have it anew", path)
    return True


class Refused(UserError):
    """The server does not give such a file, and would not the next time."""


class _Again(Exception):
    """An attempt failed that another one may mend."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait  # seconds that the server asked for


@dataclass(frozen=True)
class _Partial:
    """What there is of a download, and of which version of the file it is."""

    path: Path
    note: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def version(self) -> str | None:
        try:
            return str(json.loads(self.note.read_text())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self) -> None:
        """Have the next attempt start anew."""
        self.note.unlink(missing_ok=True)


def _download(url: str, path: Path, expected: tuple[str, str] | None) -> None:
    """Try until the file is complete or nothing comes any more."""
    part = _Partial(path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json"))
    log.info("downloading %s to %s", public(url), path)
    failures = furthest = 0
    while True:
        try:
            _attempt(url, part)
            break
        except _Again as again:
            # measured by the furthest point: a server that cuts every try at the same place brings nothing new
            failures = 1 if part.size > furthest else failures + 1
            furthest = max(furthest, part.size)
            if failures > len(_WAITS):
                raise UserError(
                    f"{public(url)} cannot be downloaded ({again}): check the address and the network, then start "
                    "again; it goes on where it stopped"
                ) from again
            wait = _WAITS[failures - 1] if again.wait is None else again.wait
            log.info("%s: %s; trying again in %.0f s", path.name, again, wait)
            sleep(wait)
    if wrong := _mismatch(part.path, expected):
        part.path.unlink()
        part.forget()
        raise UserError(f"{public(url)} {wrong}: the download was removed; start again, or correct the checksum")
    os.replace(part.path, path)
    part.forget()


def _attempt(url: str, part: _Partial) -> None:
    """Ask for what is missing of a file.

    Raises:
        _Again: when it is not complete yet.
    """
    version = part.version
    start = part.size if version else 0
    headers = {"Accept-Encoding": "identity"}
    if version and start:  # If-Range: a file that is not the same any more comes whole
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            begin, total = _understand(response, part, start, public(url))
            if response.status_code != 416:
                _receive(response, part, begin, total)
    except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
        raise UserError(f"{public(url)} is no valid URL: check the address") from error
    except (requests.RequestException, HTTPError) as error:
        raise _Again(_reason(error)) from error


def _understand(response: requests.Response, part: _Partial, start: int, url: str) -> tuple[int, int | None]:
    """Read off an answer which byte comes first, and how many the file has in all; None where it does not say."""
    status, length = response.status_code, response.headers.get("Content-Length", "")
    if status == 200:
        return 0, int(length) if length.isdigit() else None
    if status in (206, 416):
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        total = int(found[2]) if found and found[2] != "*" else None
        if found and (found[1] == str(start) if status == 206 else total == start):
            return start, total
        part.forget()
        raise _Again("the server could not go on where the download had stopped")
    if status in (408, 429) or status >= 500:
        asked = response.headers.get("Retry-After", "")
        wait = min(float(asked), _LONGEST) if asked.isdigit() else None
        raise _Again(f"the server answered {status} {response.reason}", wait)
    raise Refused(f"{url} was refused with {status} {response.reason}: check the address and your access")


def _receive(response: requests.Response, part: _Partial, begin: int, total: int | None) -> None:
    """Write what comes; the raw bytes, as a gzipped file stays one."""
    if begin == 0:
        part.forget()
    what = f"downloading {part.path.stem}"
    with part.path.open("ab" if begin else "wb") as file, progress(what, total, begin) as advance:
        if begin == 0 and (version := _version(response)):  # noted only now that the old bytes are gone
            part.note.write_text(json.dumps({"version": version}))
        for block in response.raw.stream(_BLOCK, decode_content=False):
            file.write(block)
            advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and part.size != total:
        if part.size > total:
            part.forget()
        raise _Again(f"{part.size:,} bytes came instead of {total:,}")


def _version(response: requests.Response) -> str | None:
    """What tells this version of the file from others; None where nothing does it for sure, as weak tags."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")


def _reason(error: BaseException) -> str:
    """Say what went wrong, from the bottom of the chain: the texts above it repeat the URL with all its secrets."""
    if isinstance(error, requests.Timeout | TimeoutError):
        return "no answer in time"
    while below := error.__cause__ or error.__context__:
        error = below
    return getattr(error, "strerror", None) or "the connection was cut off"
