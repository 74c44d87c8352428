# SPDX-License-Identifier: Apache-2.0
"""Files that are given twice, or whose content is the same."""

import os
from collections.abc import Sequence
from pathlib import Path

from bionemo.data.shards.index import Fingerprint


def duplicates(paths: Sequence[Path], others: Sequence[Path] | None = None) -> list[tuple[Path, Path]]:
    """Find files that are the same, also by links, or have the same size and the same samples of their content.

    Only files of equal size are opened, and 288 KiB of each are read.

    Args:
        paths: the files.
        others: the files to compare them with; None: compare them with each other.

    Returns:
        Each file that has a duplicate, and the duplicate, in the order of `paths`. Unreadable files have none.
    """
    sizes: dict[int, list[Path]] = {}
    found = []
    for path in others or ():
        sizes.setdefault(_size(path), []).append(path)
    for path in paths:
        size = _size(path)
        alike = sizes.get(size, []) if size > 0 else []
        if match := next((other for other in alike if _same(path, other)), None):
            found.append((path, match))
        elif others is None:
            sizes.setdefault(size, []).append(path)
    return found


def duplicate_notices(name: str, paths: Sequence[Path], training: Sequence[Path]) -> list[str]:
    """Say which files of a split are duplicates of each other, or of training files.

    Args:
        name: of the split.
        paths: its files.
        training: the files of the training split; empty for that split itself.

    Returns:
        A line for each kind; none if there are no duplicates.
    """
    notices = []
    if pairs := duplicates(paths):
        file, other = pairs[0]
        notices.append(f"{name} data: {file} has the same content as {other}{_more(pairs)}: its records count twice")
    if training and (pairs := duplicates(paths, training)):
        file, other = pairs[0]
        notices.append(
            f"{name} data: {file} has the same content as {other}{_more(pairs)}, which the model is trained on: the "
            f"{name} loss does not tell how well it predicts new sequences"
        )
    return notices


def _more(pairs: Sequence[tuple[Path, Path]]) -> str:
    return f" (and {len(pairs) - 1} more files)" if len(pairs) > 1 else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other) or Fingerprint.of(path).blake2b == Fingerprint.of(other).blake2b
    except OSError:
        return False
