#!/usr/bin/env bash
# TDC: the pKd of a strong binder is too low, never above 10, and the way back gives -0.1 nM or 100,000,000 nM.
#
# Package:   pytdc 1.1.15 (tdc.utils.label, behind convert_to_log and convert_from_log with form="binding")
# Expected:  0.01 nM is 11, and 11 is 0.01 nM: p = 9 - log10(nM), as the docstrings name the units "nM" and "p".
# What is:   0.1 nM are added first: 1 nM is 8.96, 0.1 nM is 9.70, 0.01 nM is 9.96. The way back subtracts them, but
#            the line is there twice, so that nM are taken for a p again: 6 is -0.1 nM, 9 is 126,000,000 nM.
#            No message.
# Met by:    Models of BindingDB, DAVIS and the like: the strongest binders, the aim of a search, become equal; errors
#            against values of other sources; predictions in nM.
#            Remedy: 9 - log10(y) and 10 ** (9 - p); treat 0 and censored values yourself.
# Source:    tdc/utils/label.py, convert_y_unit(); tdc/base_dataset.py. TDC issue 392 (open) names both. DeepPurpose
#            had the same sum and removed it (its issue 62 and pull request 64).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv setuptools==82.0.1 wheel==0.48.0 numpy==1.26.4 pandas==2.3.3 fuzzywuzzy==0.18.0
"$work/venv/bin/pip" install --quiet --no-compile --no-deps pytdc==1.1.15 # its other requirements are not used here

cat >"$work/run.py" <<'PY'
import importlib.metadata
import sys
import types
import warnings
import numpy as np

# `import tdc` loads everything, from single cells to docking; these are empty packages in the same place.
for name in ("tdc", "tdc.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(importlib.metadata.distribution("pytdc").locate_file(name.replace(".", "/")))]
    sys.modules[name] = package
warnings.simplefilter("ignore")  # of fuzzywuzzy while it is imported
from tdc.utils.label import convert_back_log, convert_to_log

warnings.simplefilter("error")  # a warning would end the script
print("pytdc", importlib.metadata.version("pytdc"))
print("        nM      p of TDC   9 - log10(nM)")
for value in (1000.0, 100.0, 10.0, 1.0, 0.1, 0.01, 0.001):
    print(f"  {value:8} {convert_to_log([value])[0]:13.3f} {9 - np.log10(value):15.3f}")
print("         p     nM of TDC      10**(9 - p)")
for value in (4.0, 6.0, 8.0, 8.9586, 9.0, 9.5):
    print(f"  {value:8} {convert_back_log([value])[0]:13.3g} {10 ** (9 - value):15.4g}")
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
pytdc 1.1.15
        nM      p of TDC   9 - log10(nM)
    1000.0         6.000           6.000
     100.0         7.000           7.000
      10.0         7.996           8.000
       1.0         8.959           9.000
       0.1         9.699          10.000
      0.01         9.959          11.000
     0.001         9.996          12.000
         p     nM of TDC      10**(9 - p)
       4.0          -0.1           1e+05
       6.0          -0.1            1000
       8.0        0.0259              10
    8.9586         1e+08             1.1
       9.0      1.26e+08               1
       9.5      6.08e+08          0.3162
END
