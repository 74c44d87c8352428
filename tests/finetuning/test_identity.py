# SPDX-License-Identifier: Apache-2.0
"""Heads belong to the weights of a model, not to its path; weights and predictions must be finite."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bionemo
from bionemo.checkpoint.tensors import checksum_weights
from bionemo.checkpoint.tools import iterate_weights
from bionemo.cli.analysis import main
from bionemo.cli.finetune import prepare_and_fine_tune
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning.load_head import read_trained_head
from bionemo.formats.convert import convert, open_model
from tests.finetuning.tables import peptides, write


def finetune(model: Path, data: Path, directory: Path, *more: str) -> None:
    given = [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", "model.data.task_name=x",
             "model.data.task_type=classification", "trainer.accelerator=cpu", "trainer.max_epochs=1",
             "model.micro_batch_size=8", f"exp_manager.exp_dir={directory}", *more]  # fmt: skip
    prepare_and_fine_tune(load("downstream_table", given, schema=DownstreamConfig))


def label(head: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict labels of two sequences in `head`'s directory."""
    (head.parent / "in.fasta").write_text(">a\nMKTAYIAK\n>b\nGSHM\n")
    words = ["label", f"--head={head}", f"--model={model}", f"--input={head.parent}/in.fasta", "--overwrite",
             f"--output={head.parent}/out.csv"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", *words])
    main()


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same size with one other weight."""
    path = tmp_path_factory.mktemp("other") / "hf"
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("dense.weight"))
    weights[name][0, 0] += 1e-3
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [(text, "AB"[n % 2]) for n, text in enumerate(peptides(60))]
    return write(tmp_path_factory.mktemp("data") / "x.csv", "sequence,target", rows)


@pytest.fixture(scope="module")
def head(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "out"
    finetune(model, data, directory)
    return directory / "head.safetensors"


def test_the_checksum_depends_on_the_weights_only(model: Path, other: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "x.nemo")
    convert(tmp_path / "x.nemo", tmp_path / "hf", "hf")
    (one,) = {bionemo.load(path, "cpu").weights_checksum for path in (model, *tmp_path.iterdir())}
    assert one == checksum_weights(iterate_weights(open_model(tmp_path / "x.nemo").weights))
    assert one != bionemo.load(other, "cpu").weights_checksum
    halves = [("b", torch.ones(2, dtype=torch.float16)), ("a", torch.zeros(3))]
    assert checksum_weights(halves) == checksum_weights([(name, each.float()) for name, each in halves[::-1]])
    assert checksum_weights(halves) != checksum_weights([("a", halves[0][1]), ("b", halves[1][1])])


def test_a_head_is_applied_to_copies_of_its_model_only(
    model: Path, other: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copy(head, tmp_path / "head.safetensors")
    convert(model, tmp_path / "x.nemo")
    label(tmp_path / "head.safetensors", tmp_path / "x.nemo", monkeypatch)
    assert "note:" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        label(tmp_path / "head.safetensors", other, monkeypatch)
    error = capsys.readouterr().err.strip()
    assert f"{other} has other weights than the model that the head was trained with ({model})" in error


def test_fine_tuning_starts_from_a_head_of_the_same_model(
    model: Path, other: Path, head: Path, data: Path, tmp_path: Path
) -> None:
    more = ["model.encoder_frozen=False", f"model.restore_head_path={head}"]
    with pytest.raises(UserError, match="has other weights than the model that the head was trained with"):
        finetune(other, data, tmp_path / "other", *more)


def test_weights_that_are_not_finite(head: Path, tmp_path: Path) -> None:
    weights = load_file(head)
    with safe_open(head, "pt") as file:
        metadata = file.metadata()
    for value in (float("nan"), float("inf")):
        weights["layers.1.bias"][0] = value
        save_file(weights, tmp_path / "head.safetensors", metadata)
        with pytest.raises(
            UserError, match=r"head\.safetensors has weights that are not finite: train the head again"
        ):
            read_trained_head(tmp_path / "head.safetensors")


def test_predictions_that_are_not_finite(
    model: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose hidden states are NaN makes no prediction."""
    path = tmp_path / "hf"
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    for name, each in weights.items():
        if name.endswith("emb_layer_norm_after.weight"):
            each.fill_(float("nan"))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with safe_open(head, "pt") as file:
        task = json.loads(file.metadata()["task"])
    task["encoder_weights"] = bionemo.load(path, "cpu").weights_checksum
    save_file(load_file(head), tmp_path / "head.safetensors", {"task": json.dumps(task)})
    with pytest.raises(SystemExit):
        label(tmp_path / "head.safetensors", path, monkeypatch)
    assert "predictions are not finite" in capsys.readouterr().err


def test_results_belong_to_the_content_of_a_model(
    model: Path, other: Path, data: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is found complete with a converted copy of the model, and refused with another one at the same path."""
    moved = tmp_path / "hf"
    shutil.copytree(model, moved)
    finetune(moved, data, head.parent)
    assert "already contains the results of this run" in capsys.readouterr().out
    shutil.rmtree(moved)
    shutil.copytree(other, moved)
    with pytest.raises(UserError, match="belongs to another run and would be replaced"):
        finetune(moved, data, head.parent)


def test_a_test_split_with_one_class(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, classes in (("train", "AB"), ("val", "AB"), ("test", "A")):
        (tmp_path / "data" / name).mkdir(parents=True)
        rows = [(text, classes[n % len(classes)]) for n, text in enumerate(peptides(12))]
        write(tmp_path / "data" / name / "x000.csv", "sequence,target", rows)
    finetune(model, tmp_path / "data", tmp_path / "out")
    out = capsys.readouterr().out
    assert out.count("all labels of the test split are 'A': balanced accuracy and area under the ROC curve") == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["test_balanced_accuracy"] is report["test_roc_auc"] is None
    assert 0 <= report["test_accuracy"] <= 100
