#!/usr/bin/env bash
# pdb_selaltloc removes whole residues of antibodies: neighbours of one name that differ in the insertion code.
#
# Package:   pdb-tools 2.7.0
# Expected:  pdb_selaltloc keeps one alternate location of each atom. A file without alternate locations
#            comes out unchanged.
# What is:   A residue is recognised by its name and number; the insertion code (column 27) is not read.
#            If 82A and 82B have one name, their atoms are taken for two alternates of one atom, and only
#            one of them is kept. Nothing is reported. Residues of different names are kept.
# Met by:    Antibodies in Kabat or Chothia numbering (52, 52A; 82, 82A, 82B, 82C), where serine beside
#            serine at 82A and 82B is common, and proteases in chymotrypsin numbering. pdb_selaltloc is the usual first
#            step before features or sequences are computed, so a chain is short by one residue and
#            all following positions are shifted.
# Source:    pdbtools/pdb_selaltloc.py, select_altloc(): resnum = line[22:26].
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv pdb-tools==2.7.0

# Residues 82 to 83 of a heavy chain: MET 82, SER 82A, SER 82B, LEU 82C, ARG 83; no alternate locations.
residue() { # SERIAL NAME NUMBER CODE Z
    local serial=$1 atom
    for atom in N CA C O; do
        printf 'ATOM  %5d  %-3s %3s H%4d%1s   %8.3f%8.3f%8.3f  1.00 20.00          %2s\n' \
            "$serial" "$atom" "$2" "$3" "$4" "$((serial % 4))" 0 "$5" "${atom:0:1}"
        serial=$((serial + 1))
    done
}
{
    residue 1 MET 82 " " 0
    residue 5 SER 82 A 3
    residue 9 SER 82 B 6
    residue 13 LEU 82 C 9
    residue 17 ARG 83 " " 12
    echo END
} >"$work/heavy.pdb"

residues() { grep '^ATOM' "$1" | cut -c18-20,23-27 | uniq | tr -s ' \n' ' ' | sed 's/ $//'; }
"$work/venv/bin/pdb_selaltloc" "$work/heavy.pdb" >"$work/selected.pdb" 2>"$work/messages"
{
    "$work/venv/bin/pip" list 2>/dev/null | grep '^pdb-tools' | tr -s ' '
    echo "before: $(grep -c '^ATOM' "$work/heavy.pdb") atoms: $(residues "$work/heavy.pdb")"
    echo "after:  $(grep -c '^ATOM' "$work/selected.pdb") atoms: $(residues "$work/selected.pdb")"
    echo "messages: $(wc -c <"$work/messages") bytes"
} >"$work/seen"
compare <<'END'
pdb-tools 2.7.0
before: 20 atoms: MET 82 SER 82A SER 82B LEU 82C ARG 83
after:  16 atoms: MET 82 SER 82A LEU 82C ARG 83
messages: 0 bytes
END
