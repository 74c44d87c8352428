# SPDX-License-Identifier: Apache-2.0
"""Read raw input files, plain or gzipped."""

import hashlib
import logging
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from isal import igzip_threaded, isal_zlib

from bionemo.common.errors import UserError
from bionemo.config.hints import did_you_mean
from bionemo.preparation.download import fetch
from bionemo.preparation.manifest import OutputFile
from bionemo.preparation.staged_output import StagedOutput
from bionemo.preparation.urls import redact_url

log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 20


class LineBlock(NamedTuple):
    """Consecutive whole lines of a file."""

    display_path: str  # path or URL of the file, for messages
    first_line: int  # number of the first line, from 1
    data: bytes  # the lines; the last line of the file may lack its line end
    size: int  # number of bytes of the (possibly compressed) file that were read for them, for progress


def is_gzipped(path: Path) -> bool:
    """Return whether a file starts with the magic number of gzip.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(2) == b"\x1f\x8b"  # gzip's magic number
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
    rest, line, done = b"", 1, 0
    with path.open("rb", buffering=0) as raw:
        for block in read_gzip(path, raw) if is_gzipped(path) else iter(partial(raw.read, block_bytes), b""):
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


def read_input(source: str, directory: Path, output: StagedOutput, checksum: str | None = None) -> tuple[Path, bytes]:
    """Fetch a file that fits into memory, decompress it if it is gzipped, and add it to the manifest.

    The parameters are those of `fetch`. Returns the path of the file, and its content.

    Raises:
        UserError: if it cannot be fetched or read, or is damaged.
    """
    path = fetch(source, directory, checksum)
    gzipped, raw = is_gzipped(path), path.read_bytes()
    output.add_input(path, redact_url(source), OutputFile(len(raw), hashlib.sha256(raw).hexdigest()))
    return path, b"".join(read_gzip(path)) if gzipped else raw


def resolve_tasks(task_name: str | Sequence[str], tasks: Collection[str], others: Collection[str] = ()) -> list[str]:
    """Return the tasks that a configuration names: one, several, or "all"; `others` are not among all.

    Raises:
        UserError: if a task is unknown, or none is named.
    """
    names = [task_name] if isinstance(task_name, str) else task_name
    for name in names or [""]:
        if name not in (*tasks, *others, "all"):
            raise UserError(
                f"task_name={name} is not known{did_you_mean(name, tasks)}: choose {', '.join(tasks)}, or all"
            )
    return [*tasks] if "all" in names else [*dict.fromkeys(names)]
