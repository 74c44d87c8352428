#!/usr/bin/env bash
# FreeSASA gives a fully exposed residue the relative area 0 (buried) if it does not know its name.
#
# Package:   freesasa 2.2.1 (Python)
# Expected:  No number (None or NaN) for the relative area of a residue without a reference area, or that of the
#            standard residue: HSE and HIS have the same atoms.
# What is:   relativeTotal is 0.0, which reads as "completely buried", for HSE, HSD, HID, CYX; only the separate
#            field hasRelativeAreas says False. The absolute area is close to that of HIS. The warnings (switched
#            off here) are about guessed radii of single atoms, not about the missing reference area.
# Met by:    Labels "buried or exposed" per residue for training a head: files from CHARMM, GROMACS and AMBER name
#            histidine HSE or HID and cystine CYX, so all their histidines and disulphides get the label "buried".
# Source:    FreeSASA's documentation of ResidueArea (hasRelativeAreas); freesasa.Structure, default options.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv freesasa==2.2.1

cat >"$work/run.py" <<'PY'
import importlib.metadata
import freesasa

freesasa.setVerbosity(freesasa.silent)
HIS = {"N": (0, 0, 0), "CA": (1.46, 0, 0), "C": (2.0, 1.42, 0), "O": (1.4, 2.4, 0.4), "CB": (2.0, -0.8, 1.2),
       "CG": (3.5, -0.9, 1.2), "ND1": (4.2, -0.4, 2.3), "CD2": (4.4, -1.5, 0.4), "CE1": (5.5, -0.7, 2.1), "NE2": (5.7, -1.3, 0.9)}


def areas(name, record="ATOM  "):
    with open("one.pdb", "w") as file:
        for serial, (atom, (x, y, z)) in enumerate(HIS.items(), 1):
            file.write(f"{record}{serial:5d}  {atom:<3s} {name} A   1    {x:8.3f}{y:8.3f}{z:8.3f}  1.00 20.00          {atom[0]:>2s}\n")
        file.write("END\n")
    residue = freesasa.calc(freesasa.Structure("one.pdb")).residueAreas()["A"]["1"]
    return f"area {residue.total:6.1f}  relative {residue.relativeTotal:5.3f}  hasRelativeAreas {residue.hasRelativeAreas}"


print("freesasa", importlib.metadata.version("freesasa"))
print("one free histidine, the same atoms under four names")
for name in ("HIS", "HSE", "HSD", "HID"):
    print(name, areas(name))
PY
(cd "$work" && venv/bin/python run.py >seen)
compare <<'END'
freesasa 2.2.1
one free histidine, the same atoms under four names
HIS area  299.2  relative 1.635  hasRelativeAreas True
HSE area  293.2  relative 0.000  hasRelativeAreas False
HSD area  293.2  relative 0.000  hasRelativeAreas False
HID area  293.2  relative 0.000  hasRelativeAreas False
END
