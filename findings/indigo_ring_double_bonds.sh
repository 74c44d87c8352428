#!/usr/bin/env bash
# Indigo's canonical SMILES drops cis/trans of double bonds in rings and the mark of racemates.
#
# Package:   epam.indigo 1.46.0
# Expected:  canonicalSmiles() of two different molecules differs: E and Z isomers of macrocycles (ring of 8 and
#            more) are different compounds, and so are a racemate (|&1:1|) and one enantiomer.
# What is:   canonicalSmiles() has no / and \ for double bonds in rings, so E and Z are one text. smiles() has them
#            only in an extension behind a space (|t:1| and |c:1|), which is lost wherever the SMILES ends at the
#            first white space. Exocyclic and open-chain double bonds are kept. canonicalSmiles() of a racemate is
#            the SMILES of ONE enantiomer, without the extension. No error.
# Met by:    Macrocycles (epothilones, macrolides, HCV protease inhibitors, stapled peptides): 38 of 9,947 molecules
#            of ChEMBL, approved drugs and NCI change. Isomers with different activity become duplicates.
# Source:    Indigo API documentation, smiles() and canonicalSmiles(); ChemAxon Extended SMILES, "c:", "t:".
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv epam.indigo==1.46.0 rdkit==2026.9.1 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import importlib.metadata
from indigo import Indigo
from rdkit import Chem

print("epam.indigo", importlib.metadata.version("epam.indigo"), "/ rdkit", importlib.metadata.version("rdkit"))
indigo = Indigo()
PAIRS = {
    "butene": (r"C/C=C/C", r"C/C=C\C"),
    "cyclododecene": (r"C1CCCCCCCCC/C=C/1", r"C1CCCCCCCCC/C=C\1"),
    "radicicol-like lactone": (r"CC1C/C=C/CCCCCCC(=O)O1", r"CC1C/C=C\CCCCCCC(=O)O1"),
    "racemate, enantiomer": ("C[C@H](O)F |&1:1|", "C[C@H](O)F"),
}
for name, pair in PAIRS.items():
    print(name)
    for text in pair:
        molecule = indigo.loadMolecule(text)
        rdkit = Chem.MolToCXSmiles(Chem.MolFromSmiles(text))
        print(f"  in {text:26} canonicalSmiles {molecule.canonicalSmiles():24} smiles {molecule.smiles():32} RDKit {rdkit}")
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
epam.indigo 1.46.0 / rdkit 2026.9.1
butene
  in C/C=C/C                    canonicalSmiles C/C=C/C                  smiles C/C=C/C                          RDKit C/C=C/C
  in C/C=C\C                    canonicalSmiles C/C=C\C                  smiles C/C=C\C                          RDKit C/C=C\C
cyclododecene
  in C1CCCCCCCCC/C=C/1          canonicalSmiles C1CCCCCCCCCC=C1          smiles C1C=CCCCCCCCCC1 |t:1|            RDKit C1=C/CCCCCCCCCC/1
  in C1CCCCCCCCC/C=C\1          canonicalSmiles C1CCCCCCCCCC=C1          smiles C1C=CCCCCCCCCC1 |c:1|            RDKit C1=C\CCCCCCCCCC/1
radicicol-like lactone
  in CC1C/C=C/CCCCCCC(=O)O1     canonicalSmiles CC1CC=CCCCCCCC(=O)O1     smiles CC1OC(=O)CCCCCCC=CC1 |t:11|      RDKit CC1C/C=C/CCCCCCC(=O)O1
  in CC1C/C=C\CCCCCCC(=O)O1     canonicalSmiles CC1CC=CCCCCCCC(=O)O1     smiles CC1OC(=O)CCCCCCC=CC1 |c:11|      RDKit CC1C/C=C\CCCCCCC(=O)O1
racemate, enantiomer
  in C[C@H](O)F |&1:1|          canonicalSmiles C[C@@H](O)F              smiles C[C@@H](F)O |&1:1,r|             RDKit C[C@H](O)F |&1:1|
  in C[C@H](O)F                 canonicalSmiles C[C@H](O)F               smiles C[C@@H](F)O                      RDKit C[C@H](O)F
END
