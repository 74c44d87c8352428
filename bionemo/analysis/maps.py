# SPDX-License-Identifier: Apache-2.0
"""Embeddings of many sequences projected to two dimensions.

Shapes: N sequences, D hidden size.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from bionemo.common.errors import UserError, optional_dependency
from bionemo.inference.outputs import Floats

METHODS = ("pca", "umap")
_MIN_SEQUENCES = 4  # UMAP's initialization needs two eigenvectors besides the constant one


def project_to_2d(embeddings: Floats, method: str = "pca", neighbors: int = 15, seed: int = 0) -> Floats:
    """Project embeddings to two dimensions, reproducibly for the same seed.

    `method` is `pca`, principal components, which preserve large distances, or `umap` (McInnes et al. 2018; with this
    number of neighbors of each sequence), which preserves neighborhoods. [N, D] -> [N, 2] fp32.
    Errors as in `make_reducer`; also if there are too few sequences for UMAP, or values are not finite.
    """
    reducer = make_reducer(method, neighbors, seed)
    fewest = _MIN_SEQUENCES if method == "umap" else 1
    if embeddings.ndim != 2 or len(embeddings) < fewest or embeddings.shape[1] < 2:
        raise UserError(
            f"embeddings of shape {embeddings.shape}: a map by {method} needs [N, D], N of {fewest} or more, D of 2"
        )
    if len(bad := np.flatnonzero(~np.isfinite(embeddings).all(1))):
        raise UserError(f"the embedding of sequence {bad[0] + 1:,} is not finite: remove it")
    if method == "umap":
        reducer.n_neighbors = min(neighbors, len(embeddings) - 1)
    elif len(embeddings) == 1:
        return np.zeros((1, 2), np.float32)
    else:  # eigenvectors of the covariance are several times as fast, and precise in fp64
        reducer.svd_solver = "covariance_eigh" if len(embeddings) > embeddings.shape[1] else "full"
        embeddings = embeddings.astype(np.float64)
    with np.errstate(invalid="ignore"):  # shares of a variance of 0
        return np.asarray(reducer.fit_transform(embeddings), np.float32)


def axis_labels(method: str, embeddings: Floats, points_N2: Floats) -> list[str]:
    """Return the labels of the two axes, for principal components with the share of the variance that they explain."""
    if method != "pca":
        return ["UMAP 1", "UMAP 2"]
    shares = points_N2.var(0, dtype=float) / max(embeddings.var(0, dtype=float).sum(), np.finfo(float).tiny)
    return [f"PC {number} ({100 * share:.1f} % of the variance)" for number, share in enumerate(shares, 1)]


def make_reducer(method: str = "pca", neighbors: int = 15, seed: int = 0) -> Any:
    """Return an estimator with scikit-learn's `fit_transform`.

    Raises:
        UserError: if UMAP is not installed, or there are too few neighbors.
    """
    if method not in METHODS:
        raise UserError(f"method={method!r} is unknown: choose from {', '.join(METHODS)}")
    if method == "pca":
        from sklearn.decomposition import PCA

        return PCA(2)
    if neighbors < 2:
        raise UserError(f"neighbors={neighbors}: UMAP needs 2 or more")
    with optional_dependency("analysis", "the method umap (pca needs no package)"):
        from umap import UMAP
    return UMAP(n_neighbors=neighbors, random_state=seed, n_jobs=1)  # UMAP with a seed uses one thread


def read_embeddings(path: Path, color: str | None = None) -> tuple[list[str], Floats, list[str] | None]:
    """Read `id` [N] and `embeddings` [N, D] of a .npz, .h5 or .parquet file, and optionally one more [N] for colors.

    A .h5 file may also have a data set [D] for each id, as those of UniProt and bio_embeddings have.

    Raises:
        UserError: if the file cannot be read or an array is missing.
    """
    wanted = ("id", "embeddings", *([color] if color else []))
    try:
        arrays = _READERS.get(path.suffix, _read_npz)(path, wanted)
        embeddings = arrays.get("embeddings", np.zeros(0)).astype(np.float32)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path") from error
    except (ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if path.suffix not in (".npz", *_READERS):
            known = ", ".join(_READERS)
            raise UserError(
                f"analysis map does not read {path}: give a FASTA file, or embeddings as .npz, {known}"
            ) from error
        raise UserError(f"{path} is not a {path.suffix} file of plain arrays ({error})") from error
    for name in wanted:
        if name not in arrays:
            remedy = "`bionemo predict` writes id and embeddings; --table FILE gives colors by id"
            raise UserError(f"{path} has no array {name!r}: {remedy}")
        if arrays[name].shape[:1] != arrays["id"].shape:
            raise UserError(f"{path}: {name} is of shape {arrays[name].shape}, id of {arrays['id'].shape}")
    colors = list(map(str, arrays[color].tolist())) if color else None
    return list(map(str, arrays["id"].tolist())), embeddings, colors


def _read_npz(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        return {name: npy.read_array(archive.open(f"{name}.npy")) for name in wanted if f"{name}.npy" in names}


def _read_h5(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a .h5 file; of one with a data set for each id, the ids and the stacked data sets.

    Raises:
        UserError: if the data sets of the ids are not vectors of one size.
        OSError: if it cannot be read.
    """
    import h5py

    with h5py.File(path) as file:
        if "id" in file and "embeddings" in file:
            names = [name for name in wanted if name in file]
            return {name: file[name].asstr()[:] if file[name].dtype.kind == "O" else file[name][:] for name in names}
        found = {str(item.attrs.get("original_id", name)): item for name, item in file.items()}
        shapes = {getattr(item, "shape", ()) for item in found.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise UserError(
                f"{path} has data sets of the shapes {sorted(shapes)[:4]}: a map needs a vector [D] for each id"
            )
        return {"id": np.array([*found]), "embeddings": np.stack([item[:] for item in found.values()])}


def _read_parquet(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    from pyarrow import parquet

    table = parquet.ParquetFile(path).read([*wanted])
    arrays = {name: table.column(name).combine_chunks() for name in table.column_names}
    return {
        name: (
            array.flatten().to_numpy(False).reshape(len(array), -1) if name == "embeddings" else array.to_numpy(False)
        )
        for name, array in arrays.items()
    }


_READERS = {".h5": _read_h5, ".hdf5": _read_h5, ".parquet": _read_parquet}


def write_anndata(
    path: Path,
    columns: Mapping[str, Sequence[Any]],
    embeddings: Floats,
    name: str,
    points_N2: Floats,
    provenance: Mapping[str, Any],
) -> None:
    """Write a .h5ad file in the format 0.1.0 of anndata, for scanpy.

    Args:
        path: the file.
        columns: of `obs`, texts or numbers [N]; `_index` is the ids.
        embeddings: `X` [N, D].
        name: of the points in `obsm`.
        points_N2: [N, 2].
        provenance: JSON values, the text `provenance` of `uns`.
    """
    import h5py

    def mark(item: Any, kind: str, version: str = "0.2.0", more: Mapping[str, Any] | None = None) -> None:
        item.attrs.update({"encoding-type": kind, "encoding-version": version, **(more or {})})

    with h5py.File(path, "w") as file:
        mark(file, "anndata", "0.1.0")
        mark(file.create_group("obsm"), "dict", "0.1.0")
        mark(file.create_group("uns"), "dict", "0.1.0")
        text = json.dumps(provenance)
        mark(file.create_dataset("uns/provenance", data=text, dtype=h5py.string_dtype()), "string")
        arrays: dict[str, Any] = {"X": embeddings, f"obsm/{name}": points_N2}
        for table, cells in (("obs", columns), ("var", {"_index": [*map(str, range(embeddings.shape[1]))]})):
            found = {column.replace("/", "_"): values for column, values in cells.items()}
            order = np.array([*found][1:], h5py.string_dtype())
            mark(file.create_group(table), "dataframe", more={"_index": "_index", "column-order": order})
            arrays |= {f"{table}/{column}": values for column, values in found.items()}
        for key, values in arrays.items():
            is_text = isinstance(values[0], str)
            data = file.create_dataset(key, data=values, dtype=h5py.string_dtype() if is_text else None)
            mark(data, "string-array" if is_text else "array")
