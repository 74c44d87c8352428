# SPDX-License-Identifier: Apache-2.0
"""Files from the web: resumed where they stopped, tried again when the line is bad, checked when they are complete."""

import errno
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
from bionemo.preparation.addresses import is_url, join, local, name_of, public
from bionemo.preparation.inputs import is_gzipped, unzipped
from bionemo.preparation.partial import Partial, is_version
from bionemo.preparation.progress import progress

log = logging.getLogger(__name__)
_WAITS = (1.0, 4.0, 16.0, 64.0)  # seconds between attempts, as long as none of them brings the file further
_LONGEST = 600.0  # seconds that a server may ask us to wait
_TIMEOUT = (20.0, 60.0)  # seconds to connect, and without a byte
_BLOCK = 1 << 16  # what is lost at most when the connection is cut
_DIGITS = {"md5": 32, "sha256": 64}
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18}|\*)")


def fetch(source: str, into: Path, checksum: str | None = None) -> Path:
    """Make a file available: one on this machine as it is, one on the web by downloading it.

    A download grows in `<name>.part`, and goes on there when it was interrupted; only a complete file gets its name.
    `.<name>.download.json` notes where it came from. A file that has its name already is not downloaded again, unless
    it was downloaded from this URL and its size has changed or it fails the checksum. Other files are not replaced.

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
    path = into / name_of(source) if is_url(source) else local(source)
    try:
        if not is_url(source):
            _accept(path, expected)
        elif not _is_there(source, path, expected):
            into.mkdir(parents=True, exist_ok=True)
            _download(source, path, expected)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{into}: no space left on the disk for {path.name}: free some and start again, the download goes on "
                "where it stopped"
            ) from error
        where = error.filename or path
        reason = error.strerror or " ".join(str(error).split())
        raise UserError(f"{where} cannot be written or read ({reason}): check path and permissions") from error
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


def _is_there(url: str, path: Path, expected: tuple[str, str] | None) -> bool:
    """Whether an earlier download is complete, and the right one.

    Raises:
        UserError: when another file has its place.
    """
    note = Partial(path).read_note()
    origin, size = note.get("url"), note.get("size")
    if not os.path.lexists(path):
        return False
    if origin is not None and origin != public(url):
        raise UserError(f"{path} was downloaded from {_printable(origin)}, not {public(url)}: move it away")
    if not path.is_file():
        raise UserError(f"{path} is not a file: move it away")
    wrong = _mismatch(path, expected)
    if size is not None and path.stat().st_size != size:
        wrong = f"has {path.stat().st_size:,} bytes, {size:,} were downloaded"
    if wrong and origin is None:
        raise UserError(f"{path} {wrong}, and was not downloaded by bionemo: move it away, or correct the checksum")
    if wrong:
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


def _download(url: str, path: Path, expected: tuple[str, str] | None) -> None:
    """Try until the file is complete or nothing comes any more."""
    part = Partial(path)
    if part.read_note().get("url") != public(url):
        part.forget()
    log.info("downloading %s to %s", public(url), path)
    failures = furthest = 0
    while True:
        try:
            if not _attempt(url, part) and not expected:
                _confirm(url, part)
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
    part.write_note(url, part.version, part.size)
    os.replace(part.path, path)


def _attempt(url: str, part: Partial) -> bool:
    """Ask for what is missing of a file.

    Returns:
        Whether it is certain that the file is complete.

    Raises:
        _Again: when it is not complete yet.
    """
    version = part.version
    start = part.size if version else 0
    headers = {}
    if version and start:  # If-Range: a file that is not the same any more comes whole
        headers = {"Range": f"bytes={start}-", "If-Range": version}
    with _answer(url, headers) as response:
        begin, total = _understand(response, part, start, public(url))
        return response.status_code == 416 or _receive(response, url, part, begin, total)


@contextmanager
def _answer(url: str, headers: dict[str, str]) -> Iterator[requests.Response]:
    """Get an answer, and translate what goes wrong until the block ends.

    Raises:
        _Again: for what may be better the next time.
        UserError: for what will not.
    """
    try:
        headers = {"Accept-Encoding": "identity", **headers}
        response = requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT)
    except requests.TooManyRedirects as error:
        raise Refused(f"{public(url)} redirects without end: check the address") from error
    except requests.exceptions.InvalidHeader as error:
        raise _Again(_reason(error)) from error
    except ValueError as error:  # several classes, also for what a redirect leads to
        raise UserError(f"{public(url)} is no valid URL, or redirects to none: check the address") from error
    except (requests.RequestException, HTTPError) as error:
        raise _Again(_reason(error)) from error
    with response:
        try:
            yield response
        except (requests.RequestException, HTTPError, ValueError) as error:
            raise _Again(_reason(error)) from error


def _confirm(url: str, part: Partial) -> None:
    """See that a file whose length the server has not told is complete.

    Ask for its last byte, as the answer tells the length; if it does not, a gzipped file shows itself where it ends.

    Raises:
        _Again: when it is not complete.
        UserError: when nothing shows whether it is.
    """
    last = max(0, part.size - 1)
    with _answer(url, {"Range": f"bytes={last}-{last}"}) as response:
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        total = _number(found[2]) if found and response.status_code in (206, 416) else None
    if total is not None and total != part.size:
        raise _Again(f"{part.size:,} bytes came instead of {total:,}")
    if total is None and is_gzipped(part.path):
        try:
            for _ in unzipped(part.path):
                pass
        except UserError as error:
            part.forget()
            raise _Again("the gzip data is cut off or damaged") from error
    elif total is None:
        part.forget()
        raise UserError(
            f"{public(url)}: the server does not tell the length of the file, so the download may have been cut off: "
            f"check {part.path} and rename it to {part.target.name}, or set a checksum, then start again"
        )


def _number(text: str) -> int | None:
    """Read a count from a header; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _understand(response: requests.Response, part: Partial, start: int, url: str) -> tuple[int, int | None]:
    """Read off an answer which byte comes first, and how many the file has in all; None where it does not say."""
    status = response.status_code
    if status == 200:
        return 0, _number(response.headers.get("Content-Length", ""))
    if status in (206, 416):
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        total = _number(found[2]) if found else None
        if found and (found[1] == str(start) if status == 206 else total == start):
            return start, total
        part.forget()
        raise _Again("the server could not go on where the download had stopped")
    answer = f"{status} {_printable(response.reason or '')}"
    if status in (408, 429) or status >= 500:
        asked = _number(response.headers.get("Retry-After", ""))
        raise _Again(f"the server answered {answer}", None if asked is None else min(float(asked), _LONGEST))
    raise Refused(f"{url} was refused with {answer}: check the address and your access")


