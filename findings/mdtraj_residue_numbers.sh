#!/usr/bin/env bash
# mdtraj writes other residue numbers than it read: -1 becomes 9999 in PDB, and mmCIF counts each chain from 1.
#
# Package:   mdtraj 1.11.1.post2
# Expected:  A structure that is loaded and saved, for example after a domain or a chain was cut out, keeps the numbers
#            of its residues. mdtraj reads them (residue.resSeq), negative ones too.
# What is:   save_pdb writes the number modulo 10000: -2, -1, 0, 1 become 9998, 9999, 0, 1. save_cif writes neither
#            resSeq nor the chain's name, as label or as author number: each chain counts from 1, chains are A, B, ...
#            Both files are valid, and there is no message.
# Met by:    Chains with an expression tag (numbers below 1) or that do not begin at residue 1. Labels per residue
#            and mutations, which use the author's numbers, then mean other residues.
#            Remedy: cut with gemmi or biotite, or keep the numbers of the file that was read.
# Source:    mdtraj/formats/pdb/pdbfile.py: (res.resSeq) % 10000; mdtraj/formats/pdbx/pdbxfile.py; seen by running it.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv mdtraj==1.11.1.post2 numpy==2.4.6 scipy==1.17.1 gemmi==0.7.5

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import gemmi
import mdtraj

warnings.simplefilter("error")  # a warning would end the script
lines, serial = [], 1
for chain, first, names in (("H", -2, "GLY SER HIS MET LYS"), ("L", 107, "ALA VAL")):
    for number, name in enumerate(names.split(), first):
        for atom in ("N", "CA", "C", "O"):
            lines.append(f"ATOM  {serial:5d}  {atom:<3s} {name} {chain}{number:4d}    "
                         f"{3.8 * number:8.3f}{serial % 4:8.3f}{0:8.3f}{1:6.2f}{20:6.2f}          {atom[0]:>2s}")
            serial += 1
    lines.append("TER")
with open("read.pdb", "w") as file:
    file.write("\n".join([*lines, "END", ""]))


def show(what, residues):
    print(f"  {what:26}", *residues)


print("mdtraj", importlib.metadata.version("mdtraj"))
trajectory = mdtraj.load_pdb("read.pdb")
show("read by mdtraj:", [f"{r.chain.chain_id}{r.resSeq}" for r in trajectory.topology.residues])
trajectory.save_pdb("saved.pdb")
trajectory.save_cif("saved.cif")
for name in ("read.pdb", "saved.pdb", "saved.cif"):
    structure = gemmi.read_structure(name)
    show(f"{name}, read by gemmi:", [f"{chain.name}{r.seqid}" for chain in structure[0] for r in chain])
PY
cd "$work"
venv/bin/python run.py 2>log >seen || { cat log; exit 1; }
compare <<'END'
mdtraj 1.11.1.post2
  read by mdtraj:            H-2 H-1 H0 H1 H2 L107 L108
  read.pdb, read by gemmi:   H-2 H-1 H0 H1 H2 L107 L108
  saved.pdb, read by gemmi:  H9998 H9999 H0 H1 H2 L107 L108
  saved.cif, read by gemmi:  A1 A2 A3 A4 A5 B1 B2
END
