# SPDX-License-Identifier: Apache-2.0
"""Synthetic molecules for training."""

import random
from pathlib import Path

_ENDS = ("C", "CC", "C(C)C", "F", "Cl", "Br", "O", "OC", "N", "C#N", "C(=O)O", "C(F)(F)F")
_LINKS = ("C{}", "CC{}", "OC{}", "NC{}", "C(=O)N{}", "S(=O)(=O)N{}", "C(C){}", "C(O)C{}")
# D is the number of a ring; nested rings have different ones
_RINGS = ("cDccc({})ccD", "cDcccc({})cD", "cDccc({})ncD", "cDccc({})sD", "CDCCN({})CCD", "CDCC({})CCD", "CDCN({})CCOD")
_RING_SHARE, _LINK_SHARE = 0.45, 0.3
_MAX_RINGS = 3


def write_molecules(directory: Path, splits: dict[str, int], seed: int = 0) -> None:
    """Write shards `SPLIT/x000.csv` with the header `zinc_id,smiles`.

    Args:
        directory: parent of the directories of the splits.
        splits: number of molecules by split, such as `train`.
        seed: seed of the random numbers.
    """
    generator = random.Random(seed)
    for split, count in splits.items():
        (directory / split).mkdir(parents=True, exist_ok=True)
        rows = (f"{number},C{_random_group(generator, 1)}\n" for number in range(count))
        (directory / split / "x000.csv").write_text("zinc_id,smiles\n" + "".join(rows))


def _random_group(generator: random.Random, ring: int) -> str:
    """Return a random group of atoms; `ring` is the number of its first ring."""
    value = generator.random()
    if value < _RING_SHARE and ring <= _MAX_RINGS:
        return generator.choice(_RINGS).replace("D", str(ring)).format(_random_group(generator, ring + 1))
    if value < _RING_SHARE + _LINK_SHARE:
        return generator.choice(_LINKS).format(_random_group(generator, ring))
    return generator.choice(_ENDS)
