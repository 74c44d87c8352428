# SPDX-License-Identifier: Apache-2.0
"""Raw files as they are found: plain or gzipped, and noted in the manifest with their checksums."""

import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from isal import igzip_threaded, isal_zlib

from bionemo.common.errors import UserError
from bionemo.preparation.checksums import OutputFile

if TYPE_CHECKING:
    from bionemo.preparation.writer import Draft

log = logging.getLogger(__name__)
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


def unzipped(path: Path, raw: BinaryIO | None = None) -> Iterator[bytes]:
    """Give what a gzipped file holds, block by block.

    Args:
        path: the file.
        raw: the same, opened by who wants to know how far it was read.

    Raises:
        UserError: when it is cut off or damaged.
    """
    with igzip_threaded.open(raw or path, "rb", threads=1) as file:
        try:
            while block := file.read(_BLOCK):
                yield block
        except (EOFError, zlib.error, isal_zlib.error, OSError) as error:  # type: ignore[misc]  # the stub names an instance
            raise UserError(
                f"{path}: the gzip data is cut off or damaged ({error}): download it again, and check it with gzip -t"
            ) from error


def whole_lines(path: Path, piece: int) -> Iterator[tuple[bytes, int]]:
    """Cut a file, plain or gzipped, behind line ends.

    Args:
        path: the file.
        piece: bytes that are read at a time of a plain file.

    Yields:
        Some whole lines, the last ones of a file perhaps without an end, and how many bytes of what lies on the disk
        have been read for them.

    Raises:
        UserError: as `is_gzipped` and `unzipped`.
    """
    zipped = is_gzipped(path)
    rest, done = b"", 0
    with path.open("rb", buffering=0) as raw:
        for block in unzipped(path, raw) if zipped else iter(partial(raw.read, piece), b""):
            text = rest + block
            if end := text.rfind(b"\n") + 1:
                before, done = done, raw.tell()
                yield text[:end], done - before
            rest = text[end:]
        yield rest, raw.tell() - done


def note_dropped_columns(shown: str, titles: Sequence[str], kept: Sequence[str]) -> None:
    """Say which columns of a CSV file the shards do not hold.

    Args:
        shown: what the user calls the file.
        titles: of all columns.
        kept: of those that the shards hold.
    """
    dropped = [title if title.isprintable() else ascii(title) for title in titles if title not in kept]
    if dropped:
        more = f" and {len(dropped) - 10} more" if len(dropped) > 10 else ""
        log.warning(
            "note: %s: columns not kept: %s%s; the shards hold %s alone; to train on labels, give CSV files that have "
            "them to `bionemo finetune` (model.data.target_column)",
            shown, ", ".join(dropped[:10]), more, ", ".join(kept),
        )  # fmt: skip


def read_small(path: Path, draft: "Draft", source: str | None = None) -> bytes:
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
    draft.add_input(source or os.path.abspath(path), path, OutputFile(len(raw), hashlib.sha256(raw).hexdigest()))
    return b"".join(unzipped(path)) if zipped else raw
