#!/usr/bin/env bash
# RDKit drops letters that are not ASCII at both ends of a SMILES and reads another molecule.
#
# Package:   rdkit 2026.9.1
# Expected:  MolFromSmiles returns None for text that is no SMILES, as it does for such a letter in the middle.
# What is:   Characters outside ASCII at the beginning and at the end are treated like white space. A SMILES whose last
#            atom was typed with another keyboard or copied from a paper (Cyrillic or full-width O) loses this atom:
#            acetic acid becomes acetaldehyde. No message.
# Met by:    Tables that people have edited, text from PDF files. bionemo treats SMILES that are not ASCII as invalid.
#            Remedy elsewhere: check text.isascii() first.
# Source:    seen; rdkit, Code/GraphMol/SmilesParse (the text is trimmed before it is parsed).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv rdkit==2026.9.1 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import rdkit
from rdkit import Chem, RDLogger

RDLogger.DisableLog("rdApp.*")
print("rdkit", rdkit.__version__)
for name, text in {
    "acetic acid": "CC(=O)O",
    "Cyrillic O at the end": "CC(=O)\u041e",
    "full-width O at the end": "CC(=O)\uff2f",
    "full-width O at the beginning": "\uff2fCC",
    "Cyrillic O in the middle": "CC\u041eC",
}.items():
    molecule = Chem.MolFromSmiles(text)
    print(f"  {name:30} {'None' if molecule is None else Chem.MolToSmiles(molecule)}")
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
rdkit 2026.09.1
  acetic acid                    CC(=O)O
  Cyrillic O at the end          CC=O
  full-width O at the end        CC=O
  full-width O at the beginning  CC
  Cyrillic O in the middle       None
END
