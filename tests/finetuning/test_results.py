# SPDX-License-Identifier: Apache-2.0
"""Results of a fine-tuning are not overwritten by another run, and user files in the directory are kept."""

import errno
import json
import os
import subprocess
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

import bionemo
from bionemo.common.errors import UserError, describe
from bionemo.finetuning import linear_probe, results
from bionemo.finetuning.features import compute_features
from bionemo.finetuning.labels import Split
from bionemo.finetuning.load_head import predict_labels, read_trained_head
from bionemo.inference.batching import BatchLimits
from tests.support.finetuning import overrides, run, written
from tests.support.huggingface import theirs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "data")


def test_user_files_are_kept(model: Path, data: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    (directory / "report.json").write_text('{"run": "mine"}')
    with pytest.raises(UserError, match=r"run/report.json belongs to another run and would be replaced"):
        run(*overrides(model, data, directory))
    (directory / "report.json").rename(directory / "mine.json")
    run(*overrides(model, data, directory))
    kept, written = (
        {"notes.txt", "mine.json"},
        {"head.safetensors", "test_predictions.csv", "report.json", "report.png", "report.svg"},
    )
    assert {path.name for path in directory.iterdir()} == kept | written


def test_residues_of_the_test_split(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "hf"
    theirs(model, max_position_embeddings=34)  # some proteins are truncated to 30 residues
    run(*overrides(model, data, tmp_path / "run"))
    frame, report = pd.read_csv(tmp_path / "run" / "test_predictions.csv"), _report(tmp_path / "run")
    path = data / "test" / "x000.csv"
    records = pd.read_csv(path, dtype=str)
    expected = [
        (f"{path}:{number}", residue, record["3state"][residue - 1])
        for number, (_, record) in enumerate(records.iterrows(), 2)
        for residue in range(2, min(len(record["sequence"]), 30) + 1)  # the first one is masked
    ]
    assert list(frame[["row", "residue", "label"]].itertuples(index=False, name=None)) == expected
    assert records["sequence"].str.len().max() > 30
    assert 100 * (frame.label == frame.prediction).mean() == pytest.approx(report["test_accuracy"])
    probabilities = frame[[f"probability_{name}" for name in "CEH"]]
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    assert (probabilities.idxmax(1).str[-1] == frame.prediction).all()
    assert (report["bionemo"], report["max_tokens"]) == (bionemo.__version__, 30)
    assert report["encoder_weights"] == bionemo.load(model, "cpu").weights_checksum
    assert report["settings"]["model"]["data"]["dataset_path"] == str(data)
    assert any("longer than 30 tokens" in note for note in report["data"]["notes"])
    with safe_open(tmp_path / "run" / "head.safetensors", "pt") as file:
        task = json.loads(file.metadata()["task"])
    assert (task["bionemo"], task["max_tokens"]) == (bionemo.__version__, 30)
    assert task["settings"]["data"]["dataset_path"] == str(data)


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sequences_of_the_test_split(kind: str, frozen: bool, model: Path, tmp_path: Path) -> None:
    """The predictions are those of `bionemo analysis label`."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("AVGKL"), 12)) for _ in range(60)]
    labels = [text.count("A") if kind == "regression" else "few" if text.count("A") < 3 else "many" for text in texts]
    splits = ["train"] * 40 + ["val"] * 10 + ["test"] * 10
    path = tmp_path / "labels.csv"
    pd.DataFrame({"sequence": texts, "label": labels, "split": splits}).to_csv(path, index=False)
    run(*overrides(model, path, tmp_path / "run"), f"model.data.task_type={kind}", "model.data.target_column=[label]",
        "model.data.mask_column=null", f"model.encoder_frozen={frozen}", "trainer.max_epochs=1")  # fmt: skip
    frame = pd.read_csv(tmp_path / "run" / "test_predictions.csv")
    assert frame.row.tolist() == [f"{path}:{line}" for line in range(52, 62)]
    assert (frame.sequence.tolist(), frame.label.tolist()) == (texts[50:], labels[50:])
    trained = read_trained_head(tmp_path / "run" / "head.safetensors")
    found = predict_labels(bionemo.load(trained.encoder, "cpu"), trained, texts[50:])
    if kind == "regression":
        np.testing.assert_allclose(frame.prediction, [float(row[0]) for row in found], rtol=1e-4)
    else:
        assert frame.prediction.tolist() == [name for name, _ in found]
        highest = frame[["probability_few", "probability_many"]].max(1)
        np.testing.assert_allclose(highest, [float(value) for _, value in found], atol=1e-3)


def _report(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


@pytest.mark.slow
def test_the_head_of_another_run_is_kept(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    given = overrides(model, data, directory)
    run(*given)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    for other in (
        "model.finetuning_optim.lr=0.02",
        "trainer.max_epochs=3",
        "model.seed=2",
        "model.encoder_frozen=False",
    ):
        with pytest.raises(UserError, match=r"head.safetensors belongs to another run .* choose another"):
            run(*given, other)
    capsys.readouterr()

    def never(*_: object) -> None:
        raise AssertionError("it is computed again")

    with monkeypatch.context() as patch:
        patch.setattr(linear_probe, "compute_features", never)
        run(*given, "model.data.emb_batch_size=3")
    assert (
        capsys.readouterr().out == f"flip_secondary_structure: {directory} already contains the results of this run\n"
    )
    shard = data / "train" / "x000.csv"
    shard.write_text(shard.read_text().replace(",A", ",V", 1))
    with pytest.raises(UserError, match="belongs to another run"):
        run(*given)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.slow
def test_a_run_that_could_not_write_its_report_is_restarted(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at each of the four files."""
    given, write_atomic = overrides(model, data, tmp_path / "run"), results.write_atomic
    for name in ("head.safetensors", "test_predictions.csv", "report.json", "report.png"):

        def full(path: Path, content: str | bytes, name: str = name) -> None:
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write_atomic(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(results, "write_atomic", full)
            with pytest.raises(OSError, match="No space left") as caught:
                run(*given)
        assert (describe(caught.value) or "").startswith(f"{tmp_path}/run/{name}: No space left on device: free disk")
        assert not (tmp_path / "run" / name).exists()
        assert not [*(tmp_path / "run").glob(".features*")]
    run(*given)
    assert "test_accuracy" in json.loads((tmp_path / "run" / "report.json").read_text())


def test_embeddings_that_do_not_fit_on_the_disk(model: Path, tmp_path: Path) -> None:
    """On a file system of 64 KiB: one error that names the file, instead of SIGBUS from the memory map."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        ours = bionemo.load(model, "cpu")
        split = Split(["ACDEFGHIKL" * 9] * 20, [np.zeros(90, np.int64)] * 20, ["x"] * 20)
        file = tmp_path / "train.npy"
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                compute_features(ours, split, "token-level-classification", BatchLimits(), file)
                outcome = "it was written"
            except OSError as error:
                outcome = f"{error.errno} {error.filename} {os.listdir(tmp_path)}"
            except BaseException:
                outcome = traceback.format_exc()
            os.write(writing, outcome.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            outcome = pipe.read()
        _, status = os.waitpid(child, 0)
        assert (status, outcome) == (0, f"{errno.ENOSPC} {file} []")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
