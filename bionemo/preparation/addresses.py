# SPDX-License-Identifier: Apache-2.0
"""Sources: paths and URLs."""

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text


def place(source: str, into: Path) -> Path:
    """Say where `fetch` puts or finds a file.

    Raises:
        UserError: when the source names none.
    """
    return into / name_of(source) if is_url(source) else local(source)


def described(source: str) -> str:
    """Give the absolute path of a file, or a URL without what may be secret."""
    return public(source) if is_url(source) else os.path.abspath(local(source))


def expected(base: str, name: str) -> str:
    """Describe what `locate` gives; nothing has to be there."""
    path = join(base, name)
    return described(
        f"{path}.gz" if not is_url(base) and not Path(path).is_file() and Path(f"{path}.gz").is_file() else path
    )


def is_url(source: str) -> bool:
    """Whether something has to be downloaded."""
    return source.lower().startswith(("http://", "https://"))


def join(base: str, name: str) -> str:
    """Give the path or URL of what lies below a directory or base URL; a query stays at the end."""
    if not is_url(base):
        return str(local(base) / name)
    parts = _split(base)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def public(source: str) -> str:
    """Strip a URL of what may be secret: user, password, query and fragment; a path stays as it is."""
    return redact_text(re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", source, flags=re.DOTALL))


def local(source: str) -> Path:
    """Give the path of a file on this machine.

    Raises:
        UserError: when the source is a URL of another scheme than file.
    """
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


def name_of(url: str) -> str:
    """Give the name of the file that a URL leads to.

    Raises:
        UserError: when it leads to none.
    """
    name = unquote(_split(url).path.rpartition("/")[2])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{public(url)} names no file: give the URL of one")
    return name
