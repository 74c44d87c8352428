# SPDX-License-Identifier: Apache-2.0
"""Downloads that are resumed after interruptions, retried after network errors, and checked when complete."""

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.progress import progress
from bionemo.preparation.staged_output import translate_os_errors
from bionemo.preparation.urls import file_name, is_url, join_source, local_path, redact_url

log = logging.getLogger(__name__)
_LONGEST_DELAY = 600.0  # seconds that a server may request
_DELAYS = (1.0, 4.0, 16.0, 64.0)  # seconds between consecutive attempts that receive nothing new


class _Retry(Retry):
    def get_retry_after(self, response: Any) -> float | None:
        """Return the delay that the server requests, at most `_LONGEST_DELAY`."""
        delay = super().get_retry_after(response)
        if delay:
            delay = min(delay, _LONGEST_DELAY)
            log.info("the server answers %s: waiting for %.0f s", response.status, delay)
        return delay


# before the body of a response; after these statuses with the delay that the server requests
_RETRY = _Retry(total=5, backoff_factor=1, status_forcelist=[408, 429, 500, 502, 503, 504])
_TIMEOUT = (20.0, 60.0)  # seconds to connect, and between two received bytes
_BLOCK = 1 << 16  # maximum number of bytes that a broken connection loses
_HEX_DIGITS = {"md5": 32, "sha256": 64}


def fetch(source: str, directory: Path, checksum: str | None = None) -> Path:
    """Return the path of a local file, or download a URL.

    A download is written to `<name>.part`, is resumed there after an interruption, and is renamed when complete.
    `.<name>.download.json` records its origin. An existing file is downloaded again only if it was downloaded from
    this URL and its size has changed or its checksum is wrong. Other existing files are not replaced.

    Args:
        source: a path, or a file, http or https URL.
        directory: directory of downloads; created if necessary.
        checksum: `md5:` or `sha256:` and the digest in hexadecimal digits; None: not checked.

    Raises:
        UserError: if the file does not exist, cannot be downloaded or written, or has another checksum.
    """
    expected = _parse_checksum(checksum) if checksum is not None else None
    path = directory / file_name(source) if is_url(source) else local_path(source)
    with translate_os_errors(path, "free disk space and start again, the download is resumed"):
        if not is_url(source):
            if not path.exists():
                raise UserError(f"{path} does not exist: check the source")
            if mismatch := _find_mismatch(path, expected):
                raise UserError(f"{path} {mismatch}: correct the source or the checksum")
        elif not _is_downloaded(source, path, expected):
            directory.mkdir(parents=True, exist_ok=True)
            _download(source, path, expected)
    return path


def locate(base: str, name: str, directory: Path) -> tuple[Path, str]:
    """Find a file, or its gzipped form `<name>.gz`, in a local directory, or download it from below a base URL.

    Returns the path of the file, and its path or URL for messages. Errors as in `fetch`.
    """
    source = join_source(base, name)
    if is_url(base):
        return fetch(source, directory), redact_url(source)
    path = Path(source)
    for found in (path, path.with_name(f"{path.name}.gz")):
        if found.is_file():
            return found, str(found)
    raise UserError(f"neither {path} nor {path.name}.gz exists: check the source")


def _parse_checksum(checksum: str) -> tuple[str, str]:
    algorithm, _, digest = checksum.strip().lower().partition(":")
    if len(digest) != _HEX_DIGITS.get(algorithm) or not re.fullmatch("[0-9a-f]+", digest):
        raise UserError(f"checksum={checksum} is not valid: give md5:... or sha256:... in hexadecimal digits")
    return algorithm, digest


def _find_mismatch(path: Path, expected: tuple[str, str] | None) -> str | None:
    """Describe the difference between a file's checksum and the expected one; None if there is none."""
    if expected is None:
        return None
    algorithm, expected_digest = expected
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file, progress(f"checking {path.name}", path.stat().st_size) as advance:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    found = digest.hexdigest()
    return None if found == expected_digest else f"has {algorithm} {found}, expected {expected_digest}"


def _is_downloaded(url: str, path: Path, expected: tuple[str, str] | None) -> bool:
    """Return whether an earlier download is complete and correct.

    Raises:
        UserError: if the path is occupied by a file of other origin.
    """
    note = _Note(path).read()
    origin, size = note.get("url"), note.get("size")
    if not path.exists():
        return False
    if origin is not None and origin != redact_url(url):
        raise UserError(f"{path} was downloaded from {origin}, not {redact_url(url)}: move it away")
    mismatch = _find_mismatch(path, expected)
    if size is not None and path.stat().st_size != size:
        mismatch = f"has {path.stat().st_size:,} bytes, {size:,} were downloaded"
    if mismatch and origin is None:
        raise UserError(f"{path} {mismatch}, and was not downloaded by bionemo: move it away, or correct the checksum")
    if mismatch:
        log.info("%s %s: downloading it again", path, mismatch)
        return False
    log.info("%s exists already: not downloaded again; remove it to download it again", path)
    return True


