#!/usr/bin/env bash
# ASE reads the alpha carbons of a PDB file without element columns as calcium.
#
# Package:   ase 3.29.0
# Expected:  The element (columns 77 and 78) is blank in the files of many programs. A reader then uses residue and
#            alignment (" CA " of an amino acid is carbon, "CA  " of an ion is calcium), or leaves it open. gemmi gives
#            carbon here, as did rdkit 2026.9.1, ParmEd 4.3.1, biopython 1.88 and biotite 1.6.0 (the last two with a
#            warning); MDAnalysis 2.11.0 and ProDy 2.6.1 left it open.
# What is:   The first two letters of the name are taken if they are an element, whatever the residue is: CA calcium,
#            CD cadmium, CE cerium, NE neon, ND1 neodymium, SG seaborgium, HG mercury, HE helium. No message.
#            atoms.write() then writes these elements, and the next reader believes them.
# Met by:    Proteins on their way to a potential or a descriptor, whose input are atomic numbers; masses. Files
#            without elements: CHARMM-GUI's (ProDy's test file pdb1tw7_step3_charmm2namd.pdb has 430 mercury and 198
#            calcium atoms here), and what MDAnalysis writes of a GRO file (it warns of missing elements).
#            Remedy: let gemmi read and write the protein first, and check set(atoms.symbols).
# Source:    ase/io/proteindatabank.py, read_proteindatabank(), which falls back to label_to_symbol() of
#            ase/io/espresso.py for the atom name.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv ase==3.29.0 numpy==2.4.6 gemmi==0.7.5

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import ase.io
import gemmi

warnings.simplefilter("error")  # a warning would end the script
RESIDUES = {
    "ALA": "N CA C O CB",
    "CYS": "N CA C O CB SG HG",
    "HIS": "N CA C O CB CG ND1 CD2 CE1 NE2",
    "LYS": "N CA C O CB CG CD CE NZ HE2",
}
names, lines = [], []
for number, (residue, atoms) in enumerate(RESIDUES.items(), 1):
    for atom in atoms.split():
        names.append(f"{residue} {atom}")
        count = len(names)
        lines.append(f"ATOM  {count:5d}  {atom:<3s} {residue} A{number:4d}    "
                     f"{1.5 * count:8.3f}{count % 3:8.3f}{count % 5:8.3f}{1:6.2f}{20:6.2f}")
with open("read.pdb", "w") as file:
    file.write("\n".join([*lines, "TER", "END", ""]))

print("ase", importlib.metadata.version("ase"))
atoms = ase.io.read("read.pdb")
other = [atom.element.name for chain in gemmi.read_structure("read.pdb")[0] for residue in chain for atom in residue]
right = [name.split()[1][0] for name in names]
for reader, symbols in (("ase", list(atoms.symbols)), ("gemmi", other)):
    found = {f"{name.split()[1]} {symbol}": None
             for name, symbol, one in zip(names, symbols, right, strict=True) if symbol != one}
    print(f"  {reader + ':':6} {', '.join(found) or 'no difference'}")
print(f"  mass by ase {atoms.get_masses().sum():.1f}, by gemmi {sum(gemmi.Element(each).weight for each in other):.1f}")
atoms.write("saved.pdb")
saved = gemmi.read_structure("saved.pdb")
print("  saved by ase, read by gemmi:", *sorted({atom.atom.element.name for atom in saved[0].all()}))
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
ase 3.29.0
  ase:   CA Ca, SG Sg, HG Hg, ND1 Nd, CD2 Cd, CE1 Ce, NE2 Ne, CD Cd, CE Ce, HE2 He
  gemmi: no difference
  mass by ase 1559.7, by gemmi 412.3
  saved by ase, read by gemmi: C Ca Cd Ce He Hg N Nd Ne O Sg
END
