# SPDX-License-Identifier: Apache-2.0
"""Check that the pieces of each tensor in the index of a checkpoint cover it exactly once."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def find_defect(index: Mapping[str, Any]) -> str:
    """Return the first tensor whose pieces overlap, leave gaps or exceed its shape; "" if there is none.

    `index` contains for each tensor its `shape` and `pieces` of file, key, offset and shape.
    """
    for name, entry in index.items():
        shape = entry["shape"]
        pieces = sorted((offset, size) for _, _, offset, size in entry["pieces"] if 0 not in size)
        if any(not _is_inside(offset, size, shape) for offset, size in pieces):
            return f"a piece of {name} exceeds its shape"
        if _overlap(pieces):
            return f"pieces of {name} overlap"
        if sum(math.prod(size) for _, size in pieces) != math.prod(shape):
            return f"values of {name} are missing"
    return ""


def _is_inside(offset: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> bool:
    return all(0 <= a <= a + n <= total for a, n, total in zip(offset, size, shape, strict=True))


def _overlap(pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether two of the pieces overlap, which are sorted by their offsets."""
    active: list[tuple[Sequence[int], Sequence[int]]] = []  # those that may reach the next piece along the first axis
    for offset, size in pieces:
        active = [(a, n) for a, n in active if offset and a[0] + n[0] > offset[0]]
        if any(
            all(a < b + m and b < a + n for a, n, b, m in zip(*each, offset, size, strict=True)) for each in active
        ):
            return True
        active.append((offset, size))
    return False
