# SPDX-License-Identifier: Apache-2.0
"""Embeddings of many sequences projected to two dimensions.

Shapes: N sequences, D hidden size.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from bionemo.common.errors import UserError, optional_dependency
from bionemo.inference.outputs import Floats

METHODS = ("umap", "pca")
_MIN_SEQUENCES = 4  # UMAP's initialization needs two eigenvectors besides the constant one


def project_to_2d(embeddings: Floats, method: str = "umap", neighbors: int = 15, seed: int = 0) -> Floats:
    """Project embeddings to two dimensions, reproducibly for the same seed.

    `method` is `umap` (McInnes et al. 2018; with this number of neighbors of each sequence), which preserves
    neighborhoods, or `pca`, which preserves distances. [N, D] -> [N, 2] fp32.
    Errors as in `make_reducer`; also if there are too few sequences, or values are not finite.
    """
    reducer = make_reducer(method, neighbors, seed)
    if embeddings.ndim != 2 or len(embeddings) < _MIN_SEQUENCES or embeddings.shape[1] < 2:
        raise UserError(
            f"embeddings of shape {embeddings.shape}: a map needs [N, D], N of {_MIN_SEQUENCES} or more, D of 2"
        )
    if len(bad := np.flatnonzero(~np.isfinite(embeddings).all(1))):
        raise UserError(f"the embedding of sequence {bad[0] + 1:,} is not finite: remove it")
    if method == "umap":
        reducer.n_neighbors = min(neighbors, len(embeddings) - 1)
    return np.asarray(reducer.fit_transform(embeddings), np.float32)


def make_reducer(method: str = "umap", neighbors: int = 15, seed: int = 0) -> Any:
    """Return an estimator with scikit-learn's `fit_transform`.

    Raises:
        UserError: if UMAP is not installed, or there are too few neighbors.
    """
    if method not in METHODS:
        raise UserError(f"method={method!r} is unknown: choose from {', '.join(METHODS)}")
    if method == "pca":
        from sklearn.decomposition import PCA

        return PCA(2, svd_solver="full")
    if neighbors < 2:
        raise UserError(f"neighbors={neighbors}: UMAP needs 2 or more")
    with optional_dependency("analysis", "the method umap (pca needs no package)"):
        from umap import UMAP
    return UMAP(n_neighbors=neighbors, random_state=seed, n_jobs=1)  # UMAP with a seed uses one thread


def read_embeddings(path: Path, color: str | None = None) -> tuple[list[str], Floats, list[str] | None]:
    """Read the arrays `id` [N] and `embeddings` [N, D] of a .npz or .h5 file, and optionally one more [N] for colors.

    A .h5 file may also have a data set [D] for each id, as those of UniProt and bio_embeddings have.

    Raises:
        UserError: if the file cannot be read or an array is missing.
    """
    wanted = ("id", "embeddings", *([color] if color else []))
    try:
        arrays = (_read_h5 if path.suffix in (".h5", ".hdf5") else _read_npz)(path, wanted)
        embeddings = arrays.get("embeddings", np.zeros(0)).astype(np.float32)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not a .npz file of plain arrays ({error})") from error
    for name in wanted:
        if name not in arrays:
            raise UserError(f"{path} has no array {name!r}: `bionemo predict` writes id and embeddings")
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
