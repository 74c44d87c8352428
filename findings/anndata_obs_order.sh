#!/usr/bin/env bash
# Assigning adata.obs renames the rows of the embedding matrix: labels move to other proteins.
#
# Package:   anndata 0.12.19 (pandas 2.3.3)
# Expected:  adata.obs = table aligns by index, as a pandas column does, or refuses another order, as adata.obsm does.
# What is:   Only the number of rows is checked. A table with the same identifiers in another order (after merge,
#            sort_values, groupby, or read from another file) replaces the identifiers, X stays as it is:
#            the rows of X get the names and labels of others, without a message. adata.obs["label"] = series aligns,
#            adata.obsm["x"] = frame raises ValueError: three assignments, three rules.
# Met by:    Embeddings kept as .h5ad, labels joined with adata.obs = adata.obs.join(...), or a label table in
#            an order of its own. Everything trained on it is trained on shuffled labels.
# Source:    anndata/_core/anndata.py, _set_dim_df(); AnnData.obs in the API documentation.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv anndata==0.12.19 pandas==2.3.3 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import anndata
import numpy as np
import pandas as pd

warnings.simplefilter("error")  # a warning would end the script
names = ["P1", "P2", "P3"]
labels = pd.DataFrame({"label": ["c", "a", "b"]}, index=["P3", "P1", "P2"])  # each protein has the label of its number
print("anndata", importlib.metadata.version("anndata"))


def fresh():
    return anndata.AnnData(np.float32([[1], [2], [3]]), obs=pd.DataFrame(index=names))  # X holds the number of the protein


def show(how, adata):
    rows = [f"{name}={adata[name].X.item():.0f}{adata.obs.loc[name, 'label']}" for name in adata.obs_names]
    print(f"  {how:34} {' '.join(rows)}")


print("  right                              P1=1a P2=2b P3=3c")
adata = fresh()
adata.obs["label"] = labels["label"]
show('adata.obs["label"] = series', adata)
adata = fresh()
adata.obs = labels
show("adata.obs = table", adata)
adata = fresh()
adata.obs = adata.obs.join(labels).sort_values("label", ascending=False)
show("adata.obs = join, then sort_values", adata)
try:
    adata = fresh()
    adata.obsm["labels"] = labels
except ValueError as error:
    print("  adata.obsm = table                 refused:", type(error).__name__)
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
anndata 0.12.19
  right                              P1=1a P2=2b P3=3c
  adata.obs["label"] = series        P1=1a P2=2b P3=3c
  adata.obs = table                  P3=1c P1=2a P2=3b
  adata.obs = join, then sort_values P3=1c P2=2b P1=3a
  adata.obsm = table                 refused: ValueError
END
