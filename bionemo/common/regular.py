# SPDX-License-Identifier: Apache-2.0
"""Read regular files of limited size."""

import json
from pathlib import Path
from typing import Any, BinaryIO

from bionemo.common.errors import UserError


def require_regular(path: Path) -> None:
    """Check that a path is a regular file, because one that is read twice cannot be a pipe.

    Raises:
        UserError: if it is something else, directly or through links.
        OSError: if it does not exist or cannot be accessed.
    """
    if path.stat() and not path.is_file():
        raise UserError(f"{path} is not a regular file: give a file")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without buffering.

    Raises:
        ValueError: if it is something else; reading a pipe would block.
        OSError: if it cannot be opened.
    """
    if path.stat() and not path.is_file():
        raise ValueError("it is not a regular file")
    return path.open("rb", buffering=0)


def load_json(path: Path, limit: int) -> Any:
    """Parse a JSON file.

    Args:
        path: path of the file.
        limit: maximum size in bytes.

    Raises:
        ValueError: if it is not a regular file, too large, nested too deeply, or not JSON.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        if path.stat().st_size > limit:
            raise ValueError(f"it is larger than {limit:,} bytes")
        try:
            return json.load(file)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
