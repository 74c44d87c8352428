#!/usr/bin/env bash
# Atom-in-SMILES: encode, then decode, makes D-proline of L-proline, and a thiol of a selenol or silane.
#
# Package:   atomInSmiles 1.0.2, with rdkit 2026.9.1
# Expected:  decode(encode(SMILES)) is the same molecule, as the README shows for glycine; or an error.
# What is:   A stereocentre of a ring is often the mirror image: proline, nicotine, menthol, penicillin and cholesterol
#            come back as other stereoisomers, alanine and sitagliptin as they were. [SeH] and [SiH3] come back
#            as S, 13C as C. No message, and all of these are valid SMILES.
# Met by:    Generative models and retrosynthesis with these tokens: a model that predicts every token right
#            yields other stereoisomers, and accuracy, docking and the comparison with known drugs are those of
#            other molecules.
#            Remedy: compare decode(encode(x)) with x for the whole set and leave out what differs; SELFIES.
# Source:    atomInSmiles/atomInSmiles.py: encode() writes @ or @@ for RDKit's chiral tag, which counts the neighbours
#            in the order of the bonds, not for the text, where a ring-closure digit has its own place: the token of
#            proline's [C@@H] is [C@H]. decode() takes the first letter of a SMILES token of "SiH3", which is S.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv atomInSmiles==1.0.2 rdkit==2026.9.1 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import atomInSmiles
from rdkit import Chem

warnings.simplefilter("error")  # a warning would end the script
MOLECULES = {
    "L-alanine": "C[C@H](N)C(=O)O",
    "sitagliptin": "N[C@@H](CC(=O)N1CCn2c(nnc2C(F)(F)F)C1)Cc1cc(F)c(F)cc1F",
    "L-proline": "O=C(O)[C@@H]1CCCN1",
    "(S)-nicotine": "CN1CCC[C@H]1c1cccnc1",
    "(-)-menthol": "CC(C)[C@@H]1CC[C@@H](C)C[C@H]1O",
    "captopril": "C[C@H](CS)C(=O)N1CCC[C@H]1C(=O)O",
    "penicillin G": "CC1(C)S[C@@H]2[C@H](NC(=O)Cc3ccccc3)C(=O)N2[C@H]1C(=O)O",
    "cholesterol": "CC(C)CCC[C@@H](C)[C@H]1CC[C@H]2[C@@H]3CC=C4C[C@@H](O)CC[C@]4(C)[C@H]3CC[C@]12C",
    "L-selenocysteine": "N[C@@H](C[SeH])C(=O)O",
    "phenylsilane": "[SiH3]c1ccccc1",
    "methane-13C": "[13CH4]",
}


def centres(molecule):
    return "".join(label for _, label in Chem.FindMolChiralCenters(molecule, useLegacyImplementation=False)) or "-"


print(*(f"{name} {importlib.metadata.version(name)}" for name in ("atomInSmiles", "rdkit")))
for name, smiles in MOLECULES.items():
    before = Chem.MolFromSmiles(smiles)
    after = Chem.MolFromSmiles(atomInSmiles.decode(atomInSmiles.encode(smiles)))
    texts = Chem.MolToSmiles(before), Chem.MolToSmiles(after)
    plain = [Chem.MolToSmiles(each, isomericSmiles=False) for each in (before, after)]
    stereo = plain[0] == plain[1] and centres(before) != centres(after)
    what = "same" if texts[0] == texts[1] else "stereoisomer" if stereo else f"other: {texts[1]}"
    print(f"  {name:17} {centres(before):9} {centres(after):9} {what}")
print("  L-proline:", atomInSmiles.encode(MOLECULES["L-proline"]))
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
atomInSmiles 1.0.2 rdkit 2026.9.1
  L-alanine         S         S         same
  sitagliptin       R         R         same
  L-proline         S         R         stereoisomer
  (S)-nicotine      S         R         stereoisomer
  (-)-menthol       SRR       RRS       stereoisomer
  captopril         SS        SR        stereoisomer
  penicillin G      RRS       SRR       stereoisomer
  cholesterol       RRSSSRSR  RSRRSRRR  stereoisomer
  L-selenocysteine  R         R         other: N[C@@H](CS)C(=O)O
  phenylsilane      -         -         other: Sc1ccccc1
  methane-13C       -         -         other: C
  L-proline: [O;!R;C] = [C;!R;COO] ( [OH;!R;C] ) [[C@H];R;CCN] 1 [CH2;R;CC] [CH2;R;CC] [CH2;R;CN] [NH;R;CC] 1
END
