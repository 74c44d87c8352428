# SPDX-License-Identifier: Apache-2.0
"""Durable and atomic writes that replace only files, and directories that record that this project created them."""

import errno
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bionemo.common.errors import UserError

MARKER = ".bionemo.json"
_CANNOT_SYNC_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR, errno.EACCES}


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk.

    Some network and FUSE file systems reject fsync on a directory; that is accepted, an error of a file is not.

    Raises:
        OSError: if a file cannot be flushed.
    """
    directory = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (directory and error.errno in _CANNOT_SYNC_DIRECTORIES):
            raise


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file under a temporary name beside it, flush it, and rename it; on failure the old file remains.

    Raises:
        OSError: if it cannot be written; it names `path`.
    """
    with replacing(path) as new, new.open("xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path, directory: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """Replace a file by one that the block writes, for writers that need a path.

    The new file is flushed to disk and renamed when the block ends; when the block fails it is deleted and the old
    file remains.

    Args:
        path: the file; it need not exist.
        directory: where the new file is written, on the same file system; None: beside `path`.
        durable: flush the file to disk; False for a file that can be made again and whose damage is detected.

    A pipe or a character device, such as /dev/stdout, is not replaced: the content of the new file is copied to it.

    Yields:
        The path of the new file, which does not exist.

    Raises:
        UserError: if `path` is another device, a socket, or a pipe that no process reads.
        OSError: if it cannot be written; it names `path`.
    """
    if _is_stream(path):
        with _copied_to(path) as new:
            yield new
        return
    temporary = (directory or path.parent) / f".{path.name[:200]}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        try:
            yield temporary
            if durable:
                sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            sync(path.parent)
    except OSError as error:
        if error.errno and error.filename in (None, str(temporary)):  # write() and fsync() set no file name
            error.filename = str(path)
            del error.filename2
        raise


def _is_stream(path: Path) -> bool:
    """Return whether a path is written like a stream: what is no file or directory, and names of open files."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise UserError(f"{path} is a {'device' if stat.S_ISBLK(mode) else 'socket'}: name a file")
    open_file = path.absolute().is_relative_to("/dev") or path.absolute().is_relative_to("/proc")
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or (stat.S_ISREG(mode) and path.is_symlink() and open_file)


@contextmanager
def _copied_to(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which is copied to a pipe or device at the end."""
    with TemporaryDirectory() as directory:
        new = Path(directory) / "new"
        yield new
        flags = os.O_WRONLY | (os.O_APPEND if stat.S_ISREG(path.stat().st_mode) else os.O_NONBLOCK)
        try:
            descriptor = os.open(path, flags)  # O_NONBLOCK: without a reader, a pipe would block forever
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise UserError(
                    f"{path}: no process reads this pipe: start the reader first, or name a file"
                ) from error
            raise
        os.set_blocking(descriptor, True)
        with new.open("rb") as source, open(descriptor, "wb") as target:
            shutil.copyfileobj(source, target)


def refuse_replacing(path: Path, marker: bytes, option: str) -> None:
    """Check that a file does not exist or begins like those of this project, before it is replaced.

    Raises:
        UserError: if it is another file.
        OSError: if it cannot be read.
    """
    if path.is_file() and not _is_stream(path):
        with path.open("rb") as file:
            found = file.read(len(marker))
        if found and found != marker:
            raise UserError(f"{path} exists and was not written by this command: choose another {option}")


def create_owned(path: Path, kind: str, identity: Mapping[str, Any] | None = None) -> None:
    """Create a directory, or take over an empty one, and record in it that this project created it.

    Args:
        path: the directory.
        kind: type of content, such as "features"; `remove_owned` does not delete other kinds.
        identity: the settings that determine its content, as JSON; `identity_of` returns them.

    Raises:
        UserError: if it exists, is not empty and was not created by this project.
        OSError: if it cannot be created.
    """
    if path.exists() and identity_of(path, kind) is None and not is_unmarked(path):
        raise UserError(
            f"{path} exists and was not created by bionemo: move it away or choose another output (it is needed for "
            f"{kind})"
        )
    record = json.dumps({"kind": kind, "identity": dict(identity or {})}, indent=1, default=str)
    path.mkdir(parents=True, exist_ok=True)
    for unfinished in path.glob(f".{MARKER}.*.tmp"):
        unfinished.unlink()
    write_atomic(path / MARKER, record)


def is_unmarked(path: Path) -> bool:
    """Return whether a directory is empty or contains only temporary files of an interrupted `create_owned`."""
    return path.is_dir() and all(each.match(f".{MARKER}.*.tmp") for each in path.iterdir())


def identity_of(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the identity of a directory of this kind that this project created; None for any other path."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        record: dict[str, Any] = json.loads((path / MARKER).read_text())
        if record["kind"] == kind:
            return dict(record["identity"])
    return None


def remove_owned(path: Path, kind: str, names: str) -> None:
    """Delete the files of a directory that this project created; do nothing if the path does not exist.

    Args:
        path: the directory.
        kind: type of content, as passed to `create_owned`.
        names: regular expression for the complete names of the files to delete; if others exist, they and the
            directory stay.

    Raises:
        UserError: if the directory exists and this project did not create it.
        OSError: if something cannot be deleted.
    """
    if not path.exists():
        return
    if identity_of(path, kind) is None:
        raise UserError(
            f"{path} was not created by bionemo and is left as it is: move it away or choose another output"
        )
    for file in path.iterdir():
        if re.fullmatch(names, file.name) and file.is_file():
            file.unlink()
    (path / MARKER).unlink()
    with suppress(OSError):  # the directory contains other files
        path.rmdir()


def without_nan(value: Any) -> Any:
    """Replace nan, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
