#!/usr/bin/env bash
# cafaeval ignores the is_a lines of an ontology that carry a qualifier in braces: annotations stay below them.
#
# Package:   cafaeval 1.3.0; obonet 1.3.0 is shown for comparison
# Expected:  `is_a: GO:0016740 {is_inferred="true"} ! transferase activity` is the same edge as without the braces.
#            The OBO format allows such qualifiers behind any value.
# What is:   Everything before the "!" is taken for the identifier. It is no known term, so the edge is skipped as if
#            it led to another ontology (a message at debug level only). Labels and scores are not propagated over it.
#            In `relationship: part_of` lines, qualifiers do no harm.
# Met by:    Ontologies that were written by a reasoner with annotated axioms, and those that give sources for
#            edges ({source="..."}). F-max of the same predictions changes with the way the file was written.
#            Remedy: remove ` {...}` from the is_a lines first, and compare the number of roots in the log.
# Source:    cafaeval/parser.py, obo_parser(): v.split('!')[0]; OBO 1.4 specification, trailing qualifiers.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv cafaeval==1.3.0 obonet==1.3.0 numpy==2.4.6 pandas==3.1.1

cat >"$work/run.py" <<'PY'
import importlib.metadata
import re
from pathlib import Path
import networkx
import obonet
from cafaeval.evaluation import cafa_eval

TERMS = [
    ("GO:0003674", "molecular_function", ""),
    ("GO:0003824", "catalytic activity", 'is_a: GO:0003674 {is_inferred="true"} ! molecular_function\n'),
    ("GO:0016740", "transferase activity", 'is_a: GO:0003824 {is_inferred="true"} ! catalytic activity\n'),
    ("GO:0016301", "kinase activity", 'is_a: GO:0016740 {is_inferred="true"} ! transferase activity\n'),
]
with_braces = "format-version: 1.2\n" + "".join(
    f"\n[Term]\nid: {term}\nname: {name}\nnamespace: molecular_function\n{is_a}" for term, name, is_a in TERMS
)
Path("with.obo").write_text(with_braces)
Path("without.obo").write_text(re.sub(r" \{.*?\}", "", with_braces))
# One protein is predicted one level above its label, the other one level below.
Path("truth.tsv").write_text("P1\tGO:0016301\nP2\tGO:0016740\n")
Path("predictions").mkdir()
Path("predictions/model.tsv").write_text("P1\tGO:0016740\t0.90\nP2\tGO:0016301\t0.90\n")

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("cafaeval", "obonet")))
for file in ("without.obo", "with.obo"):
    best = cafa_eval(file, "predictions", "truth.tsv")[1]["f"].iloc[0]
    ancestors = len(networkx.descendants(obonet.read_obo(file), "GO:0016301"))
    print(f"  {file:12} F-max {best['f']:.3f} precision {best['pr']:.3f} recall {best['rc']:.3f};"
          f" ancestors of GO:0016301 in obonet: {ancestors}")
PY
cd "$work"
venv/bin/python run.py 2>log >seen || { cat log; exit 1; }
compare <<'END'
cafaeval 1.3.0 obonet 1.3.0
  without.obo  F-max 0.875 precision 0.875 recall 0.875; ancestors of GO:0016301 in obonet: 3
  with.obo     F-max 0.000 precision 0.000 recall 0.000; ancestors of GO:0016301 in obonet: 3
END
