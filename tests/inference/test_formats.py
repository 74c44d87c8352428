# SPDX-License-Identifier: Apache-2.0
"""All output formats of a prediction have equal content."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.inference.samples import go, sequences


@pytest.mark.parametrize("kind", ["h5", "parquet", "pkl"])
def test_formats_have_equal_content(kind: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    overrides = ["model.downstream_task.outputs=[embeddings,hiddens,pseudo_perplexity]"]
    go(model, fasta, tmp_path / "x.npz", *overrides)
    go(model, fasta, tmp_path / f"x.{kind}", *overrides)
    one = np.load(tmp_path / "x.npz")
    read = {"h5": from_h5, "parquet": from_parquet, "pkl": from_pkl}[kind]
    for key, values in read(tmp_path / f"x.{kind}").items():
        assert np.array_equal(one[key], values), key


def from_h5(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        assert set(file) == {"id", "tokens", "offsets", "embeddings", "hiddens", "pseudo_perplexity"}
        assert "rows offsets[i]:offsets[i + 1] of hiddens" in file["offsets"].attrs["description"]
        assert all(each.attrs["description"] for each in file.values())
        return {name: np.array(each.asstr()[:] if name == "id" else each) for name, each in file.items()}


def from_parquet(path: Path) -> dict[str, np.ndarray]:
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [len(row["hiddens"]) for row in rows] == [row["tokens"] for row in rows]
    return {
        "id": np.array([row["id"] for row in rows]),
        "tokens": np.array([row["tokens"] for row in rows]),
        "embeddings": np.array([row["embeddings"] for row in rows], np.float32),
        "pseudo_perplexity": np.array([row["pseudo_perplexity"] for row in rows], np.float32),
        "hiddens": np.concatenate([np.array(row["hiddens"], np.float32) for row in rows]),
    }


def from_pkl(path: Path) -> dict[str, np.ndarray]:
    """Read v1's format; the file is our own and therefore trusted."""
    rows = pickle.loads(path.read_bytes())
    assert [row["sequence"] for row in rows] == sequences()
    return {
        "id": np.array([row["id"] for row in rows]),
        "embeddings": np.stack([row["embeddings"] for row in rows]),
        "pseudo_perplexity": np.stack([row["pseudo_perplexity"] for row in rows]),
        "hiddens": np.concatenate([row["hiddens"] for row in rows]),
    }


def test_numeric_table(model: Path, fasta: Path, tmp_path: Path) -> None:
    overrides = ["model.downstream_task.outputs=[embeddings,pseudo_perplexity]"]
    go(model, fasta, tmp_path / "x.npz", *overrides)
    go(model, fasta, tmp_path / "x.csv", *overrides)
    one, table = np.load(tmp_path / "x.npz"), pyarrow.csv.read_csv(tmp_path / "x.csv")
    assert table.column_names[:3] == ["id", "tokens", "embeddings_0"]
    assert table["id"].to_pylist() == one["id"].tolist()
    columns = [table[f"embeddings_{i}"].to_numpy().astype(np.float32) for i in range(32)]
    assert np.array_equal(np.stack(columns, 1), one["embeddings"])
    assert np.array_equal(table["pseudo_perplexity"].to_numpy().astype(np.float32), one["pseudo_perplexity"])


@pytest.mark.parametrize(
    ("output", "shape"), [("embeddings", (32,)), ("hiddens", (90, 32)), ("pseudo_perplexity", ())]
)
def test_a_data_set_for_each_id(output: str, shape: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    """As UniProt's per-protein.h5 and per-residue.h5, with `original_id` as in files of bio_embeddings."""
    ids = ["sp|P12345|A_HUMAN", "P1/1-57", "3", "x.1", "."]
    (tmp_path / "x.fasta").write_text("".join(f">{n} a\n{t}\n" for n, t in zip(ids, sequences()[2:7], strict=True)))
    override = f"model.downstream_task.outputs=[{output}]"
    go(model, tmp_path / "x.fasta", tmp_path / "x.npz", override)
    go(model, tmp_path / "x.fasta", tmp_path / "x.h5", override, "model.data.output_format=h5_by_id")
    one = np.load(tmp_path / "x.npz")
    rows = np.split(one[output], one["offsets"][1:-1]) if output == "hiddens" else one[output]
    with h5py.File(tmp_path / "x.h5") as file:
        assert {str(each.attrs["original_id"]): name for name, each in file.items()} == {
            name: {"P1/1-57": "P1_1-57", ".": "_"}.get(name, name) for name in ids
        }
        assert file["P1_1-57"].shape == shape
        for data_set in file.values():
            assert np.array_equal(data_set, rows[ids.index(data_set.attrs["original_id"])])
