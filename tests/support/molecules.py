# SPDX-License-Identifier: Apache-2.0
"""Molecules with all features of SMILES, and real molecules from the shared directory."""

import csv

from tests.conftest import ROOT

SHARED = ROOT.parent / "shared" / "data" / "molecules"

MOLECULES = [
    "C",
    "CCO",
    "c1ccccc1",
    "C1=CC=CC=C1",  # Kekule form, which RDKit writes as an aromatic ring
    "CC(C)Cc1ccc(C(C)C(=O)O)cc1",
    "CN1C=NC2=C1C(=O)N(C(=O)N2C)C",
    "c1ccc2c(c1)[nH]cc2",
    "c1ccsc1-c1ccco1",
    "Oc1cccc(c1)N(=O)=O",  # RDKit's sanitization adds charges
    "CS(=O)(=O)Nc1ccc(Br)cc1Cl",
    "FC(F)(F)c1nnc(I)s1",
    "CC#N",
    "C[Si](C)(C)C",
    "OB(O)c1ccccc1",
    "CP(=O)(O)O",
    # charges, fragments, isotopes, hydrogens
    "[Na+].[Cl-]",
    "CC(=O)[O-].[K+]",
    "C[N+](C)(C)CC(=O)[O-]",
    "O=[N+]([O-])c1ccccc1",
    "Cl.CCN.O",
    "[2H]C([2H])([2H])O",
    "[13CH3][14C](=O)O",
    "[18F]CCO",
    "[H]OC([H])([H])C",
    "[H][H]",
    "[CH2]C",
    "[Fe+2]",
    # stereo: centres, ring pairs, false centres, double bonds
    "C[C@H](N)C(=O)O",
    "C[C@@H](N)C(=O)O",
    "O[C@H]1CC[C@@H](N)CC1",
    "O[C@H]1CC[C@H](N)CC1",
    "CO[C@H](C[C@@H]1CCC[C@H]1O)c1ccccc1",
    "C[C@]12CC[C@H]3[C@H]([C@@H]1CC[C@@H]2O)CCc1cc(O)ccc13",
    "C[C@H](C)O",
    "C[S@](=O)c1ccccc1",
    "C/C=C/C",
    "C/C=C\\C(=O)O",
    "CC(/C=C/c1ccccc1)=N\\O",
    "F/C=C/C=C/[C@H](O)Cl",
    "F/C(F)=C/C",
    "OC1=C[C@@]2(F)CC1CC2",
    "N[C@@H](C)[C@@H](F)[C@@H](N)C",
    # many rings, ring numbers of two digits
    "C12C3C4C1C5C2C3C45",
    "C%10CCCCC%10",
    "c1cc2cc3cc4cc5cc6cc7cc8cc9cc%10ccccc%10cc9cc8cc7cc6cc5cc4cc3cc2cc1",
    "C1CC2(C1)CCC21CC1",
    "CC1(C)[C@@H](N2[C@H](S1)[C@H](NC(=O)Cc1ccccc1)C2=O)C(=O)O",
    "CC(=O)N[C@@H]1[C@@H](O)[C@H](O)[C@@H](CO)O[C@H]1O",
]
INVALID = ["c1cccc1", "C(C", "CC)", "C1CC", "F(C)C", "C[N](C)(C)(C)C", "[Xx]", "hello", "C=[Cl-]=C", "c1ccnc1", "[C@"]
INVALID_OR_EMPTY = [*INVALID, ""]


def shared_molecules() -> list[str]:
    """Return about 1,200 real molecules, or none if the directory is missing."""
    found = []
    for path in sorted(SHARED.rglob("*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                found.append(next(row[name] for name in row if name.lower() == "smiles").strip())
    return found
