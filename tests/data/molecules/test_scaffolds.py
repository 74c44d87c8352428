# SPDX-License-Identifier: Apache-2.0
"""Division of molecules by scaffold, compared with DeepChem's result and an independent implementation."""

import csv
from collections import Counter

import pytest
from rdkit import Chem
from rdkit.Chem.Scaffolds import MurckoScaffold

from bionemo.data.molecules.scaffolds import divide_by_scaffold
from tests.conftest import ROOT

_ESOL = ROOT.parent / "shared" / "cases" / "molecules" / "delaney-processed.csv"
_MOLECULES = [
    "c1ccccc1O", "CCO", "c1ccccc1N", "C1CCCCC1", "c1ccccc1CC", "CCN", "C1CC1C", "C1CC1", "c1ccncc1", "CC1CCCCC1",
]  # fmt: skip


def test_groups_by_size_then_by_their_first_molecule() -> None:
    """Training has 6 places: for 3 benzenes, 2 cyclopropanes (before the pairs that begin earlier), and pyridine."""
    found = divide_by_scaffold(_MOLECULES, 0.2, 0.2)
    assert found == ["train", "test", "train", "val", "train", "test", "train", "train", "train", "val"]


def test_chirality_is_ignored_and_invalid_molecules_are_groups_of_their_own() -> None:
    texts = ["C[C@H]1CCC[C@@H](C)N1", "C[C@@H]1CCC[C@@H](C)N1", "x", "C1CC", "CCO"]
    found = divide_by_scaffold(texts, 0.2, 0.2)
    assert found[0] == found[1] == "train"
    assert Counter(found) == {"train": 3, "val": 1, "test": 1}


def _deepchem(texts: list[str]) -> list[str]:
    """Divide 80, 10 and 10 % as DeepChem's ScaffoldSplitter is documented to do."""
    scaffolds: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        scaffold = MurckoScaffold.MurckoScaffoldSmiles(mol=Chem.MolFromSmiles(text), includeChirality=False)
        scaffolds.setdefault(scaffold, []).append(index)
    names = ["test"] * len(texts)
    train, valid = [], []
    for group in sorted(scaffolds.values(), key=lambda rows: (-len(rows), -rows[0])):
        if len(train) + len(group) <= 0.8 * len(texts):
            train += group
        elif len(train) + len(valid) + len(group) <= 0.9 * len(texts):
            valid += group
    for rows, name in ((train, "train"), (valid, "val")):
        for row in rows:
            names[row] = name
    return names


@pytest.mark.slow
@pytest.mark.skipif(not _ESOL.is_file(), reason="needs the shared data")
def test_esol() -> None:
    """DeepChem 2.8.0 divides the 1,128 molecules of ESOL into 902, 113 and 113."""
    with _ESOL.open(newline="") as file:
        texts = [row["smiles"].strip() for row in csv.DictReader(file)]
    found = divide_by_scaffold(texts, 0.1, 0.1)
    assert Counter(found) == {"train": 902, "val": 113, "test": 113}
    assert found == _deepchem(texts)


def test_equal_to_an_independent_implementation() -> None:
    rings = ["c1ccccc1", "C1CCCC1", "c1ccncc1", "c1ccoc1", "C1CC1", "c1ccc2ccccc2c1", ""]
    texts = [f"{'C' * (1 + n % 5)}{rings[n * n % 7]}" for n in range(120)]
    assert divide_by_scaffold(texts, 0.1, 0.1) == _deepchem(texts)
