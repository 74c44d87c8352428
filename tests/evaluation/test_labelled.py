# SPDX-License-Identifier: Apache-2.0
"""`bionemo evaluate --suite flip` and `--suite moleculenet`: baselines, seeds, fine-tuning, unsuitable data."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bionemo
from bionemo.cli.finetune import prepare_and_fine_tune
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.evaluation.baselines import OneHotModel, with_random_weights
from bionemo.evaluation.labelled import SEEDS, Flip, MoleculeNet
from tests.inference.molecules import KNOWN, trained
from tests.support.evaluation import arguments, evaluate, read_section
from tests.support.huggingface import theirs

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
SIZES = {"train": 80, "val": 20, "test": 40}


def write_rows(directory: Path, header: list[str], rows: dict[str, list[list[str]]]) -> None:
    for name, part in rows.items():
        (directory / name).mkdir(parents=True)
        with (directory / name / "x000.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *part])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "hf"
    theirs(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write secondary structure that follows from the letter, and melting points that follow from the composition."""
    directory, generator = tmp_path_factory.mktemp("FLIP"), np.random.default_rng(2)
    states = str.maketrans(LETTERS, "HECCCHHECCHHCCCCCEEE")
    rows = {}
    for name, count in {**SIZES, "train": 1000}.items():
        texts = ["".join(generator.choice(list(LETTERS), generator.integers(5, 40))) for _ in range(count)]
        rows[name] = [[text, text.translate(states), "0" + "1" * (len(text) - 1)] for text in texts]
    write_rows(directory / "secondary_structure", ["sequence", "3state", "resolved"], rows)
    for name, count in SIZES.items():
        texts = ["".join(generator.choice(list(LETTERS), generator.integers(20, 60))) for _ in range(count)]
        rows[name] = [[text, f"{100 * sum(map(text.count, 'ILV')) / len(text):.3f}"] for text in texts]
    write_rows(directory / "meltome", ["sequence", "target"], rows)
    (directory / "notes").mkdir()
    return directory


