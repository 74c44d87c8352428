# SPDX-License-Identifier: Apache-2.0
"""Sources of data: paths and URLs."""

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text


def is_url(source: str) -> bool:
    """Return whether a source must be downloaded."""
    return source.lower().startswith(("http://", "https://"))


def destination(source: str, directory: Path) -> Path:
    """Return the path of a local source, or the path to which `fetch` downloads a URL.

    Raises:
        UserError: if a URL contains no file name.
    """
    if not is_url(source):
        return local_path(source)
    name = unquote(_split(source).path.rpartition("/")[2])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{redact_url(source)} contains no file name: give the URL of a file")
    return directory / name


def download_directory(url: str, directory: Path) -> Path:
    """Return a directory for the download of one of many files: file names may repeat in the server's directories."""
    parts = urlsplit(url)
    names = (part for part in parts.path.split("/")[:-1] if part.strip("."))
    return directory.joinpath(parts.hostname or "", *names)


def absolute_source(source: str) -> str:
    """Return the absolute path of a file, or a URL without its secrets."""
    return redact_url(source) if is_url(source) else os.path.abspath(local_path(source))


def find_source(base: str, name: str) -> str:
    """Return the path or URL of a file in a directory or below a base URL; a local one may be gzipped, `<name>.gz`."""
    path = join_source(base, name)
    is_gzipped = not is_url(base) and not Path(path).is_file() and Path(f"{path}.gz").is_file()
    return f"{path}.gz" if is_gzipped else path


def join_source(base: str, name: str) -> str:
    """Append a name to a directory or base URL; a query stays at the end."""
    if not is_url(base):
        return str(local_path(base) / name)
    parts = _split(base)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def redact_url(source: str) -> str:
    """Remove user, password, query and fragment from a URL, which may be secret; a path remains as it is."""
    return redact_text(re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", source, flags=re.DOTALL))


def local_path(source: str) -> Path:
    """Return the path of a file on this machine.

    Raises:
        UserError: if the source is a URL whose scheme is not `file`.
    """
    scheme, found, _ = source.partition("://")
    if not found:
        return Path(source)
    if scheme.lower() != "file":
        raise UserError(
            f"{redact_url(source)}: {scheme}:// is not supported: give a path, or a file, http or https URL"
        )
    return Path(unquote(_split(source).path))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise UserError(f"{redact_url(url)} is not a valid URL: check the address") from error
