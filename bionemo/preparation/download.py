# SPDX-License-Identifier: Apache-2.0
"""Downloads that are resumed after interruptions, retried after network errors, and checked when complete."""

import hashlib
import http.client
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import requests
from urllib3.exceptions import HTTPError, InvalidHeader, TimeoutError

from bionemo.common.errors import UserError
from bionemo.preparation.inputs import is_gzipped, read_gzip
from bionemo.preparation.partial_download import PartialDownload, is_version
from bionemo.preparation.progress import progress
from bionemo.preparation.staged_output import printable, translate_os_errors
from bionemo.preparation.urls import file_name, is_url, join_source, local_path, redact_url

log = logging.getLogger(__name__)
_DELAYS = (1.0, 4.0, 16.0, 64.0)  # seconds between consecutive attempts that receive nothing new
_MAX_RETRY_AFTER = 600.0  # seconds
_TIMEOUT = (20.0, 60.0)  # seconds to connect, and between two received bytes
_BLOCK = 1 << 16  # maximum number of bytes that a broken connection loses
_HEX_DIGITS = {"md5": 32, "sha256": 64}
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18}|\*)")


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
    note = PartialDownload(path).read_note()
    origin, size = note.get("url"), note.get("size")
    if not os.path.lexists(path):
        return False
    if origin is not None and origin != redact_url(url):
        raise UserError(f"{path} was downloaded from {printable(origin)}, not {redact_url(url)}: move it away")
    if not path.is_file():
        raise UserError(f"{path} is not a file: move it away")
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


class RefusedError(UserError):
    """Error for a file that the server refuses to deliver; a retry would not help."""


