#!/usr/bin/env bash
# tidytcells reads the beginning of an HLA name: mutants become wild type, null alleles expressed, pairs one chain.
#
# Package:   tidytcells 2.2.1
# Expected:  tidytcells.mh.standardize() returns None (and logs a warning) for what is not one known name, as for
#            "HLA class I". mhcgnomes keeps the mutation, the suffix N and both chains, or refuses the text.
# What is:   Everything behind the first name is dropped, and so is the letter for expression, which is part of the
#            name: HLA-A*24:09N (not expressed) becomes HLA-A*24:09. tidytcells.tr.standardize() takes the first of
#            several genes. No message.
# Met by:    Tables of epitopes and T-cell receptors: IEDB writes "HLA-A*02:01 K66A mutant" and
#            "HLA-DQA1*05:01/DQB1*02:01", programs for typing such as arcasHLA write null alleles, and IgBLAST lists
#            genes of equal score with commas. Measurements of a mutant become labels of the wild type, and different
#            DQ molecules become one.
#            Remedy: parse HLA names with mhcgnomes; split genes at commas first.
# Source:    tidytcells/_standardized_gene_symbol/standardized_hla_symbol.py, HlaSymbolParser (regular expressions
#            without an end, the letters LSCAQN outside of the group); the docstring of mh.standardize() names none of
#            this. Letters: documentation of hlaUniqueAllele() of HIBAG; arcasHLA issue 114; Change-O issue 95;
#            IEDB's names: seen in public code that reads its tables.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv tidytcells==2.2.1 mhcgnomes==3.70.2

cat >"$work/run.py" <<'PY'
import importlib.metadata
import logging
import warnings
import mhcgnomes
import tidytcells

warnings.simplefilter("error")  # a warning would end the script
logging.basicConfig(format="%(message)s")  # messages go to the error stream, which has to stay empty

print("tidytcells", importlib.metadata.version("tidytcells"))
for text in (
    "HLA-A*02:01",
    "HLA-A*02:01 K66A mutant",
    "HLA-A*24:09N",
    "HLA-DRB4*01:03:01:02N",
    "HLA-DQA1*05:01/DQB1*02:01",
    "HLA-DQA1*05:01/DQB1*03:01",
    "HLA-A*02:01,HLA-B*07:02",
):
    name = mhcgnomes.parse(text, raise_on_error=False)
    print(f"  {text:26} tidytcells {tidytcells.mh.standardize(text):22} mhcgnomes {name.to_string() if name else None}")
null = "HLA-DRB4*01:03:01:02N"
print(f"  {null:26} tidytcells {tidytcells.mh.standardize(null, precision='protein')} (precision=\"protein\")")
for text in ("TRBV6-2*01,TRBV6-3*01", "TRBV7-2, TRBV7-3"):
    print(f"  {text:26} tidytcells {tidytcells.tr.standardize(text)}")
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
tidytcells 2.2.1
  HLA-A*02:01                tidytcells HLA-A*02:01            mhcgnomes HLA-A*02:01
  HLA-A*02:01 K66A mutant    tidytcells HLA-A*02:01            mhcgnomes HLA-A*02:01 K66A mutant
  HLA-A*24:09N               tidytcells HLA-A*24:09            mhcgnomes HLA-A*24:09N
  HLA-DRB4*01:03:01:02N      tidytcells HLA-DRB4*01:03:01:02   mhcgnomes HLA-DRB4*01:03:01:02N
  HLA-DQA1*05:01/DQB1*02:01  tidytcells HLA-DQA1*05:01         mhcgnomes HLA-DQA1*05:01/DQB1*02:01
  HLA-DQA1*05:01/DQB1*03:01  tidytcells HLA-DQA1*05:01         mhcgnomes HLA-DQA1*05:01/DQB1*03:01
  HLA-A*02:01,HLA-B*07:02    tidytcells HLA-A*02:01            mhcgnomes None
  HLA-DRB4*01:03:01:02N      tidytcells HLA-DRB4*01:03 (precision="protein")
  TRBV6-2*01,TRBV6-3*01      tidytcells TRBV6-2*01
  TRBV7-2, TRBV7-3           tidytcells TRBV7-2
END
