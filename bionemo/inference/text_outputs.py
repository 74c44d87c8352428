# SPDX-License-Identifier: Apache-2.0
"""Generated molecules as arrays of bytes, and their statistics.

Shapes: k inputs, m molecules of each, w bytes of the longest.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.data.molecules.smiles import parse_smiles, same_molecule, write_canonical


def encode_texts(texts: list[list[str]]) -> NDArray[np.uint8]:
    """Return UTF-8 bytes padded with zeros, uint8 [k, m, w]."""
    if not texts:
        return np.zeros((0, 1, 1), np.uint8)
    encoded = np.char.encode(np.array(texts, np.str_), "utf-8")
    return encoded.view(np.uint8).reshape(*encoded.shape, encoded.itemsize)


def decode_texts(values: NDArray[Any]) -> NDArray[Any]:
    """Return the texts, [k] or [k, m], of bytes [..., w]; return an array of another type unchanged."""
    if values.dtype != np.uint8:
        return values
    joined = np.ascontiguousarray(values).view(f"S{values.shape[-1]}")
    return np.char.decode(joined.reshape(values.shape[:-1]), "utf-8")


def summarize_molecules(name: str, pairs: Iterable[tuple[str, list[str]]]) -> str:
    """Return a line with the number of molecules and the shares that are valid, unique and equal to the input.

    `pairs` contains each input and the molecules generated from it.
    """
    count = valid = same = 0
    distinct: set[int] = set()
    for original, texts in pairs:
        for text in texts:
            count += 1
            if molecule := parse_smiles(text):
                valid += 1
                distinct.add(hash(write_canonical(molecule)))
                same += name == "reconstruction" and same_molecule(text, original) is True
    line = f"{name}: {count:,} molecules, {_percent(valid, count)} valid"
    line += f", {_percent(len(distinct), valid)} of these unique" if valid else ""
    return line + (f", {_percent(same, count)} equal to the input" if name == "reconstruction" else "")


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}".replace("%", " %")
