# SPDX-License-Identifier: Apache-2.0
"""Every result file tells which model and settings it comes from, to the libraries that read it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

import bionemo
from bionemo.cli import analysis
from bionemo.inference.fingerprint import model_fingerprint
from bionemo.inference.model import TrainedModel
from tests.inference.samples import LENGTHS, go, sequences


def read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as file:
        assert file["embeddings"].shape[0] == len(LENGTHS)
        return json.loads(file["provenance"].item())


def read_h5(path: Path) -> Any:
    with h5py.File(path) as file:
        return json.loads(file.attrs["provenance"])


def read_arrow(path: Path) -> Any:
    return json.loads(parquet.read_schema(path).metadata[b"PANDAS_ATTRS"])["provenance"]


def read_pandas(path: Path) -> Any:
    frame = pd.read_parquet(path)
    assert frame.shape == (len(LENGTHS), 3)
    return frame.attrs["provenance"]


def read_beside(path: Path) -> Any:
    return json.loads(path.with_name(f"{path.name}.json").read_text())


def digest_of(model: TrainedModel) -> str:
    return model_fingerprint(model.weights_checksum, 96, model.network.vocabulary)


@pytest.mark.parametrize(
    ("name", "overrides", "read"),
    [
        ("x.npz", [], read_npz),
        ("x.h5", [], read_h5),
        ("x.h5", ["model.data.output_format=h5_by_id"], read_h5),
        ("x.parquet", [], read_arrow),
        ("x.parquet", [], read_pandas),
        ("x.csv", [], read_beside),
        ("x.pkl", [], read_beside),
    ],
)
def test_predictions(
    name: str, overrides: list[str], read: Callable[[Path], Any], model: Path, fasta: Path, tmp_path: Path
) -> None:
    go(model, fasta, tmp_path / name, *overrides, "trainer.precision=bf16-mixed")
    found = read(tmp_path / name)
    settings = found.pop("settings")
    assert found == {
        "bionemo": bionemo.__version__, "model": str(model), "precision": "bf16-mixed", "max_tokens": 94, "longer":
        sum(length > 94 for length in LENGTHS), "model_fingerprint": digest_of(bionemo.load(model, "cpu")),
    }  # fmt: skip
    assert settings["input"] == str(fasta)
    assert settings["data"]["long_sequences"] == "truncate"
    assert settings["downstream_task"]["outputs"] == ["embeddings"]
    assert "batch_size" not in settings["data"]  # it does not change the result


def test_sequences_that_are_too_long_are_counted_after_a_resume(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bionemo.inference import predict_files

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(predict_files, "write_results", lambda *_: (_ for _ in ()).throw(OSError("full")))
        go(model, fasta, tmp_path / "x.npz", "model.data.long_sequences=drop")
    go(model, fasta, tmp_path / "x.npz", "model.data.long_sequences=drop")
    with np.load(tmp_path / "x.npz") as file:
        found = json.loads(file["provenance"].item())
    assert (found["longer"], found["settings"]["data"]["long_sequences"]) == (2, "drop")


COMMANDS = {
    "variants": (["MODEL", "--sequence", "MKTAYIAKQR", "--variants", "variants.csv", "--offset", "2"], "x.csv"),
    "scan": (["MODEL", "--sequence", "MKTAYIAKQR", "--scan", "--method", "wild-type-marginal"], "x.csv"),
    "contacts": (["MODEL", "--input", "x.fasta"], "out/p0.csv"),
    "map": (["MODEL", "--input", "x.fasta", "--method", "pca"], "x.csv"),
    "of a file": (["--input", "x.npz", "--method", "pca"], "x.csv"),
}
SETTINGS = {
    "variants": {"offset": 2, "method": "masked-marginal", "variants": "variants.csv", "sequence": "MKTAYIAKQR"},
    "scan": {"method": "wild-type-marginal", "scan": True},
    "contacts": {"input_path": "x.fasta"},
    "map": {"input_path": "x.fasta", "method": "pca", "seed": 0, "pooling": "mean"},
    "of a file": {"input_path": "x.npz"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_analyses(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.fasta").write_text("".join(f">p{n}\n{text}\n" for n, text in enumerate(sequences((10, 20, 30, 40)))))
    Path("variants.csv").write_text("variant\nK4A\n")
    np.savez("x.npz", id=np.array([*"abcd"]), embeddings=np.random.default_rng(0).normal(size=(4, 3)))
    arguments, output = COMMANDS[name]
    command = {"scan": "variants", "of a file": "map"}.get(name, name)
    given = [str(model) if word == "MODEL" else word for word in arguments]
    monkeypatch.setattr(
        sys, "argv", ["bionemo", command, *given, "--output", "out" if "/" in output else output, "--device", "cpu"]
    )
    analysis.main()
    found = read_beside(Path(output))
    assert found["bionemo"] == bionemo.__version__
    assert SETTINGS[name].items() <= found["settings"].items()
    assert not {"device", "output", "overwrite"} & found["settings"].keys()
    if name == "of a file":
        assert "model" not in found
    else:
        assert (found["model"], found["longer"]) == (str(model), 0)
        assert found["model_fingerprint"] == digest_of(bionemo.load(model, "cpu"))
