# SPDX-License-Identifier: Apache-2.0
"""Compressed files, which cannot be read in place: the error that says how to decompress them."""

import shlex
from pathlib import Path

from bionemo.common.errors import UserError

COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}
"""Command that decompresses files with each suffix."""
_BEGINNINGS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}


def refuse_compressed(path: Path) -> None:
    """Raise a UserError if a file is compressed, whatever its name. Files that cannot be opened are not checked."""
    try:
        with path.open("rb") as file:
            beginning = file.read(6)
    except OSError:
        return
    if suffix := next((name for mark, name in _BEGINNINGS.items() if beginning.startswith(mark)), None):
        plain = path.with_suffix("") if path.suffix in (suffix, ".bgz") else path.with_name(f"plain_{path.name}")
        command = f"{COMPRESSED[suffix]} < {shlex.quote(str(path))} > {shlex.quote(str(plain))}"
        raise UserError(f"{path} is compressed, and records are read in place: run `{command}` and give {plain}")
