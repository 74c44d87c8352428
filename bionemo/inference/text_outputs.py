# SPDX-License-Identifier: Apache-2.0
"""Generated molecules as arrays of bytes, and their statistics.

Shapes: k inputs, m molecules of each, w bytes of the longest.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.data.molecules.smiles import parse_smiles, same_molecule, write_canonical

_TOP = (1, 3, 5, 10, 20, 50)  # numbers of candidates, as in publications


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
                same += name == "reconstruction" and same_molecule(text, original.strip()) is True
    line = f"{name}: {count:,} molecules, {_percent(valid, count)} valid"
    line += f", {_percent(len(distinct), valid)} of these unique" if valid else ""
    return line + (f", {_percent(same, count)} equal to the input" if name == "reconstruction" else "")


def summarize_matches(name: str, pairs: Iterable[tuple[str, list[str]]]) -> str:
    """Return a line with the top-k exact match: the share of targets that are among the first k candidates.

    `pairs` contains each target and its candidates, the best first. A candidate matches if it has the same canonical
    SMILES, for which the order of fragments does not matter. Invalid candidates are counted and never match.
    """
    ranks: list[int | None] = []
    invalid = unreadable = total = 0
    for target, candidates in pairs:
        found = [molecule and write_canonical(molecule) for molecule in map(parse_smiles, candidates)]
        total += len(found)
        invalid += found.count(None)
        if molecule := parse_smiles(target.strip()):
            expected = write_canonical(molecule)
            ranks.append(found.index(expected) if expected in found else None)
        else:
            unreadable += 1
    most = total // max(len(ranks) + unreadable, 1)
    numbers = sorted({number for number in _TOP if number < most} | {most})
    shares = [sum(rank is not None and rank < number for rank in ranks) for number in numbers]
    top = ", ".join(f"top-{k} {_percent(share, max(len(ranks), 1))}" for k, share in zip(numbers, shares, strict=True))
    left_out = f"; {unreadable:,} targets that RDKit cannot read are left out" if unreadable else ""
    return (
        f"{name}: exact match of {len(ranks):,} targets: {top}; {invalid:,} of {total:,} candidates invalid{left_out}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}".replace("%", " %")