class _RetryError(Exception):
    """Error of an attempt that may succeed if it is retried."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(reason)
        self.delay = delay  # seconds, requested by the server


def _download(url: str, path: Path, expected: tuple[str, str] | None) -> None:
    """Retry until the file is complete, or until several consecutive attempts receive nothing new."""
    part = PartialDownload(path)
    if part.read_note().get("url") != redact_url(url):
        part.remove_note()
    log.info("downloading %s to %s", redact_url(url), path)
    failures = max_size = 0
    while True:
        try:
            if not _attempt(url, part) and not expected:
                _confirm_complete(url, part)
            break
        except _RetryError as error:
            # compared with the largest size: a server may break all connections at the same position
            failures = 1 if part.size > max_size else failures + 1
            max_size = max(max_size, part.size)
            if failures > len(_DELAYS):
                raise UserError(
                    f"{redact_url(url)} cannot be downloaded ({error}): check the address and the network, then start "
                    "again; the download is resumed"
                ) from error
            delay = _DELAYS[failures - 1] if error.delay is None else error.delay
            log.info("%s: %s; trying again in %.0f s", path.name, error, delay)
            sleep(delay)
    if mismatch := _find_mismatch(part.path, expected):
        part.path.unlink()
        part.remove_note()
        raise UserError(
            f"{redact_url(url)} {mismatch}: the download was removed; start again, or correct the checksum"
        )
    part.write_note(url, part.version, part.size)
    os.replace(part.path, path)


def _attempt(url: str, part: PartialDownload) -> bool:
    """Request the missing bytes of a file; return whether it is certain that the file is complete.

    Raises:
        _RetryError: if it is not complete.
    """
    version = part.version
    start = part.size if version else 0
    headers = {}
    if version and start:  # If-Range: if the file has changed, the server sends all of it
        headers = {"Range": f"bytes={start}-", "If-Range": version}
    with _request(url, headers) as response:
        begin, total = _read_range(response, part, start, redact_url(url))
        return response.status_code == 416 or _receive(response, url, part, begin, total)


@contextmanager
def _request(url: str, headers: dict[str, str]) -> Iterator[requests.Response]:
    """Send a request, and translate its errors and those of the block.

    Raises:
        _RetryError: if a retry may succeed.
        UserError: if a retry would not help.
    """
    try:
        headers = {"Accept-Encoding": "identity", **headers}
        response = requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT)
    except requests.TooManyRedirects as error:
        raise RefusedError(f"{redact_url(url)} has too many redirects: check the address") from error
    except requests.exceptions.InvalidHeader as error:
        raise _RetryError(_describe(error)) from error
    except ValueError as error:  # several classes; also raised for the target of a redirect
        raise UserError(
            f"{redact_url(url)} is not a valid URL, or redirects to an invalid one: check the address"
        ) from error
    except (requests.RequestException, HTTPError) as error:
        raise _RetryError(_describe(error)) from error
    with response:
        try:
            yield response
        except (requests.RequestException, HTTPError, ValueError) as error:
            raise _RetryError(_describe(error)) from error


def _confirm_complete(url: str, part: PartialDownload) -> None:
    """Check that a file of unknown length is complete.

    The response to a request for the last byte contains the length. If it does not, a gzipped file is decompressed.

    Raises:
        _RetryError: if the file is not complete.
        UserError: if it cannot be determined whether the file is complete.
    """
    last = max(0, part.size - 1)
    with _request(url, {"Range": f"bytes={last}-{last}"}) as response:
        total = _read_content_range(response)[1] if response.status_code in (206, 416) else None
    if total is not None and total != part.size:
        raise _RetryError(f"received {part.size:,} of {total:,} bytes")
    if total is None and is_gzipped(part.path):
        try:
            for _ in read_gzip(part.path):
                pass
        except UserError as error:
            part.remove_note()
            raise _RetryError("the gzip data is truncated or damaged") from error
    elif total is None:
        part.remove_note()
        raise UserError(
            f"{redact_url(url)}: the server does not send the length of the file, so the download may be incomplete: "
            f"check {part.path} and rename it to {part.target.name}, or set a checksum, then start again"
        )


def _parse_number(text: str) -> int | None:
    """Parse a count in a header; return None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _read_content_range(response: requests.Response) -> tuple[int | None, int | None]:
    """Return the position of the first byte and the length of the file, each None if it is missing."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return (_parse_number(found[1] or ""), _parse_number(found[2])) if found else (None, None)


def _read_range(response: requests.Response, part: PartialDownload, start: int, url: str) -> tuple[int, int | None]:
    """Return the position of the first byte of a response, and the length of the file or None if it is unknown."""
    status = response.status_code
    if status == 200:
        return 0, _parse_number(response.headers.get("Content-Length", ""))
    if status in (206, 416):
        first, total = _read_content_range(response)
        if (first if status == 206 else total) == start:
            return start, total
        part.remove_note()
        raise _RetryError("the server could not resume the download")
    answer = f"{status} {printable(response.reason or '')}"
    if status in (408, 429) or status >= 500:
        delay = _parse_number(response.headers.get("Retry-After", ""))
        raise _RetryError(
            f"the server answered {answer}", None if delay is None else min(float(delay), _MAX_RETRY_AFTER)
        )
    raise RefusedError(f"{url} was refused with {answer}: check the address and your access")


def _receive(response: requests.Response, url: str, part: PartialDownload, begin: int, total: int | None) -> bool:
    """Write the raw bytes of a response, so that a gzipped file remains gzipped; see `_attempt` for the result."""
    free = shutil.disk_usage(part.path.parent).free
    if total is not None and total - begin > free:
        raise UserError(
            f"{part.target} needs {(total - begin) / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB of the disk are free: "
            "free some, or choose another output"
        )
    if begin == 0:
        part.remove_note()
    with part.open(begin == 0) as file, progress(f"downloading {part.target.name}", total, begin) as advance:
        if begin == 0:  # after the old bytes have been truncated
            part.write_note(url, _file_version(response))
        for block in response.raw.stream(_BLOCK, decode_content=False):
            file.write(block)
            advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and part.size != total:
        if part.size > total:
            part.remove_note()
        raise _RetryError(f"received {part.size:,} of {total:,} bytes")
    return total is not None or response.raw.chunked  # chunked encoding ends with an empty chunk


def _file_version(response: requests.Response) -> str | None:
    """Return a strong ETag or the modification date; None if there is neither."""
    tag = response.headers.get("ETag", "")
    version = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
    return version if is_version(version) else None


def _describe(error: BaseException) -> str:
    """Describe the first error of a chain: the messages of the later ones contain the URL with its secrets."""
    if isinstance(error, requests.Timeout | TimeoutError):
        return "timeout"
    while cause := error.__cause__ or error.__context__:
        error = cause
    invalid = (http.client.BadStatusLine, http.client.LineTooLong, http.client.UnknownProtocol, InvalidHeader)
    if type(error) is http.client.HTTPException or (isinstance(error, invalid) and not isinstance(error, OSError)):
        return "the response is not valid HTTP"
    return getattr(error, "strerror", None) or "the connection was interrupted"
