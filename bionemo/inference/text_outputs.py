# SPDX-License-Identifier: Apache-2.0
"""Molecules that a model has written: as bytes in the parts of a prediction, and what RDKit says of them.

Shapes: k texts that were read, m written for each, w bytes of the longest.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.data.molecules.smiles import canonical, read, same_molecule

Texts = NDArray[np.str_]


def as_bytes(texts: list[list[str]]) -> NDArray[np.uint8]:
    """UTF-8, filled up with zeros: uint8 [k, m, w]."""
    if not texts:
        return np.zeros((0, 1, 1), np.uint8)
    coded = np.char.encode(np.array(texts, np.str_), "utf-8")
    return coded.view(np.uint8).reshape(*coded.shape, coded.itemsize)


def from_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """Texts again, [k] or [k, m], from bytes [..., w]; an array of other things as it is."""
    if values.dtype != np.uint8:
        return values
    joined = np.ascontiguousarray(values).view(f"S{values.shape[-1]}")
    return np.char.decode(joined.reshape(values.shape[:-1]), "utf-8")


def tally(name: str, pairs: Iterable[tuple[str, list[str]]]) -> str:
    """Say how many molecules were written, and the shares that RDKit can read, that differ, that are as read.

    Args:
        name: of the column.
        pairs: each text that was read, and those written for it.
    """
    count = valid = same = 0
    distinct: set[int] = set()
    for original, texts in pairs:
        for text in texts:
            count += 1
            if molecule := read(text):
                valid += 1
                distinct.add(hash(canonical(molecule)))
                same += name == "reconstruction" and same_molecule(text, original) is True
    said = f"{name}: {count:,} molecules, {_share(valid, count)} valid"
    said += f", {_share(len(distinct), valid)} of these unique" if valid else ""
    return said + (f", {_share(same, count)} the molecule that was read" if name == "reconstruction" else "")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}".replace("%", " %")
