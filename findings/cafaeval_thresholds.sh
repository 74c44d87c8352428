#!/usr/bin/env bash
# At 23 of its 99 thresholds, cafaeval does not count the scores that are equal to the threshold.
#
# Package:   cafaeval 1.3.0
# Expected:  A term counts as predicted at threshold t if its score is t or more (the definition of CAFA). Scores with
#            two figures, as CAFA asks for, meet thresholds in steps of 0.01 exactly.
# What is:   The thresholds are numpy.arange(0.01, 1, 0.01), and some are a last digit above the number that they print:
#            0.29, 0.57, 0.69, 0.7, 0.82, 0.95 and others. A score of 0.7 is not predicted at 0.7. Some neighbours, as
#            0.69 and 0.68, are told apart by no threshold.
# Met by:    Tables of precision and recall at a threshold, and F-max of scores that were rounded: scores that are
#            lower by 0.01 throughout give another F-max. Scores with many figures are not concerned.
#            Remedy: do not round, or add 1e-9 to each score.
# Source:    cafaeval/evaluation.py, cafa_eval() and solidify_prediction(); "arange" in NumPy's documentation.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv cafaeval==1.3.0 numpy==2.4.6 pandas==3.1.1

cat >"$work/run.py" <<'PY'
import importlib.metadata
from pathlib import Path
from cafaeval.evaluation import cafa_eval

Path("go.obo").write_text("format-version: 1.2\n" + "".join(
    f"\n[Term]\nid: {term}\nname: {name}\nnamespace: molecular_function\n{is_a}"
    for term, name, is_a in (
        ("GO:0003674", "molecular_function", ""),
        ("GO:0005488", "binding", "is_a: GO:0003674 ! molecular_function\n"),
        ("GO:0003824", "catalytic activity", "is_a: GO:0003674 ! molecular_function\n"),
    )
))
Path("truth.tsv").write_text("P1\tGO:0003824\n")
Path("predictions").mkdir()


def evaluate(right, wrong):
    """Table and F-max of a protein whose right term has the first score and another term the second; without the root."""
    Path("predictions/model.tsv").write_text(f"P1\tGO:0003824\t{right}\nP1\tGO:0005488\t{wrong}\n")
    table, best = cafa_eval("go.obo", "predictions", "truth.tsv", no_orphans=True)
    return table.reset_index(), best["f"]["f"].item()


print("cafaeval", importlib.metadata.version("cafaeval"))
missed = [i / 100 for i in range(1, 100) if evaluate(f"{i / 100:.2f}", "0.00")[0]["tau"].max() < i / 100 - 0.005]
print(f"  thresholds that miss an equal score: {len(missed)}: {missed}")
for right, wrong in (("0.71", "0.70"), ("0.70", "0.69"), ("0.69", "0.68"), ("0.68", "0.67")):
    print(f"  right term {right}, wrong term {wrong}: F-max {evaluate(right, wrong)[1]:.3f}")
PY
cd "$work"
venv/bin/python run.py 2>log >seen || { cat log; exit 1; }
compare <<'END'
cafaeval 1.3.0
  thresholds that miss an equal score: 23: [0.06, 0.15, 0.18, 0.21, 0.24, 0.29, 0.35, 0.36, 0.41, 0.42, 0.47, 0.48, 0.57, 0.58, 0.69, 0.7, 0.71, 0.82, 0.83, 0.84, 0.94, 0.95, 0.96]
  right term 0.71, wrong term 0.70: F-max 1.000
  right term 0.70, wrong term 0.69: F-max 1.000
  right term 0.69, wrong term 0.68: F-max 0.667
  right term 0.68, wrong term 0.67: F-max 1.000
END