def _receive(response: requests.Response, url: str, part: Partial, begin: int, total: int | None) -> bool:
    """Write what comes; the raw bytes, as a gzipped file stays one.

    Returns:
        Whether it is certain that nothing is missing.
    """
    free = shutil.disk_usage(part.path.parent).free
    if total is not None and total - begin > free:
        raise UserError(
            f"{part.target} needs {(total - begin) / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB of the disk are free: "
            "free some, or choose another output"
        )
    if begin == 0:
        part.forget()
    with part.open(begin == 0) as file, progress(f"downloading {part.target.name}", total, begin) as advance:
        if begin == 0:  # noted only now that the old bytes are gone
            part.write_note(url, _version(response))
        for block in response.raw.stream(_BLOCK, decode_content=False):
            file.write(block)
            advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and part.size != total:
        if part.size > total:
            part.forget()
        raise _Again(f"{part.size:,} bytes came instead of {total:,}")
    return total is not None or response.raw.chunked  # chunks end with an empty one


def _version(response: requests.Response) -> str | None:
    """What tells this version of the file from others; None where nothing does it for sure, as weak tags."""
    tag = response.headers.get("ETag", "")
    version = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
    return version if is_version(version) else None


def _reason(error: BaseException) -> str:
    """Say what went wrong, from the bottom of the chain: the texts above it repeat the URL with all its secrets."""
    if isinstance(error, requests.Timeout | TimeoutError):
        return "no answer in time"
    while below := error.__cause__ or error.__context__:
        error = below
    invalid = (http.client.BadStatusLine, http.client.LineTooLong, http.client.UnknownProtocol, InvalidHeader)
    if type(error) is http.client.HTTPException or (isinstance(error, invalid) and not isinstance(error, OSError)):
        return "its answer is not valid HTTP"
    return getattr(error, "strerror", None) or "the connection was cut off"


def _printable(text: object) -> str:
    """Render what a server sent for a message."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))[:80]
