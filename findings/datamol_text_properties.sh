#!/usr/bin/env bash
# datamol turns identifiers in SDF into numbers: the PDB entry 1e66 is read as 1e+66, 0123 as 123.
#
# Package:   datamol 0.13.0, rdkit 2026.9.1
# Expected:  A column of text comes back as text: datamol.to_sdf(table), then datamol.read_sdf(as_df=True). pandas
#            converts a column only if all its values are numbers, and RDKit's PandasTools.LoadSDF none.
# What is:   Each value is converted on its own if it looks like a number, also in a column of text: 1e66, 3e92,
#            0123, nan, inf. to_sdf() of that table writes 9.9999999999999995e+65. No message.
# Met by:    Ligands named by PDB entries (1e66, 3e92 among others), catalogue numbers with leading zeros. These rows
#            find no partner in a join with labels and are dropped.
#            Remedy: molecule.GetProp(name), or GetPropsAsDict(autoConvertStrings=False) of RDKit.
# Source:    datamol/convert.py, to_df(), which calls Mol.GetPropsAsDict() with its default autoConvertStrings=True.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv datamol==0.13.0 rdkit==2026.9.1 numpy==2.4.6 pandas==3.1.1

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import datamol
import pandas
from rdkit import Chem
from rdkit.Chem import PandasTools

warnings.simplefilter("error")  # a warning would end the script
codes = ["1a30", "1e66", "3e92", "2w66", "0123", "inf", "nan"]
table = pandas.DataFrame({"smiles": ["C" * (2 + number) for number in range(len(codes))], "entry": codes})
datamol.to_sdf(table, "some.sdf", smiles_column="smiles")
back = datamol.read_sdf("some.sdf", as_df=True)
datamol.to_sdf(back, "again.sdf", smiles_column="smiles")

print("datamol", importlib.metadata.version("datamol"))
print("  written:                ", codes)
print("  in the file:            ", [mol.GetProp("entry") for mol in Chem.SDMolSupplier("some.sdf")])
print("  read_sdf(as_df=True):   ", back["entry"].tolist())
print("  and written again:      ", [mol.GetProp("entry") for mol in Chem.SDMolSupplier("again.sdf")])
print("  PandasTools.LoadSDF:    ", PandasTools.LoadSDF("some.sdf")["entry"].tolist())
print("  rows that join by entry:", len(table.merge(back.astype({"entry": str}), on="entry")))
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
datamol 0.13.0
  written:                 ['1a30', '1e66', '3e92', '2w66', '0123', 'inf', 'nan']
  in the file:             ['1a30', '1e66', '3e92', '2w66', '0123', 'inf', 'nan']
  read_sdf(as_df=True):    ['1a30', 1e+66, 3e+92, '2w66', 123, inf, nan]
  and written again:       ['1a30', '9.9999999999999995e+65', '3.0000000000000001e+92', '2w66', '123', 'inf', 'nan']
  PandasTools.LoadSDF:     ['1a30', '1e66', '3e92', '2w66', '0123', 'inf', 'nan']
  rows that join by entry: 3
END
