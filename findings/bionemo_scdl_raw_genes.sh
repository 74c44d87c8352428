#!/usr/bin/env bash
# NVIDIA's bionemo-scdl takes the counts from adata.raw and the genes from adata.var: counts get other genes' names.
#
# Package:   bionemo-scdl 0.1.3 (SingleCellMemMapDataset, which feeds Geneformer of BioNeMo 2)
# Expected:  get_row(return_var_features=True) gives values, columns and the table in which the columns are looked up:
#            the genes of the matrix that was read. raw.X is read (the default), so these are raw.var.
# What is:   The table is that of adata.var. If its genes are in another order than in raw, all names are wrong. If
#            genes were filtered, names are wrong behind the first missing gene; columns behind the end raise an
#            IndexError, but only in cells that have them. No message; use_X_not_raw=True is right.
# Met by:    Files whose genes were sorted, brought to the order of a vocabulary, or filtered after adata.raw was
#            set: anndata leaves raw as it is. A model learns tokens of other genes.
#            Remedy: adata.raw.to_adata() into a file of its own, or compare adata.raw.var_names with adata.var_names.
# Source:    bionemo/scdl/io/single_cell_memmap_dataset.py: _get_matrix_X() returns raw.X, regular_load_h5ad() and
#            paginated_load_h5ad() return adata.var; documentation of anndata.AnnData.raw (slicing by genes leaves it
#            unaffected); pull request 480 of NVIDIA-BioNeMo/bionemo-recipes (Geneformer).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv bionemo-scdl==0.1.3 torch==2.13.0 anndata==0.12.19 pandas==2.3.3 scipy==1.17.1 numpy==2.3.5

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import anndata
import numpy as np
import pandas
import scipy.sparse
from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset

warnings.simplefilter("error")  # a warning would end the script
genes = ["TP53", "ACTB", "GAPDH", "CD19"]
counts = np.float32([[0, 1, 0, 3], [5, 2, 0, 0], [7, 0, 0, 0]])
cells = anndata.AnnData(scipy.sparse.csr_matrix(counts), pandas.DataFrame(index=["a", "b", "c"]),
                        pandas.DataFrame({"gene": genes}, index=genes))
cells.raw = cells.copy()


def show(what, selected, **options):
    name = what.replace(" ", "_")
    selected.copy().write_h5ad(f"{name}.h5ad")
    data = SingleCellMemMapDataset(name, f"{name}.h5ad", **options)
    for row in range(len(data)):
        (values, columns), features, _ = data.get_row(row, return_var_features=True, var_feature_names=["gene"])
        try:
            seen = dict(zip(features[0][columns].tolist(), values.astype(int).tolist(), strict=True))
        except IndexError:
            seen = "IndexError"
        true = {gene: int(value) for gene, value in zip(genes, counts[row], strict=True) if value}
        print(f"  {what:18} cell {'abc'[row]}: counts {true}, read {seen}")


print("bionemo-scdl", importlib.metadata.version("bionemo-scdl"))
show("as in raw", cells)
show("genes sorted", cells[:, sorted(genes)])
show("without ACTB", cells[:, ["TP53", "GAPDH", "CD19"]])
show("use_X_not_raw", cells[:, sorted(genes)], use_X_not_raw=True)
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
bionemo-scdl 0.1.3
  as in raw          cell a: counts {'ACTB': 1, 'CD19': 3}, read {'ACTB': 1, 'CD19': 3}
  as in raw          cell b: counts {'TP53': 5, 'ACTB': 2}, read {'TP53': 5, 'ACTB': 2}
  as in raw          cell c: counts {'TP53': 7}, read {'TP53': 7}
  genes sorted       cell a: counts {'ACTB': 1, 'CD19': 3}, read {'CD19': 1, 'TP53': 3}
  genes sorted       cell b: counts {'TP53': 5, 'ACTB': 2}, read {'ACTB': 5, 'CD19': 2}
  genes sorted       cell c: counts {'TP53': 7}, read {'ACTB': 7}
  without ACTB       cell a: counts {'ACTB': 1, 'CD19': 3}, read IndexError
  without ACTB       cell b: counts {'TP53': 5, 'ACTB': 2}, read {'TP53': 5, 'GAPDH': 2}
  without ACTB       cell c: counts {'TP53': 7}, read {'TP53': 7}
  use_X_not_raw      cell a: counts {'ACTB': 1, 'CD19': 3}, read {'ACTB': 1, 'CD19': 3}
  use_X_not_raw      cell b: counts {'TP53': 5, 'ACTB': 2}, read {'TP53': 5, 'ACTB': 2}
  use_X_not_raw      cell c: counts {'TP53': 7}, read {'TP53': 7}
END
