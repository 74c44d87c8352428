#!/usr/bin/env bash
# chython drops E/Z of imines, amidines, enamines and enols while it reads a SMILES.
#
# Package:   chython 3.7
# Expected:  str(chython.smiles(text)) is the same molecule, with E/Z as written; a reader does not standardise.
# What is:   E/Z of C=N with a carbon or a second nitrogen's group at N, and of C=C that carries N-H or O-H, is gone
#            after reading, without a message. Oximes, hydrazones, azo compounds, enol ethers, and other C=C keep it.
# Met by:    79 of 9,947 molecules (approved drugs, ChEMBL, NCI) come out with less or other stereochemistry. A set
#            standardised with chython has one text for two isomers, and does not match the SMILES of RDKit in joins.
# Source:    chython's documentation, stereo.rst, "labile double bonds" (a comment in chemistry/_isomers.py names it).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv chython==3.7 rdkit==2026.9.1 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import importlib.metadata
import chython
from rdkit import Chem

print("chython", importlib.metadata.version("chython"))
for name, smiles in {
    "imine": "c1ccccc1/C=N/C",
    "amidine": r"CN/C(=N\C)NCC",
    "enamine": "COc1ccc(/C=C/N)cc1",
    "enaminone": "Cc1cccc(N/C=C/C(=O)c2cccs2)c1C",
    "enol": "C/C=C/O",
    "oxime": "C/C=N/O",
    "hydrazone": "c1ccccc1/C=N/NC",
    "azo": "C/N=N/C",
    "enol ether": "C/C=C/OC",
    "resveratrol": "Oc1ccc(/C=C/c2cc(O)cc(O)c2)cc1",
}.items():
    read = Chem.CanonSmiles(str(chython.smiles(smiles)))
    print(f"{name:12} {'kept' if read == Chem.CanonSmiles(smiles) else 'LOST'}  {Chem.CanonSmiles(smiles):36} -> {read}")
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
chython 3.7
imine        LOST  C/N=C/c1ccccc1                       -> CN=Cc1ccccc1
amidine      LOST  CCN/C(=N/C)NC                        -> CCNC(=NC)NC
enamine      LOST  COc1ccc(/C=C/N)cc1                   -> COc1ccc(C=CN)cc1
enaminone    LOST  Cc1cccc(N/C=C/C(=O)c2cccs2)c1C       -> Cc1cccc(NC=CC(=O)c2cccs2)c1C
enol         LOST  C/C=C/O                              -> CC=CO
oxime        kept  C/C=N/O                              -> C/C=N/O
hydrazone    kept  CN/N=C/c1ccccc1                      -> CN/N=C/c1ccccc1
azo          kept  C/N=N/C                              -> C/N=N/C
enol ether   kept  C/C=C/OC                             -> C/C=C/OC
resveratrol  kept  Oc1ccc(/C=C/c2cc(O)cc(O)c2)cc1       -> Oc1ccc(/C=C/c2cc(O)cc(O)c2)cc1
END
