# SPDX-License-Identifier: Apache-2.0
"""Read files that may come from an untrusted source: only regular files, of limited size."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from bionemo.common.errors import UserError


def require_regular(path: Path) -> None:
    """Check that a path is a regular file: reading a FIFO would block, and a device has no end.

    Raises:
        UserError: if it is something else, directly or through links.
        OSError: if it does not exist or cannot be accessed.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is not a regular file: give a file")


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, without buffering; a FIFO or device neither blocks nor has side effects.

    Args:
        path: path of the file.
        follow: whether the path may be a symbolic link.

    Raises:
        ValueError: if it is not a regular file, or a symbolic link and `follow` is false.
        OSError: if it cannot be opened.
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
        path: path of the file.
        limit: maximum size in bytes.
        follow: whether the path may be a symbolic link.

    Raises:
        ValueError: if it is not a regular file, too large, nested too deeply, or not JSON.
        OSError: if it cannot be read.
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