@pytest.fixture(scope="module")
def section(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("results") / "flip"
    return evaluate("flip", model, data, output) | {"page": (output / "report.html").read_text()}


def test_baselines_and_page(section: dict[str, Any]) -> None:
    summary = section["summary"]
    assert summary.keys() == {"secondary_structure", "meltome"}
    published = {f"{name} (BioNeMo v1)" for name in ("ESM1nv", "ProtT5nv", "ESM2 650M", "one-hot")}
    assert all(inputs.keys() == {"frozen", "random-weights", "one-hot"} | published for inputs in summary.values())
    assert summary["secondary_structure"]["one-hot"]["accuracy"][0] > 90  # each letter has its state
    assert summary["meltome"]["one-hot"]["spearman"][0] > 0.7  # a sum over letters
    # the weights of this model are random, so both encoders are equally good
    frozen, random = (summary["secondary_structure"][name]["accuracy"][0] for name in ("frozen", "random-weights"))
    assert frozen == pytest.approx(random, abs=10)
    assert {result["truncated"] for result in section["results"]} == {0}
    assert summary["meltome"]["frozen"]["spearman"][1] > 0
    page = section["page"]
    for text in ("<h3>secondary_structure</h3>", "<h3>meltome</h3>", "ESM2 650M (BioNeMo v1)", "85.5", "53.38",
                 "<td>one-hot</td>", "<td>random-weights</td>"):  # fmt: skip
        assert text in page


def test_results_are_means_over_seeds(section: dict[str, Any]) -> None:
    for result in section["results"]:
        assert len(result["seeds"]) == len(SEEDS)
        found = section["summary"][result["dataset"]][result["input"]]
        for name, (mean, deviation) in found.items():
            values = [each[name] for each in result["seeds"]]
            assert mean == pytest.approx(np.mean(values))
            assert deviation == pytest.approx(np.std(values, ddof=1))
            assert result["metrics"][name] == pytest.approx(mean)


@pytest.mark.slow
def test_a_seed_equals_the_finetune_command(model: Path, data: Path, tmp_path: Path, section: dict[str, Any]) -> None:
    overrides = [
        f"model.restore_encoder_path={model}", f"model.data.dataset_path={data / 'secondary_structure'}",
        "trainer.accelerator=cpu", f"exp_manager.exp_dir={tmp_path / 'run'}", f"model.seed={SEEDS[1]}",
    ]  # fmt: skip
    prepare_and_fine_tune(load("downstream_flip_sec_str", overrides, schema=DownstreamConfig))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (result,) = (each for each in section["results"] if each["task"] == "secondary_structure-frozen")
    for name in ("accuracy", "f1", "loss"):
        assert result["seeds"][1][name] == pytest.approx(report[f"test_{name}"], rel=1e-5)


def test_one_hot_vectors(model: Path) -> None:
    ours = bionemo.load(model, "cpu")
    baseline = OneHotModel(ours)
    ids = ours.ids(["MKTM", "AC"])
    (columns,) = baseline.compute(ids, ["hiddens", "embeddings"])
    assert columns["hiddens"].argmax(1).tolist() == [*ids[0], *ids[1]]
    assert columns["embeddings"][0, ids[0][0]] == 0.5
    assert columns["embeddings"].sum(1).tolist() == [1, 1]


def test_random_weights_depend_on_the_seed_only(model: Path) -> None:
    ours = bionemo.load(model, "cpu")
    state = torch.get_rng_state()
    one, same, other = (with_random_weights(ours, seed).embed(["MKTAYIAK"]) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.01
    assert np.abs(one - ours.embed(["MKTAYIAK"])).max() > 0.01


def test_random_weights_are_those_at_the_start_of_pretraining(model: Path) -> None:
    """Normal weights with the standard deviation of the configuration, biases 0, and weights of norms 1."""
    network = with_random_weights(bionemo.load(model, "cpu"), 1).network
    matrices = 0
    for name, weight in network.named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif weight.dim() == 1:
            assert (weight == 1).all(), name
        elif "proj" not in name and "fc2" not in name:  # residual projections have a smaller deviation
            assert weight.std().item() == pytest.approx(network.config.init_method_std, rel=0.1), name
            matrices += 1
    assert matrices > 3


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(
    model: Path, data: Path, tmp_path: Path, section: dict[str, Any]
) -> None:
    command = [sys.executable, "-m", "bionemo.cli", "evaluate"]
    words = arguments("flip", model, data, tmp_path / "out", "--devices=2")
    subprocess.run([*command, *words], check=True, capture_output=True)
    other = read_section(tmp_path / "out")
    one, two = ({each["task"]: each["seeds"] for each in found["results"]} for found in (section, other))
    assert one == two


def test_truncated_proteins_are_reported(model: Path, tmp_path: Path) -> None:
    rows = [["MKT" * 20, "1.0"], ["MKV" * 40, "2.0"], ["MLV" * 33, "3.0"], ["MKTW", "4.0"]]  # the model reads 94
    write_rows(tmp_path / "data" / "meltome", ["sequence", "target"], {name: rows for name in SIZES})
    found = evaluate("flip", model, tmp_path / "data", tmp_path / "out")
    assert {result["truncated"] for result in found["results"]} == {6}
    assert "<th>truncated</th>" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_fine_tuning(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meltome").symlink_to(data / "meltome")
    found = evaluate("flip", model, tmp_path / "data", tmp_path / "out", "--fine-tuning")
    inputs = found["summary"]["meltome"]
    assert inputs.keys() > {"frozen", "random-weights", "one-hot", "fine-tuned"}
    (result,) = (each for each in found["results"] if each["input"] == "fine-tuned")
    assert len({json.dumps(each) for each in result["seeds"]}) == len(SEEDS)
    assert inputs["fine-tuned"]["mse"][0] < 2 * inputs["frozen"]["mse"][0]


def test_molecules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "model")
    generator = np.random.default_rng(1)
    rows = {
        name: [[text, str(len(text) + generator.normal() / 10)] for text in generator.choice(KNOWN, count)]
        for name, count in SIZES.items()
    }
    rows["train"] += [["CCN", "NaN"], ["C1CC(", "1.5"]]
    write_rows(tmp_path / "data" / "FreeSolv", ["smiles", "expt"], rows)
    found = evaluate("moleculenet", tmp_path / "model", tmp_path / "data", tmp_path / "out")
    inputs = found["summary"]["FreeSolv"]
    assert inputs["frozen"]["spearman"][0] > 0.9
    page = (tmp_path / "out" / "report.html").read_text()
    assert "MegaMolBART, SVM (BioNeMo v1)" in page
    captured = capsys.readouterr()
    assert "FreeSolv, MSE: frozen" in captured.out
    for note in (
        "1 of 82 rows have no label in column &#x27;expt&#x27; (1 NaN): left out",
        "RDKit cannot read 1 of 81 SMILES",
    ):
        assert page.count(note) == 1
        assert captured.err.count(note.replace("&#x27;", "'")) == 1


def test_unsuitable_models_and_data(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"has no folder named secondary_structure, scl, .*: prepare the data"):
        Flip(tmp_path).tasks()
    (tmp_path / "ESOL").mkdir()
    with pytest.raises(UserError, match="1 of 1 data files not found"):
        [task.files for task in MoleculeNet(tmp_path).tasks()]
    rows = [["CCO", "1.0"]]
    header = ["smiles", "measured log solubility in mols per litre"]
    write_rows(tmp_path / "ESOL", header, dict.fromkeys(SIZES, rows))
    with pytest.raises(SystemExit):
        evaluate("moleculenet", model, tmp_path, tmp_path / "out")
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is a ESM2nv, which cannot read ESOL: use MegaMolBART" in error
    bad = tmp_path / "bad" / "meltome"
    write_rows(bad, ["sequence", "target"], {name: [["MKT", "1.0"], ["MKV", "warm"]] for name in SIZES})
    with pytest.raises(SystemExit):
        evaluate("flip", model, tmp_path / "bad", tmp_path / "stops")
    assert "x000.csv:3: the target is 'warm', expected a number" in capsys.readouterr().err
    found = evaluate("flip", model, tmp_path / "bad", tmp_path / "goes", "--keep-going")
    assert len(found["failed"]) == 3