@dataclass(frozen=True)
class _Note:
    """The JSON file that records the origin of a download; `target` is the path of the complete file."""

    target: Path

    @property
    def path(self) -> Path:
        return self.target.with_name(f".{self.target.name}.download.json")

    def read(self) -> dict[str, Any]:
        """Return `url`, `version` and, for a complete file, `size`; an empty dict if there is no valid note."""
        try:
            note = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def write(self, url: str, version: str | None, size: int | None = None) -> None:
        write_atomic(self.path, json.dumps({"url": redact_url(url), "version": version, "size": size}))


def _download(url: str, path: Path, expected: tuple[str, str] | None) -> None:
    """Receive the file, and resume until it is complete or several consecutive attempts receive nothing new."""
    part, note = path.with_name(f"{path.name}.part"), _Note(path)
    if note.read().get("url") != redact_url(url):
        part.unlink(missing_ok=True)
    log.info("downloading %s to %s", redact_url(url), path)
    failures = max_size = 0
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=_RETRY))
        while problem := _receive(session, url, part, note, expected is not None):
            # compared with the largest size: a server may break all connections at the same position
            failures = 1 if _size(part) > max_size else failures + 1
            max_size = max(max_size, _size(part))
            if failures > len(_DELAYS):
                raise _failure(url, problem)
            log.info("%s: %s; trying again in %.0f s", path.name, problem, _DELAYS[failures - 1])
            sleep(_DELAYS[failures - 1])
    if mismatch := _find_mismatch(part, expected):
        part.unlink()
        note.path.unlink()
        raise UserError(
            f"{redact_url(url)} {mismatch}: the download was removed; start again, or correct the checksum"
        )
    note.write(url, note.read()["version"], _size(part))
    os.replace(part, path)


def _failure(url: str, problem: str) -> UserError:
    return UserError(
        f"{redact_url(url)} cannot be downloaded ({problem}): check the address and the network, then start again; "
        "the download is resumed"
    )


def _receive(session: requests.Session, url: str, part: Path, note: _Note, is_checked: bool) -> str:
    """Request the missing bytes of a file and append them; return why the file is incomplete, or "" if it is complete.

    Raises:
        UserError: if the server refuses or cannot be reached, or does not tell when the file is complete.
    """
    version = note.read().get("version")
    start = _size(part) if version else 0
    headers = {"Accept-Encoding": "identity"}
    if version and start:  # If-Range: if the file has changed, the server sends all of it
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code in (200, 206):
                total = total or response.headers.get("Content-Length", "")
                if not (total or is_checked or response.raw.chunked or part.name.endswith(".gz.part")):
                    raise UserError(
                        f"{redact_url(url)}: the server does not send the length of the file, so the download may be "
                        "incomplete: set a checksum, or download the file by other means"
                    )
                _append(response, url, part, note, start if response.status_code == 206 else 0, total)
            elif response.status_code == 416:  # the range begins at or after the end
                if total != str(start):
                    part.unlink(missing_ok=True)
                    return "the server has another file than before"
            else:
                raise UserError(
                    f"{redact_url(url)} was refused with {response.status_code} {response.reason}: check the address "
                    "and your access"
                )
    except (ValueError, requests.TooManyRedirects) as error:
        raise UserError(
            f"{redact_url(url)} is not a valid URL, or redirects to an invalid one: check the address"
        ) from error
    except requests.RequestException as error:
        raise _failure(url, _describe(error)) from error
    except HTTPError as error:  # while the body was received
        return _describe(error)
    size = _size(part)
    if total.isdecimal() and size > int(total):
        part.unlink()
    return f"received {size:,} of {total} bytes" if total.isdecimal() and size != int(total) else ""


def _append(response: requests.Response, url: str, part: Path, note: _Note, start: int, total: str) -> None:
    size = int(total) if total.isdecimal() else None
    with (
        part.open("ab" if start else "wb") as file,
        progress(f"downloading {note.target.name}", size, start) as advance,
    ):
        if not start:  # after the old bytes have been truncated
            note.write(url, _file_version(response))
        for block in response.raw.stream(_BLOCK, decode_content=False):  # a gzipped file remains gzipped
            file.write(block)
            advance(len(block))
        file.flush()
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _file_version(response: requests.Response) -> str | None:
    """Return a strong ETag or the modification date; None if there is neither."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")


def _describe(error: BaseException) -> str:
    """Describe the first error of a chain: the messages of the later ones contain the URL with its secrets."""
    if isinstance(error, requests.Timeout):
        return "timeout"
    if isinstance(error, requests.exceptions.RetryError):
        return "the server is busy or has an error"
    while cause := error.__cause__ or error.__context__:
        error = cause
    return getattr(error, "strerror", None) or "the connection was interrupted"
