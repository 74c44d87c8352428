# SPDX-License-Identifier: Apache-2.0
"""Division of molecules by scaffold, so that those of the test set have other ring systems than those in training."""

from collections import defaultdict
from collections.abc import Sequence

from bionemo.data.molecules.smiles import parse_smiles


def divide_by_scaffold(texts: Sequence[str], val_share: float, test_share: float) -> list[str]:
    """Return the split of each SMILES, `train`, `val` or `test`.

    Molecules with the same Bemis-Murcko scaffold, without chirality, are in one split. The groups are taken by
    decreasing size, among equal sizes the group whose first molecule is later in the list. A group goes to training if
    it fits into its share, else to validation if both fit into theirs, else to the test set. This is the order of the
    ScaffoldSplitter of DeepChem, which the benchmark MoleculeNet uses (Wu et al. 2018).

    A SMILES that RDKit cannot parse is a group of its own.
    """
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    groups: dict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        molecule = parse_smiles(text)
        groups[f"invalid {text}" if molecule is None else MurckoScaffoldSmiles(mol=molecule)].append(number)
    # the added value compensates the rounding of shares such as 0.1
    train, known = ((1 - share) * len(texts) + 1e-6 for share in (val_share + test_share, test_share))
    splits, counts = [""] * len(texts), {"train": 0, "val": 0, "test": 0}
    for group in sorted(groups.values(), key=lambda group: (len(group), group[0]), reverse=True):
        if counts["train"] + len(group) <= train:
            split = "train"
        else:
            split = "val" if counts["train"] + counts["val"] + len(group) <= known else "test"
        counts[split] += len(group)
        for number in group:
            splits[number] = split
    return splits
