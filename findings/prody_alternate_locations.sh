#!/usr/bin/env bash
# parsePDB of ProDy loses residues whose alternate locations are not named A.
#
# Package:   prody 2.6.1
# Expected:  One conformer of every residue, as the default is documented to give "one" location ('A').
#            Where a residue has no A, its first or its most occupied location.
# What is:   Every atom whose location is neither blank nor 'A' is dropped. A residue with locations B and C
#            (A was deleted in refinement), with B only, or with 1 and 2 is absent. No message.
# Met by:    getSequence(), .ca and contact maps have one residue less, all positions behind it are shifted
#            against the sequence that is given to a language model. altloc='all' keeps them.
# Source:    prody/proteins/pdbfile.py, _parsePDBLines(): which_altlocs = ' A'.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv prody==2.6.1 numpy==2.4.6 scipy==1.17.1

cat >"$work/run.py" <<'PY'
import io
import prody

prody.confProDy(verbosity="none")


def pdb(locations):
    """Five residues MET LYS TYR ALA GLY; the third has the given alternate locations."""
    lines, serial = [], 1
    for number, name in enumerate(("MET", "LYS", "TYR", "ALA", "GLY"), 1):
        for location in locations if number == 3 else " ":
            for atom in ("N", "CA", "C", "O"):
                occupancy = 1 / len(locations) if number == 3 else 1
                lines.append(f"ATOM  {serial:5d}  {atom:<3s}{location}{name} A{number:4d}    "
                             f"{3.8 * number:8.3f}{serial % 4:8.3f}{0:8.3f}{occupancy:6.2f}{20:6.2f}          {atom[0]:>2s}")
                serial += 1
    return io.StringIO("\n".join([*lines, "END", ""]))


print("prody", prody.__version__)
for locations in ("AB", "BC", "12", "B"):
    read = prody.parsePDBStream(pdb(locations))
    everything = prody.parsePDBStream(pdb(locations), altloc="all")
    print(f"locations of residue 3: {'+'.join(locations):4} default: {read.ca.getSequence():6}"
          f" numbers {read.ca.getResnums().tolist()}  altloc='all': {len(set(everything.getResnums()))} residues")
PY
"$work/venv/bin/python" "$work/run.py" 2>"$work/log" | grep -v '^@>' >"$work/seen" || { cat "$work/log"; exit 1; }
compare <<'END'
prody 2.6.1
locations of residue 3: A+B  default: MKYAG  numbers [1, 2, 3, 4, 5]  altloc='all': 5 residues
locations of residue 3: B+C  default: MKAG   numbers [1, 2, 4, 5]  altloc='all': 5 residues
locations of residue 3: 1+2  default: MKAG   numbers [1, 2, 4, 5]  altloc='all': 5 residues
locations of residue 3: B    default: MKAG   numbers [1, 2, 4, 5]  altloc='all': 5 residues
END
