#!/usr/bin/env bash
# scikit-bio's file format for embeddings loses the last protein, and joins all proteins if one is asked for.
#
# Package:   scikit-bio 0.7.4 (skbio.embedding, format "embed")
# Expected:  skbio.io.write() of a generator of ProteinEmbedding or ProteinVector, then skbio.io.read(), gives all of
#            them; ProteinEmbedding.read() of a file with several gives the first, as Protein.read() of FASTA does.
# What is:   One fewer comes back: 2 of 3, none of 1. The rows of the last one are in the file, but its end is not in
#            the table of ends. ProteinEmbedding.read() of several gives one protein: the sequences and rows of all, end
#            to end, the last one too. skbio.io.read() of what ProteinEmbedding.write() wrote is empty. No message.
# Met by:    Embeddings of a FASTA file that are kept in this format: one protein fewer than labels, or a mean over
#            the residues of all proteins.
#            Remedy: count after reading; write one more as the last, or another format.
# Source:    skbio/io/format/embed.py: _objects_to_embed() resizes idptr and embedding_ptr to the index of the last
#            object, not to the number of objects; _embed_to_object() assumes one object per file (comment there).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv scikit-bio==0.7.4 numpy==2.4.6 h5py==3.16.0

cat >"$work/run.py" <<'PY'
import warnings
import numpy as np
import skbio
from skbio.embedding import ProteinEmbedding, ProteinVector

warnings.simplefilter("error")  # a warning would end the script
SEQUENCES = ["MKT", "GSHMA", "PEPTIDEK"]
WIDTH = 4


def embed(number):
    sequence = SEQUENCES[number]
    return ProteinEmbedding(np.full((len(sequence), WIDTH), number, np.float32), sequence)


def vector(number):
    return ProteinVector(np.full(WIDTH, number, np.float32), SEQUENCES[number])


print("scikit-bio", skbio.__version__)
for make in (embed, vector):
    for count in (1, 2, 3):
        skbio.io.write((make(number) for number in range(count)), format="embed", into="some.h5")
        kind = type(make(0))
        back = [str(each) for each in skbio.io.read("some.h5", format="embed", constructor=kind)]
        print(f"  {kind.__name__:16} written {SEQUENCES[:count]}, read {back}")
skbio.io.write((embed(number) for number in range(3)), format="embed", into="three.h5")
one = ProteinEmbedding.read("three.h5", format="embed")
print("  ProteinEmbedding.read of three:", str(one), one.embedding[:, 0].astype(int).tolist())
embed(2).write("one.h5", format="embed")
back = [str(each) for each in skbio.io.read("one.h5", format="embed")]
print("  ProteinEmbedding.write of one:", back, "by skbio.io.read,", str(ProteinEmbedding.read("one.h5")), "by .read")
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
scikit-bio 0.7.4
  ProteinEmbedding written ['MKT'], read []
  ProteinEmbedding written ['MKT', 'GSHMA'], read ['MKT']
  ProteinEmbedding written ['MKT', 'GSHMA', 'PEPTIDEK'], read ['MKT', 'GSHMA']
  ProteinVector    written ['MKT'], read []
  ProteinVector    written ['MKT', 'GSHMA'], read ['MKT']
  ProteinVector    written ['MKT', 'GSHMA', 'PEPTIDEK'], read ['MKT', 'GSHMA']
  ProteinEmbedding.read of three: MKTGSHMAPEPTIDEK [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]
  ProteinEmbedding.write of one: [] by skbio.io.read, PEPTIDEK by .read
END
