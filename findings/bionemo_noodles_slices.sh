#!/usr/bin/env bash
# NVIDIA's bionemo-noodles ignores the step of a slice, so that [::-1] is not reversed; keys have a random order.
#
# Package:   bionemo-noodles 0.1.2 (NvFaidx, "replacement for PyFaidx")
# Expected:  fasta["chr1"][::-1] begins at the end, and [0:9:3] is every third letter, as for Python's texts and
#            pyfaidx; or an error. keys(), items() and values() keep the order of the file, as in pyfaidx.
# What is:   The step is dropped: [::-1] is the sequence forward, [9:0:-1] is empty. keys() is a set of texts, whose
#            order differs between processes. No message.
# Met by:    Reverse strands. Samplers that number the keys without sorting them: each rank (a Python of its own)
#            has another sequence for a number, so that an epoch leaves out some and repeats others, and predictions
#            that are joined by number belong to other sequences.
#            Remedy: slice forward and turn the text; sorted(fasta.keys()), as the example of the README does.
# Source:    bionemo/noodles/nvfaidx.py: SequenceAccessor.__getitem__() does not read key.step, NvFaidx.keys() makes a
#            set; the docstring of NvFaidx says "replacement for PyFaidx" and "dictionary-like", and nothing of both.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv bionemo-noodles==0.1.2 pyfaidx==0.9.2.2

cat >"$work/run.py" <<'PY'
import sys
import warnings
import pyfaidx
from bionemo.noodles.nvfaidx import NvFaidx

warnings.simplefilter("error")  # a warning would end the script
with open("some.fasta", "w") as file:
    file.write(">chr1\nAACCGTTTGA\n>chr2\nACGT\n>chr3\nACGT\n>chr4\nACGT\n>chr5\nACGT\n")
noodles, other = NvFaidx("some.fasta"), pyfaidx.Fasta("some.fasta")
if sys.argv[1] == "slices":
    text = "AACCGTTTGA"
    slices = {"[::-1]": slice(None, None, -1), "[9:0:-1]": slice(9, 0, -1), "[0:9:3]": slice(0, 9, 3)}
    for what, part in slices.items():
        print(f"  {what:9} text {text[part]:10}  pyfaidx {other['chr1'][part].seq:10}  noodles {noodles['chr1'][part]!r}")
else:
    print(*(other if sys.argv[1] == "pyfaidx" else noodles).keys())
PY
cd "$work"
{
    echo "bionemo-noodles $(venv/bin/python -c 'import importlib.metadata as m; print(m.version("bionemo-noodles"))')"
    venv/bin/python run.py slices
    for package in pyfaidx noodles; do
        for seed in 1 2 3 4 5 6 7 8; do PYTHONHASHSEED=$seed venv/bin/python run.py $package; done | sort -u >orders
        echo "  keys in 8 processes, $package: $([ "$(wc -l <orders)" = 1 ] && cat orders || echo several orders)"
    done
} >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
bionemo-noodles 0.1.2
  [::-1]    text AGTTTGCCAA  pyfaidx AGTTTGCCAA  noodles 'AACCGTTTGA'
  [9:0:-1]  text AGTTTGCCA   pyfaidx AGTTTGCCA   noodles ''
  [0:9:3]   text ACT         pyfaidx ACT         noodles 'AACCGTTTG'
  keys in 8 processes, pyfaidx: chr1 chr2 chr3 chr4 chr5
  keys in 8 processes, noodles: several orders
END
