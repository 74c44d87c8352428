#!/usr/bin/env bash
# "100 % identical" is not identical: CD-HIT and MMseqs2 cluster different residues together at identity 1.0.
#
# Package:   cd-hit 4.8.1, mmseqs2 14-7e284 (Debian 12)
# Expected:  With identity 1.0 over the full length only equal sequences are joined.
# What is:   Letters are translated to a smaller alphabet first. CD-HIT: U, O, J and X are one letter, B is N, Z is E.
#            MMseqs2 easy-cluster: U, O and X are one letter, B is D, Z is E, J is L; easy-linclust keeps all apart. So the
#            two programs (and two modes of one program) give different data sets from one file. No message.
# Met by:    Removal of duplicates before training: a selenoprotein and the same entry with X (unknown) at the
#            catalytic residue are one record, and the longer or first one wins, often the one with X. Language
#            models have tokens of their own for U, O, B and Z. Remedy: remove exact copies by a hash of the text.
# Source:    CD-HIT, cdhit-common.c++, aa2idx; MMseqs2, src/commons/SubstitutionMatrix.cpp, setupLetterMapping().
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
debian_packages cd-hit=4.8.1-4 mmseqs2=14-7e284+ds-1+b2 libgzstream0=1.5+git20171107.9a20658-1+b2

# One protein with twelve different letters in position 4.
for letter in U O X J L I C B N D Z E; do
    printf '>%s\nMKT%sYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRV\n' $letter $letter
done >"$work/in.fasta"

cd-hit -i "$work/in.fasta" -o "$work/cdhit" -c 1.0 -aL 1.0 -T 1 >"$work/log"
for mode in easy-cluster easy-linclust; do
    mmseqs-sse3 $mode "$work/in.fasta" "$work/$mode" "$work/tmp" --min-seq-id 1.0 -c 1.0 --threads 1 -v 1 >>"$work/log"
done
table() { # one line for each cluster, members sorted
    LC_ALL=C sort | awk -F'\t' '{ members[$1] = members[$1] $2 } END { for (i in members) print members[i] }' | LC_ALL=C sort | tr '\n' ' '
}
{
    echo "$(cd-hit 2>&1 | grep -o 'version 4[0-9.]*'), mmseqs $(mmseqs-sse3 version)"
    echo "records:              U O X J L I C B N D Z E"
    echo "cd-hit -c 1.0:        $(awk '/^>/ { n = $2; next } { sub(/.*>/, ""); sub(/\..*/, ""); print n "\t" $0 }' "$work/cdhit.clstr" | table)"
    echo "mmseqs easy-cluster:  $(table <"$work/easy-cluster_cluster.tsv")"
    echo "mmseqs easy-linclust: $(table <"$work/easy-linclust_cluster.tsv")"
} | sed 's/ *$//' >"$work/seen"
compare <<'END'
version 4.8.1, mmseqs 14-7e284+ds-1+b2
records:              U O X J L I C B N D Z E
cd-hit -c 1.0:        BN C D EZ I JOUX L
mmseqs easy-cluster:  BD C EZ I JL N OUX
mmseqs easy-linclust: B C D E I J L N O U X Z
END
