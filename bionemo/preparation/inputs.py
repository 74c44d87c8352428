# SPDX-License-Identifier: Apache-2.0
"""Read raw input files, plain or gzipped."""

import hashlib
import logging
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from isal import igzip_threaded, isal_zlib

from bionemo.common.errors import UserError
from bionemo.preparation.blocks import LineBlock
from bionemo.preparation.checksums import OutputFile
from bionemo.preparation.staged_output import StagedOutput

log = logging.getLogger(__name__)
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK_BYTES = 1 << 20


def is_gzipped(path: Path) -> bool:
    """Return whether a file starts with the magic number of gzip.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(2) == _GZIP_MAGIC
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error


def read_gzip(path: Path, raw: BinaryIO | None = None) -> Iterator[bytes]:
    """Decompress a gzipped file block by block. `raw` is the open file, for callers that need its position.

    Raises:
        UserError: if it is truncated or damaged.
    """
    with igzip_threaded.open(raw or path, "rb", threads=1) as file:
        try:
            while block := file.read(_BLOCK_BYTES):
                yield block
        except (EOFError, zlib.error, isal_zlib.error, OSError) as error:  # type: ignore[misc]  # the stub names an instance
            raise UserError(
                f"{path}: the gzip data is truncated or damaged ({error}): download it again, check it with gzip -t"
            ) from error


def read_head(path: Path, size: int) -> bytes:
    """Read the first `size` bytes of a file, decompressed. Errors as in `is_gzipped` and `read_gzip`."""
    if is_gzipped(path):
        return next(read_gzip(path), b"")[:size]
    with path.open("rb") as file:
        return file.read(size)


def read_line_blocks(path: Path, display_path: str, block_bytes: int) -> Iterator[LineBlock]:
    """Read a file, gzipped or plain, in blocks of whole lines; a plain file is read `block_bytes` at a time.

    Errors as in `is_gzipped` and `read_gzip`.
    """
    gzipped = is_gzipped(path)
    rest, line, done = b"", 1, 0
    with path.open("rb", buffering=0) as raw:
        for block in read_gzip(path, raw) if gzipped else iter(partial(raw.read, block_bytes), b""):
            text = rest + block
            if end := text.rfind(b"\n") + 1:
                before, done = done, raw.tell()  # a thread may continue to read
                yield LineBlock(display_path, line, text[:end], done - before)
                line += text.count(b"\n")
            rest = text[end:]
        yield LineBlock(display_path, line, rest, raw.tell() - done)


def notify_dropped_columns(display_path: str, titles: Sequence[str], kept: Sequence[str]) -> None:
    """Log which columns of a CSV file are not written to the shards."""
    dropped = [title if title.isprintable() else ascii(title) for title in titles if title not in kept]
    if dropped:
        more = f" and {len(dropped) - 10} more" if len(dropped) > 10 else ""
        log.warning(
            "note: %s: dropped columns: %s%s; the shards contain only %s; to train on labels, give CSV files that "
            "contain them to `bionemo finetune` (model.data.target_column)",
            display_path, ", ".join(dropped[:10]), more, ", ".join(kept),
        )  # fmt: skip


def read_input(path: Path, display_path: str, output: StagedOutput) -> bytes:
    """Read a file that fits into memory, decompress it if it is gzipped, and add it to the manifest.

    Raises:
        UserError: if it cannot be read, or is damaged.
    """
    gzipped = is_gzipped(path)
    raw = path.read_bytes()
    output.add_input(path, display_path, OutputFile(len(raw), hashlib.sha256(raw).hexdigest()))
    return b"".join(read_gzip(path)) if gzipped else raw
