# SPDX-License-Identifier: Apache-2.0
"""Embeddings in two dimensions."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from sklearn.decomposition import PCA

from bionemo.analysis.maps import axis_labels, project_to_2d, read_embeddings
from bionemo.analysis.plots import plot_map
from bionemo.common.errors import UserError


def clouds(number: int, size: int = 16) -> np.ndarray:
    """Return three distant clusters, one after the other."""
    generator = np.random.default_rng(0)
    middles = 10 * generator.normal(size=(3, 1, size))
    return (middles + generator.normal(size=(3, number, size))).reshape(-1, size).astype(np.float32)


@pytest.mark.parametrize("count", [20, 3, 1])
def test_principal_components(count: int) -> None:
    """Compare with a singular value decomposition, up to signs; more and fewer sequences than dimensions."""
    x_ND = clouds(count) + 1000
    found = project_to_2d(x_ND)
    assert found.dtype == np.float32
    left, scale, _ = np.linalg.svd(x_ND - x_ND.mean(0), full_matrices=False)
    np.testing.assert_allclose(np.abs(found), np.abs(left[:, :2] * scale[:2]), rtol=1e-3, atol=1e-3)
    assert (project_to_2d(x_ND, "pca") == found).all()
    shares = PCA(2).fit(x_ND.astype(np.float64)).explained_variance_ratio_
    expected = [f"PC {number} ({100 * share:.1f} % of the variance)" for number, share in enumerate(shares, 1)]
    assert axis_labels("pca", x_ND, found) == expected


def test_equal_embeddings() -> None:
    for count in (1, 5):
        x_ND = np.ones((count, 4), np.float32)
        found = project_to_2d(x_ND)
        assert found.tolist() == [[0, 0]] * count
        assert axis_labels("pca", x_ND, found)[0] == "PC 1 (0.0 % of the variance)"


def test_options_are_passed_to_umap(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}

    class Reducer:
        def __init__(self, **options: Any) -> None:
            vars(self).update(options)

        def fit_transform(self, x: np.ndarray) -> np.ndarray:
            arguments.update(vars(self))
            return x[:, :2].astype(np.float64)

    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Reducer))
    x_ND = clouds(20)
    found = project_to_2d(x_ND, "umap", 7, seed=3)
    assert arguments == {"n_neighbors": 7, "random_state": 3, "n_jobs": 1}
    assert found.dtype == np.float32
    assert (found == x_ND[:, :2]).all()
    project_to_2d(x_ND[:5], "umap")
    assert arguments["n_neighbors"] == 4  # there are not more samples
    with pytest.raises(
        UserError, match=r"embeddings of shape \(3, 16\): a map by umap needs \[N, D\], N of 4 or more"
    ):
        project_to_2d(x_ND[:3], "umap")


@pytest.mark.slow
def test_umap() -> None:
    pytest.importorskip("umap")
    x_ND = clouds(30)
    found = project_to_2d(x_ND, "umap")
    assert (project_to_2d(x_ND, "umap") == found).all()
    middles = found.reshape(3, 30, 2).mean(1)
    nearest = np.linalg.norm(found[:, None] - middles, axis=-1).argmin(1)
    assert (nearest == np.arange(90) // 30).all()


def test_umap_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(UserError, match=r"umap \(pca needs no package\) requires .* pip install .*'umap-learn"):
        project_to_2d(clouds(5), "umap")


@pytest.mark.parametrize(
    ("x_ND", "options", "message"),
    [
        (clouds(1)[:0], {}, r"shape \(0, 16\): a map by pca needs \[N, D\], N of 1 or more, D of 2"),
        (clouds(5)[:, :1], {"method": "pca"}, r"shape \(15, 1\)"),
        (clouds(5)[0], {"method": "pca"}, r"shape \(16,\)"),
        (
            np.where(np.arange(15)[:, None] == 7, np.nan, clouds(5)),
            {"method": "pca"},
            "the embedding of sequence 8 is not finite",
        ),
        (clouds(5), {"method": "tsne"}, "method='tsne' is unknown: choose from pca, umap"),
        (clouds(5), {"method": "umap", "neighbors": 1}, "neighbors=1: UMAP needs 2 or more"),
    ],
)
def test_invalid_embeddings(x_ND: np.ndarray, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        project_to_2d(x_ND, **options)


def test_embeddings_in_a_file(tmp_path: Path) -> None:
    path, x_ND = tmp_path / "x.npz", clouds(2)
    np.savez(path, id=np.array(list("abcdef")), embeddings=x_ND, charge=np.arange(6))
    ids, found, colors = read_embeddings(path)
    assert (ids, colors) == (list("abcdef"), None)
    assert (found == x_ND).all()
    assert read_embeddings(path, "charge")[2] == list("012345")
    with pytest.raises(UserError, match=r"x.npz has no array 'mass'"):
        read_embeddings(path, "mass")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"id": np.array(["a"])}, "has no array 'embeddings': `bionemo predict` writes"),
        ({"id": np.array(["a"]), "embeddings": np.zeros((2, 4))}, r"embeddings is of shape \(2, 4\), id of \(1,\)"),
        ({"id": np.array(["a"], object), "embeddings": np.zeros((1, 4))}, "is not a .npz file of plain arrays"),
        ({"id": np.array(["a"]), "embeddings": np.array([["x"]])}, "is not a .npz file of plain arrays"),
        ({"id": np.array("a"), "embeddings": np.zeros((1, 4))}, r"of shape \(1, 4\), id of \(\)"),
    ],
)
def test_files_without_embeddings(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=message):
        read_embeddings(tmp_path / "x.npz")


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read .No such file"):
        read_embeddings(tmp_path / "x.npz")
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(UserError, match=r"is not a .npz file of plain arrays"):
        read_embeddings(tmp_path / "cut.npz")
    for name in ("x.npy", "text"):
        formats = r"give a FASTA file, or embeddings as \.npz, \.h5, \.hdf5, \.parquet"
        with pytest.raises(UserError, match=rf"analysis map does not read .*{name}: {formats}$"):
            read_embeddings(tmp_path / name)


@pytest.mark.parametrize(
    ("colors", "expected"),
    [
        (["1", "", "3", "NA", "5", "inf"], ["no value (3)"]),
        (["1", "2", "3", "4", "5", "6"], []),
        (["a", "", "a", "NA", "b", "nan"], ["a (2)", "b (1)", "no value (3)"]),
        ([*"aabbccddeeffgghi", ""], [*(f"{each} (2)" for each in "abcdefg"), "others (2)", "no value (1)"]),
        (["", "", ""], ["no value (3)"]),
    ],
)
def test_points_without_a_value(colors: list[str], expected: list[str], tmp_path: Path) -> None:
    """All points are drawn; those without a value are light gray and counted."""
    points_N2 = np.arange(2.0 * len(colors), dtype=np.float32).reshape(-1, 2)
    plot_map(tmp_path / "x.svg", points_N2, ["PC 1", "PC 2"], colors, "kind")
    text = (tmp_path / "x.svg").read_text()
    assert re.findall(r">([^<>]+ \(\d+\))<", text) == expected
    points = text.partition('id="PathCollection_1"')[2].partition('id="matplotlib.axis_1"')[0]
    assert points.count("<use ") == len(colors)
    assert points.count("fill: #d3d3d3") == sum(each in ("", "NA", "nan", "inf") for each in colors)


def test_embeddings_in_h5_files(tmp_path: Path) -> None:
    """Arrays, and a data set for each id in fp16 as in UniProt's files, with or without `original_id`."""
    x_ND = clouds(2)
    with h5py.File(tmp_path / "arrays.h5", "w") as file:
        file["embeddings"], file["tokens"] = x_ND, np.arange(6)
        file.create_dataset("id", data=list("fedcba"), dtype=h5py.string_dtype())
    ids, found, _ = read_embeddings(tmp_path / "arrays.h5")
    assert (ids, found.tolist()) == (list("fedcba"), x_ND.tolist())
    with h5py.File(tmp_path / "by_id.h5", "w") as file:
        for number, vector in enumerate(x_ND.astype(np.float16)):
            file[f"P{number}"] = vector
        file["P3"].attrs["original_id"] = "a/b"
    ids, found, _ = read_embeddings(tmp_path / "by_id.h5")
    assert ids == ["P0", "P1", "P2", "a/b", "P4", "P5"]
    assert found.dtype == np.float32
    assert (found == x_ND.astype(np.float16)).all()
    with h5py.File(tmp_path / "residues.h5", "w") as file:
        file["a"], file["b"] = x_ND, x_ND[:2]
    with pytest.raises(
        UserError, match=r"residues.h5 has data sets of the shapes \[\(2, 16\), \(6, 16\)\]: a map needs"
    ):
        read_embeddings(tmp_path / "residues.h5")
    with pytest.raises(UserError, match="has no array 'color'"):
        read_embeddings(tmp_path / "by_id.h5", "color")
    (tmp_path / "x.h5").write_text("no file of this kind")
    with pytest.raises(UserError, match=r"x\.h5 cannot be read"):
        read_embeddings(tmp_path / "x.h5")


def test_a_parquet_file(tmp_path: Path) -> None:
    path, x_ND = tmp_path / "x.parquet", clouds(2)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(x_ND.ravel()), x_ND.shape[1])
    parquet.write_table(
        pa.table({"id": list("abcdef"), "embeddings": vectors, "mass": pa.array([1, 2, None, 4, 5, 6])}), path
    )
    ids, found, colors = read_embeddings(path, "mass")
    assert (ids, colors) == (list("abcdef"), ["1.0", "2.0", "nan", "4.0", "5.0", "6.0"])
    assert (found == x_ND).all()
    with pytest.raises(UserError, match=r"x.parquet has no array 'charge'"):
        read_embeddings(path, "charge")
    for lists, problem in (
        ([[1.0], [1.0, 2.0]], "not a .parquet file of plain arrays"),
        (["a", "b"], "not a .parquet"),
    ):
        parquet.write_table(pa.table({"id": ["a", "b"], "embeddings": lists}), path)
        with pytest.raises(UserError, match=problem):
            read_embeddings(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"x.parquet is not a .parquet file"):
        read_embeddings(path)
