#!/usr/bin/env bash
# MMseqs2 gives different records one identifier: pdb|1ABC|A and pdb|1ABC|B are both "1ABC" in its tables.
#
# Package:   mmseqs2 14-7e284 (Debian 12)
# Expected:  The identifier in tables is the header up to the first space, as in every FASTA reader.
# What is:   Headers of some data bases are shortened: pdb|1ABC|A -> 1ABC (the chain is lost), sp|P12345|NAME ->
#            P12345, gnl|set|x1 -> x1, patents pat|US|1|2 -> 1. Other headers with bars stay whole (jgi|...). No
#            warning if two records get one identifier. The FASTA output of the same run has the whole headers.
# Met by:    Splits made from the cluster table (NAME_cluster.tsv) and search results joined to labels by identifier:
#            chain B gets the cluster, split and label of chain A. Remedy: unique numbers as identifiers.
# Source:    MMseqs2, src/commons/Util.cpp, parseFastaHeader().
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
debian_packages mmseqs2=14-7e284+ds-1+b2 libgzstream0=1.5+git20171107.9a20658-1+b2
mmseqs="mmseqs-sse3" # a program that `mmseqs` of the package starts

python3 - >"$work/in.fasta" <<'PY'
import random

random.seed(7)
for header in ("pdb|1ABC|A lysozyme", "pdb|1ABC|B inhibitor", "sp|P12345|ONE_HUMAN", "gnl|set|x1", "pat|US|1|2", "pat|US|1|3",
               "jgi|Asp|7|a", "1XYZ_A", "1XYZ_B"):
    print(f">{header}\n{''.join(random.choices('ACDEFGHIKLMNPQRSTVWY', k=60))}")
PY

"$mmseqs" easy-cluster "$work/in.fasta" "$work/out" "$work/tmp" --threads 1 -v 1 >"$work/log"
{
    echo "mmseqs $("$mmseqs" version)"
    echo "records: $(grep -c '>' "$work/in.fasta"), unrelated"
    echo "identifiers in the cluster table, with their number of rows:"
    cut -f2 "$work/out_cluster.tsv" | LC_ALL=C sort | uniq -c
    echo "headers in the FASTA of representatives: $(grep '>' "$work/out_rep_seq.fasta" | sort -u | wc -l)"
} >"$work/seen"
compare <<'END'
mmseqs 14-7e284+ds-1+b2
records: 9, unrelated
identifiers in the cluster table, with their number of rows:
      2 1
      2 1ABC
      1 1XYZ_A
      1 1XYZ_B
      1 P12345
      1 jgi|Asp|7|a
      1 x1
headers in the FASTA of representatives: 9
END
