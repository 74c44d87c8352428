#!/usr/bin/env bash
# biotrainer reads FASTA files with wrapped sequences wrong: a protein is the last of its lines.
#
# Package:   biotrainer-core 2.1.1, the reader of biotrainer 2.1.1 (biotrainer 1.4.0 has the same one)
# Expected:  The lines of a sequence are joined, as by every FASTA reader; or an error.
# What is:   read_FASTA() keeps the last line: insulin, 110 residues on lines of 60, is its last 50. The labels
#            in the headers are read. iter_FASTA() in the same file joins the lines. filter_FASTA() writes a
#            file with the short sequences. No message.
# Met by:    Everyone who gives biotrainer a downloaded file: its embeddings, training and inference of properties
#            of whole proteins use the last 1 to 60 residues. (With labels for each residue it reports the lengths.)
#            Remedy: one line for each sequence (seqkit seq -w 0); compare lengths. `bionemo` joins the lines.
# Source:    biotrainer_core/input_files/fasta.py: read_FASTA() assigns each line of a sequence where iter_FASTA()
#            collects them. read_FASTA() is called by biotrainer's input validation, embedding service, target
#            manager, and inference. Its docs/data_standardization.md says nothing of lines.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
# The package asks for Python 3.12; this module runs on 3.11 too.
python_packages venv --ignore-requires-python \
    biotrainer-core==2.1.1 numpy==2.4.6 pandas==3.1.1 h5py==3.16.0 pydantic==2.14.4 biopython==1.88

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
from pathlib import Path
from Bio import SeqIO
from biotrainer_core.input_files import filter_FASTA, iter_FASTA, read_FASTA

warnings.simplefilter("error")  # a warning would end the script
INSULIN = (
    "MALWMRLLPLLALLALWGPDPAAAFVNQHLCGSHLVEALYLVCGERGFFYTPKTRREAED"
    "LQVGQVELGGGPGAGSLQPLALEGSLQKRGIVEQCCTSICSLYQLENYCN"
)
GLUCAGON = "HSQGTFTSDYSKYLDSRRAQDFVQWLMNT"


def write(path, width):
    text = ""
    for name, sequence in {"insulin": INSULIN, "glucagon": GLUCAGON}.items():
        lines = [sequence[start : start + width] for start in range(0, len(sequence), width)]
        text += "\n".join([f">{name} TARGET=hormone SET=train", *lines, ""])
    Path(path).write_text(text)


def show(what, records):
    print(f"    {what:25}", ", ".join(f"{name} {len(sequence)} {sequence[:6]}..." for name, sequence in records))


print("biotrainer-core", importlib.metadata.version("biotrainer-core"))
for width in (200, 60):
    write("some.fasta", width)
    print(f"  lines of {width}")
    with open("some.fasta") as file:
        show("Biopython", [(each.id, str(each.seq)) for each in SeqIO.parse(file, "fasta")])
    show("biotrainer iter_FASTA", [(each.seq_id, each.seq) for each in iter_FASTA("some.fasta")])
    show("biotrainer read_FASTA", [(each.seq_id, each.seq) for each in read_FASTA("some.fasta")])
    kept = filter_FASTA("some.fasta", "filtered.fasta", lambda record: len(record.seq) <= 100)
    print(f"    filter_FASTA, at most 100: kept {kept[0]} of {kept[1]}")
PY
cd "$work"
# Pydantic warns of its own old style while the package is imported.
venv/bin/python -W ignore::DeprecationWarning run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
biotrainer-core 2.1.1
  lines of 200
    Biopython                 insulin 110 MALWMR..., glucagon 29 HSQGTF...
    biotrainer iter_FASTA     insulin 110 MALWMR..., glucagon 29 HSQGTF...
    biotrainer read_FASTA     insulin 110 MALWMR..., glucagon 29 HSQGTF...
    filter_FASTA, at most 100: kept 1 of 2
  lines of 60
    Biopython                 insulin 110 MALWMR..., glucagon 29 HSQGTF...
    biotrainer iter_FASTA     insulin 110 MALWMR..., glucagon 29 HSQGTF...
    biotrainer read_FASTA     insulin 50 LQVGQV..., glucagon 29 HSQGTF...
    filter_FASTA, at most 100: kept 2 of 2
END
