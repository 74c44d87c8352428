# SPDX-License-Identifier: Apache-2.0
"""Incomplete downloads, and the JSON notes that record the origin of downloaded files."""

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.regular import load_json
from bionemo.preparation.urls import redact_url


def is_version(version: str) -> bool:
    """Return whether a string is valid as a file version in an HTTP header."""
    return re.fullmatch("[ -~]{1,500}", version) is not None


@dataclass(frozen=True)
class PartialDownload:
    """An incomplete download and its note; `target` is the path of the complete file."""

    target: Path

    @property
    def path(self) -> Path:
        """Path of the bytes received so far."""
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def _note(self) -> Path:
        return self.target.with_name(f".{self.target.name}.download.json")

    @property
    def size(self) -> int:
        """Number of bytes received so far."""
        return self.path.lstat().st_size if os.path.lexists(self.path) else 0

    @property
    def version(self) -> str | None:
        """ETag or modification date of the file that the bytes belong to; None if it is not known."""
        return self.read_note().get("version")

    def read_note(self) -> dict[str, Any]:
        """Return `url`, `version` and, for a complete file, `size`; an empty dict if there is no valid note."""
        try:
            note = load_json(self._note, 1 << 16)
        except (OSError, ValueError):
            return {}
        if not isinstance(note, dict) or not isinstance(note.get("url"), str):
            return {}
        version, size = note.get("version"), note.get("size")
        if not (version is None or (isinstance(version, str) and is_version(version))):
            return {}
        return note if size is None or type(size) is int else {}

    def write_note(self, url: str, version: str | None, size: int | None = None) -> None:
        """Record the origin of the file."""
        write_atomic(self._note, json.dumps({"url": redact_url(url), "version": version, "size": size}))

    def remove_note(self) -> None:
        """Remove the note, so that the next attempt starts from the beginning."""
        self._note.unlink(missing_ok=True)

    def open(self, truncate: bool) -> BinaryIO:
        """Open the file for appending, but never the target of a symbolic link and never a FIFO."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path, flags | (os.O_TRUNC if truncate else os.O_APPEND), 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{self.path} is not a regular file: remove it")
        return os.fdopen(descriptor, "ab")
