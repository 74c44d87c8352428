# SPDX-License-Identifier: Apache-2.0
"""Downloads that are not complete, and the notes that say where files were downloaded from."""

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
from bionemo.preparation.addresses import public


def is_version(version: str) -> bool:
    """Whether a text can be the version of a file, and stand in a header."""
    return re.fullmatch("[ -~]{1,500}", version) is not None


@dataclass(frozen=True)
class Partial:
    """A download that is not complete, and the note beside it.

    Attributes:
        target: the name of the complete file.
    """

    target: Path

    @property
    def path(self) -> Path:
        """Where the bytes are."""
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def _note(self) -> Path:
        return self.target.with_name(f".{self.target.name}.download.json")

    @property
    def size(self) -> int:
        """How many there are."""
        return self.path.lstat().st_size if os.path.lexists(self.path) else 0

    @property
    def version(self) -> str | None:
        """Version of the file that the bytes are the beginning of, as the server calls it; None if not known."""
        return self.read_note().get("version")

    def read_note(self) -> dict[str, Any]:
        """URL, version and, once it is complete, size of the file; nothing where there is no valid note."""
        try:
            note = load_json(self._note, 1 << 16, follow=False)
        except (OSError, ValueError):
            return {}
        if not isinstance(note, dict) or not isinstance(note.get("url"), str):
            return {}
        version, size = note.get("version"), note.get("size")
        if not (version is None or (isinstance(version, str) and is_version(version))):
            return {}
        return note if size is None or type(size) is int else {}

    def write_note(self, url: str, version: str | None, size: int | None = None) -> None:
        """Note where the file comes from; `read_note` gives it back."""
        write_atomic(self._note, json.dumps({"url": public(url), "version": version, "size": size}))

    def forget(self) -> None:
        """Have the next attempt start anew."""
        self._note.unlink(missing_ok=True)

    def open(self, anew: bool) -> BinaryIO:
        """Open the file to write to its end, but never what a symbolic link or a FIFO leads to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path, flags | (os.O_TRUNC if anew else os.O_APPEND), 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{self.path} is not a regular file: remove it")
        return os.fdopen(descriptor, "ab")
