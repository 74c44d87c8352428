#!/usr/bin/env bash
# GraphPart ignores all similarities in the mode mmseqs2 if headers have a description: families are in all parts.
#
# Package:   graph-part 1.0.2 with mmseqs2 14-7e284 (Debian 12)
# Expected:  >P12345 Lactase|label=A is split as >P12345|label=A is: no pair above the threshold in different parts.
# What is:   GraphPart takes "P12345 Lactase" for the name, the table of MMseqs2 has "P12345". Pairs whose names are
#            not in the graph are skipped, which is all of them: each of 20 families is in several of the 5 parts, and
#            no sequence is removed. Exit status 0, no message. The mode needle raises an error for such pairs.
# Met by:    Benchmarks that are said to have no homologs between the folds; names as "1ABC chain A" of the Python
#            function (a dictionary) too. Scores are those of memorized relatives.
#            Remedy: names without blanks; align across the parts afterwards. bionemo gives MMseqs2 numbers.
# Source:    graph_part/mmseqs_utils.py, generate_edges_mmseqs(): `continue` for names that are no nodes;
#            needle_utils.py: RuntimeError. The README forbids separators ("|", ":", " - ") in names, not blanks.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
debian_packages mmseqs2=14-7e284+ds-1+b2 libgzstream0=1.5+git20171107.9a20658-1+b2
ln -sf mmseqs-sse3 "$work/debian/usr/bin/mmseqs" # a program that `mmseqs` of the package starts
python_packages venv graph-part==1.0.2 numpy==2.4.6 pandas==3.1.1 networkx==3.6.1
export PATH="$work/venv/bin:$PATH" # it starts a script of the package by name

cat >"$work/run.py" <<'PY'
import csv
import importlib.metadata
import random
import subprocess
from collections import defaultdict
from pathlib import Path

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
generator = random.Random(1)
families = {}
for family in range(20):  # five proteins each, which differ from the first one at 6 of 120 positions
    first = generator.choices(LETTERS, k=120)
    for member in range(5):
        sequence = first.copy()
        for position in generator.sample(range(120), 6):
            sequence[position] = generator.choice(LETTERS)
        families["".join(sequence)] = f"{family:02}{member}"

print("graph-part", importlib.metadata.version("graph-part"))
for header in (">P{}|label=A", ">P{} Lactase|label=A", ">P{}", ">P{} Lactase"):
    records = [f"{header.replace('{}', number)}\n{sequence}\n" for sequence, number in families.items()]
    Path("some.fasta").write_text("".join(records))
    command = "graphpart mmseqs2 -ff some.fasta -th 0.5 -pa 5 -of parts.csv".split()
    result = subprocess.run(command, capture_output=True, text=True)
    parts = defaultdict(set)
    with open("parts.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        parts[row["AC"][1:3]].add(row["cluster"])
    told = [word for word in ("warning", "error", "skip") if word in (result.stdout + result.stderr).lower()]
    print(f"  {header:21} status {result.returncode}, messages {told}, {len(rows)} sequences;"
          f" families in several parts: {sum(len(each) > 1 for each in parts.values())} of {len(parts)}")
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
graph-part 1.0.2
  >P{}|label=A          status 0, messages [], 100 sequences; families in several parts: 0 of 20
  >P{} Lactase|label=A  status 0, messages [], 100 sequences; families in several parts: 20 of 20
  >P{}                  status 0, messages [], 100 sequences; families in several parts: 0 of 20
  >P{} Lactase          status 0, messages [], 100 sequences; families in several parts: 20 of 20
END
