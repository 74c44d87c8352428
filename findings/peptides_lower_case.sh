#!/usr/bin/env bash
# peptides.py reads lower-case letters in most of its descriptors and counts them as nothing in the others.
#
# Package:   peptides 0.5.0
# Expected:  A peptide in lower case has the values of the same peptide in upper case, or is refused.
# What is:   Hydrophobicity, charge, mass and the 102 descriptors are those of upper case. Aliphatic index, entropy,
#            counts and frequencies are 0, m/z misses the 57.02 of each cysteine, and the instability index is below
#            10, "stable", for every peptide. In mixed case, they are those of the capitals. No message.
# Met by:    Peptides with D-amino acids, for which HL7 FHIR and others take lower case, insertions of A3M alignments,
#            and soft-masked proteins. The table of features looks right, since most columns are.
#            Remedy: upper() first, and keep the case as a column of its own if it has a meaning.
# Source:    peptides/__init__.py: the letters are turned to upper case for the table lookups (_TRANS), but
#            aliphatic_index(), counts(), mz() and instability_index() read the text as given; the latter takes 1.0
#            for a pair that is not in its table. The docstring of the class says nothing of case. D-amino acids:
#            FHIR R5, SubstanceProtein.subunit.sequence.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv peptides==0.5.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import peptides

warnings.simplefilter("error")  # a warning would end the script
PEPTIDES = {"melittin": "GIGAVLKVLTTGLPALISWIKRKRQQ", "defensin": "ACYCRIPACIAGERRYGTCIYQGRLWAFCC"}
METHODS = (
    "hydrophobicity charge molecular_weight boman isoelectric_point aliphatic_index instability_index entropy mz"
).split()

print("peptides", importlib.metadata.version("peptides"))
for name, sequence in PEPTIDES.items():
    mixed = sequence[:8] + sequence[8:].lower()
    upper, lower, half = (peptides.Peptide(text) for text in (sequence, sequence.lower(), mixed))
    print(f"  {name:20} {'upper case':>10} {'lower case':>10} {mixed[:12]}...")
    for method in METHODS:
        values = [getattr(each, method)() for each in (upper, lower, half)]
        mark = "" if max(values) == min(values) else " <--"
        print(f"  {method:20}", *(f"{value:10.3f}" for value in values), end=mark + "\n")
    same = upper.descriptors() == lower.descriptors() == half.descriptors()
    print(f"  {len(upper.descriptors())} descriptors equal: {same}; letters counted:",
          *(sum(each.counts().values()) for each in (upper, lower, half)))
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
peptides 0.5.0
  melittin             upper case lower case GIGAVLKVlttg...
  hydrophobicity            0.273      0.273      0.273
  charge                    4.997      4.997      4.997
  molecular_weight       2847.487   2847.487   2847.487
  boman                     0.570      0.570      0.570
  isoelectric_point        12.546     12.546     12.546
  aliphatic_index         135.000      0.000     56.154 <--
  instability_index        44.731      9.615     -3.446 <--
  entropy                   3.459      0.000      1.292 <--
  mz                     1423.876   1423.876   1423.876
  102 descriptors equal: True; letters counted: 26 0 8
  defensin             upper case lower case ACYCRIPAciag...
  hydrophobicity            0.300      0.300      0.300
  charge                    2.625      2.625      2.625
  molecular_weight       3448.092   3448.092   3448.092
  boman                     1.076      1.076      1.076
  isoelectric_point         8.375      8.375      8.375
  aliphatic_index          65.333      0.000     19.667 <--
  instability_index        55.710      9.667     29.773 <--
  entropy                   3.381      0.000      1.175 <--
  mz                     1894.851   1723.787   1780.808 <--
  102 descriptors equal: True; letters counted: 30 0 8
END
