# SPDX-License-Identifier: Apache-2.0
"""Read files that somebody else may have put there: only regular files, of limited size."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from bionemo.common.errors import UserError


def require_regular(path: Path) -> None:
    """Refuse what is no file: reading a pipe would wait for ever, and a device has no end.

    Raises:
        UserError: when it is something else, directly or through links.
        OSError: when there is nothing, or it cannot be reached.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is not a regular file: give a file")


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, without buffering; a FIFO or device neither blocks nor takes effect.

    Args:
        path: the file.
        follow: whether it may be a symbolic link.

    Raises:
        ValueError: it is not a regular file, or a symbolic link that may not be followed.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link") from error
        if error.errno == errno.ENXIO:  # a socket
            raise ValueError("it is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def load_json(path: Path, limit: int, follow: bool = True) -> Any:
    """Parse a JSON file.

    Args:
        path: the file.
        limit: size in bytes that is accepted.
        follow: whether it may be a symbolic link.

    Raises:
        ValueError: it is not a regular file, too large, nested too deeply, or not JSON.
        OSError: it cannot be read.
    """
    with open_regular(path, follow) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise ValueError(f"it is larger than {limit:,} bytes")
        content = b""
        while len(content) <= limit and (block := file.read(1 << 20)):
            content += block
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
