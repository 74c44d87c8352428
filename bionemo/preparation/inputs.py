# SPDX-License-Identifier: Apache-2.0
"""Raw files as they are found: plain or gzipped, and noted in the manifest with their checksums."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from isal import igzip_threaded, isal_zlib

from bionemo.errors import UserError
from bionemo.preparation.writer import Draft

_GZIP = b"\x1f\x8b"
_BLOCK = 1 << 20


def is_gzipped(path: Path) -> bool:
    """Whether a file is gzipped, by its first bytes.

    Raises:
        UserError: when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(2) == _GZIP
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error


def unzipped(path: Path) -> Iterator[bytes]:
    """Give what a gzipped file holds, block by block.

    Raises:
        UserError: when it is cut off or damaged.
    """
    with igzip_threaded.open(path, "rb", threads=1) as file:
        try:
            while block := file.read(_BLOCK):
                yield block
        except (EOFError, zlib.error, isal_zlib.error, OSError) as error:  # type: ignore[misc]  # the stub names an instance
            raise UserError(
                f"{path}: the gzip data is cut off or damaged ({error}): download it again, and check it with gzip -t"
            ) from error


def read_small(path: Path, draft: Draft, source: str | None = None) -> bytes:
    """Read a file that fits into memory, unzip it if it is gzipped, and note it in the manifest.

    Args:
        path: the file.
        draft: the data set that it goes into.
        source: where it came from; None: the path itself.

    Raises:
        UserError: when it cannot be read, or is damaged.
    """
    zipped = is_gzipped(path)
    raw = path.read_bytes()
    draft.add_input(source or os.path.abspath(path), len(raw), hashlib.sha256(raw).hexdigest())
    return b"".join(unzipped(path)) if zipped else raw
