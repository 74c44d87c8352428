#!/usr/bin/env bash
# pdb_tofasta writes an X for each water, ion and ligand, behind (or inside) the protein's sequence.
#
# Package:   pdb-tools 2.7.0
# Expected:  The sequence of the polymer: 5 letters for 5 residues. The help text says that canonical
#            residues have their letter and "all others are represented by X".
# What is:   "All others" includes waters, ions and ligands, since HETATM records and TER are not told apart:
#            5 residues with 1 ion and 3 waters give 9 letters. Without -multi all chains are joined into one
#            record, so the waters of chain A stand between the residues of A and B. Selenomethionine is X too.
# Met by:    Everyone who makes FASTA from PDB files at the command line. X is a legal letter of protein
#            language models: nothing fails, the embedding has more rows than the protein has residues, and means
#            over residues, contacts and perplexities include the waters (hundreds in a good crystal structure).
# Source:    pdbtools/pdb_tofasta.py, run(): records = ('ATOM', 'HETATM'); three_to_one.get(..., 'X').
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv pdb-tools==2.7.0

line() { # RECORD SERIAL ATOM NAME CHAIN NUMBER ELEMENT
    printf '%-6s%5d %4s %3s %s%4d    %8.3f%8.3f%8.3f  1.00 20.00          %2s\n' "$1" "$2" "$3" "$4" "$5" "$6" "$2" 0 0 "$7"
}
{
    line ATOM 1 " CA " MET A 1 C
    line ATOM 2 " CA " LYS A 2 C
    line ATOM 3 " CA " THR A 3 C
    echo TER
    line ATOM 4 " CA " TRP B 1 C
    line ATOM 5 " CA " TYR B 2 C
    echo TER
    line HETATM 6 "ZN  " " ZN" A 101 ZN
    line HETATM 7 " O  " HOH A 201 O
    line HETATM 8 " O  " HOH A 202 O
    line HETATM 9 " O  " HOH B 201 O
    echo END
} >"$work/two_chains.pdb"
# The same with waters directly behind their chain, as several refinement programs write them.
{ grep ' A ' "$work/two_chains.pdb"; grep ' B ' "$work/two_chains.pdb"; echo END; } >"$work/grouped.pdb"

{
    "$work/venv/bin/pip" list 2>/dev/null | grep '^pdb-tools' | tr -s ' '
    echo "polymers: A = MKT, B = WY"
    echo "pdb_tofasta:                     $("$work/venv/bin/pdb_tofasta" "$work/two_chains.pdb" | tr '\n' ' ')"
    echo "pdb_tofasta, waters with chains: $("$work/venv/bin/pdb_tofasta" "$work/grouped.pdb" | tr '\n' ' ')"
    echo "pdb_tofasta -multi, the same:    $("$work/venv/bin/pdb_tofasta" -multi "$work/grouped.pdb" | tr '\n' ' ')"
} | sed 's/ *$//' >"$work/seen"
compare <<'END'
pdb-tools 2.7.0
polymers: A = MKT, B = WY
pdb_tofasta:                     >PDB|AB MKTWYXXXX
pdb_tofasta, waters with chains: >PDB|AB MKTXXXWYX
pdb_tofasta -multi, the same:    >PDB|A MKTXXX >PDB|B WYX
END
