# SPDX-License-Identifier: Apache-2.0
"""Downloads that are resumed after interruptions, retried after network errors, and checked when complete."""

import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import requests
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from bionemo.common.errors import UserError
from bionemo.common.files import sync, write_atomic
from bionemo.common.progress import progress
from bionemo.preparation.staged_output import translate_os_errors
from bionemo.preparation.urls import destination, is_url, redact_url

log = logging.getLogger(__name__)
_LONGEST_DELAY = 600.0  # seconds that a server may request
_DELAYS = (1.0, 4.0, 16.0, 64.0)  # seconds between consecutive attempts that receive nothing new
_BUSY = (408, 429, 500, 502, 503, 504)  # statuses after which the request is repeated
_TIMEOUT = (20.0, 60.0)  # seconds to connect, and between two received bytes
_BLOCK = 1 << 16  # maximum number of bytes that a broken connection loses


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
    expected = None
    if checksum is not None:
        algorithm, _, digest = checksum.strip().lower().partition(":")
        if len(digest) != {"md5": 32, "sha256": 64}.get(algorithm) or not re.fullmatch("[0-9a-f]+", digest):
            raise UserError(f"checksum={checksum} is not valid: give md5:... or sha256:... in hexadecimal digits")
        expected = algorithm, digest
    path = destination(source, directory)
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


def _find_mismatch(path: Path, expected: tuple[str, str] | None, size: int | None = None) -> str:
    """Describe how a file differs from an expected size, or checksum; "" if it does not."""
    if size is not None and _size(path) != size:
        return f"has {_size(path):,} bytes, {size:,} were downloaded"
    if expected is None:
        return ""
    algorithm, expected_digest = expected
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file, progress(f"checking {path.name}", path.stat().st_size) as advance:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    found = digest.hexdigest()
    return "" if found == expected_digest else f"has {algorithm} {found}, expected {expected_digest}"


def _is_downloaded(url: str, path: Path, expected: tuple[str, str] | None) -> bool:
    """Return whether an earlier download is complete and correct.

    Raises:
        UserError: if the path is occupied by a file of other origin.
    """
    if not path.exists():
        return False
    note = _read_note(path)
    if note and note.get("url") != redact_url(url):
        raise UserError(f"{path} was downloaded from {note.get('url')}, not {redact_url(url)}: move it away")
    mismatch = _find_mismatch(path, expected, note.get("size"))
    if mismatch and not note:
        raise UserError(f"{path} {mismatch}, and was not downloaded by bionemo: move it away, or correct the checksum")
    known = "exists already: not downloaded again; remove it to download it again"
    log.info("%s %s", path, f"{mismatch}: downloading it again" if mismatch else known)
    return not mismatch


def _note_path(path: Path) -> Path:
    """Return the path of the JSON file that records the origin of a download; `path` is that of the complete file."""
    return path.with_name(f".{path.name}.download.json")


def _read_note(path: Path) -> dict[str, Any]:
    """Return `url`, `version` and, for a complete file, `size`; an empty dict if there is no valid note."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(_note_path(path).read_bytes()))
    return {}


def _write_note(path: Path, url: str, version: str | None, size: int | None = None) -> None:
    write_atomic(_note_path(path), json.dumps({"url": redact_url(url), "version": version, "size": size}))


def _download(url: str, path: Path, expected: tuple[str, str] | None) -> None:
    """Receive the file, and resume until it is complete or several consecutive attempts receive nothing new."""
    part = path.with_name(f"{path.name}.part")
    if _read_note(path).get("url") != redact_url(url):
        part.unlink(missing_ok=True)
    log.info("downloading %s to %s", redact_url(url), path)
    failures = max_size = 0
    with requests.Session() as session:
        while problem := _receive(session, url, path, part, expected is not None):
            # compared with the largest size: a server may break all connections at the same position
            failures = 1 if _size(part) > max_size else failures + 1
            max_size = max(max_size, _size(part))
            if failures > len(_DELAYS):
                raise UserError(
                    f"{redact_url(url)} cannot be downloaded ({problem}): check the address and the network, then "
                    "start again; the download is resumed"
                )
            log.info("%s: %s; trying again in %.0f s", path.name, problem, _DELAYS[failures - 1])
            sleep(_DELAYS[failures - 1])
    if mismatch := _find_mismatch(part, expected):
        part.unlink()
        _note_path(path).unlink()
        raise UserError(
            f"{redact_url(url)} {mismatch}: the download was removed; start again, or correct the checksum"
        )
    _write_note(path, url, _read_note(path)["version"], _size(part))
    os.replace(part, path)


def _receive(session: requests.Session, url: str, path: Path, part: Path, is_checked: bool) -> str:
    """Request the missing bytes of a file and append them; return why the file is incomplete, or "" if it is complete.

    Raises:
        UserError: if the server refuses, or does not tell when the file is complete.
    """
    version = _read_note(path).get("version")
    start = _size(part) if version else 0
    headers = {"Accept-Encoding": "identity"}
    if start:  # If-Range: if the file has changed, the server sends all of it
        headers |= {"Range": f"bytes={start}-", "If-Range": str(version)}
    try:
        with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if response.status_code in _BUSY:
                sleep(min(Retry().get_retry_after(response.raw) or 0.0, _LONGEST_DELAY))
                return f"the server answers {response.status_code} {response.reason}"
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code == 416 and total != str(start):  # the range begins after the end
                part.unlink(missing_ok=True)
                return "the server has another file than before"
            if response.status_code in (200, 206):
                total = total or response.headers.get("Content-Length", "")
                if not (total or is_checked or response.raw.chunked or path.name.endswith(".gz")):
                    raise UserError(
                        f"{redact_url(url)}: the server does not send the length of the file, so the download may be "
                        "incomplete: set a checksum, or download the file by other means"
                    )
                _append(response, url, path, part, start if response.status_code == 206 else 0, total)
            elif response.status_code != 416:
                raise UserError(
                    f"{redact_url(url)} was refused with {response.status_code} {response.reason}: check the address "
                    "and your access"
                )
    except (ValueError, requests.TooManyRedirects) as error:
        raise UserError(
            f"{redact_url(url)} is not a valid URL, or redirects to an invalid one: check the address"
        ) from error
    except (requests.RequestException, HTTPError) as error:  # the latter while the body was received
        return _describe(error)
    if not total.isdecimal() or _size(part) == int(total):
        return ""
    problem = f"received {_size(part):,} of {total} bytes"
    if _size(part) > int(total):
        part.unlink()
    return problem


def _append(response: requests.Response, url: str, path: Path, part: Path, start: int, total: str) -> None:
    size = int(total) if total.isdecimal() else None
    with part.open("ab" if start else "wb") as file, progress(f"downloading {path.name}", size, start) as advance:
        if not start:  # after the old bytes have been truncated
            tag = response.headers.get("ETag", "")
            is_strong = tag.startswith('"')
            _write_note(path, url, tag if is_strong else response.headers.get("Last-Modified"))
        for block in response.raw.stream(_BLOCK, decode_content=False):  # a gzipped file remains gzipped
            file.write(block)
            advance(len(block))
    sync(part)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _describe(error: BaseException) -> str:
    """Describe the first error of a chain: the messages of the later ones contain the URL with its secrets."""
    if isinstance(error, requests.Timeout):
        return "timeout"
    while cause := error.__cause__ or error.__context__:
        error = cause
    return getattr(error, "strerror", None) or "the connection was interrupted"
