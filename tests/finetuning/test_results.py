# SPDX-License-Identifier: Apache-2.0
"""Results of a fine-tuning are not overwritten by another run, and user files in the directory are kept."""

import errno
import json
import os
import subprocess
import traceback
from pathlib import Path

import numpy as np
import pytest

import bionemo
from bionemo.common.errors import UserError, describe
from bionemo.finetuning import linear_probe, results
from bionemo.finetuning.features import compute_features
from bionemo.finetuning.task_data import Split
from bionemo.inference.batching import BatchLimits
from tests.support.finetuning import overrides, run, written


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
    kept = {"notes.txt", "mine.json"}
    assert {path.name for path in directory.iterdir()} == kept | {"head.safetensors", "report.json", "report.png"}


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
    """The disk is full at each of the three files."""
    given, write_atomic = overrides(model, data, tmp_path / "run"), results.write_atomic
    for name in ("head.safetensors", "report.json", "report.png"):

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
