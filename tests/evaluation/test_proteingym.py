# SPDX-License-Identifier: Apache-2.0
"""`bionemo evaluate --suite proteingym`: scores, averages, interruptions, faulty files."""

import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bionemo
from bionemo.cli.evaluate import main
from bionemo.common.errors import UserError
from bionemo.evaluation.proteingym_files import (
    Assay,
    average_assays,
    error_of_difference,
    read_assay,
    read_published,
    read_reference,
)
from bionemo.evaluation.tasks import Problems
from bionemo.inference.variants import score_variants
from tests.conftest import ROOT
from tests.support import evaluation
from tests.support.evaluation import read_section
from tests.support.huggingface import theirs
from tests.support.proteingym import COLUMNS, KINDS, LONG, write_csv, write_suite


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    theirs(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_suite(path, 6)
    return path


arguments = partial(evaluation.arguments, "proteingym")
evaluate = partial(evaluation.evaluate, "proteingym")


@pytest.fixture(scope="module")
def report(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return evaluate(model, data, tmp_path_factory.mktemp("output") / "results")


def test_tables_contain_the_scores_of_the_variants(
    model: Path, data: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    evaluate(model, data, tmp_path / "x", "--method=wild-type-marginal", "--window=overlapping")
    loaded = bionemo.load(model, "cpu")
    for assay in read_reference(data / "DMS_substitutions.csv"):
        rows = list(csv.DictReader((tmp_path / "x" / "proteingym" / f"{assay.name}.csv").open()))
        variants = [row["mutant"] for row in rows]
        assert len(rows) >= 20
        scores = score_variants(loaded, assay.sequence, variants, "wild-type-marginal", window="overlapping")
        np.testing.assert_allclose([float(row["score"]) for row in rows], scores, atol=1e-6)
    long = [task["windows"] for task in report["results"] if task["length"] == LONG]
    assert long == ["optimal", "optimal"]
    assert all(task["missing"] == 1 for task in report["results"])


def test_the_report_averages_the_assays(data: Path, report: dict[str, Any]) -> None:
    values = {task["task"]: task["metrics"]["auc"] for task in report["results"]}
    assays = read_reference(data / "DMS_substitutions.csv")
    found = average_assays(values, assays)
    assert report["summary"]["averages"]["auc"] == found._asdict()
    by_hand = []
    for kind in KINDS:  # ids of a kind differ: six assays of three ids
        by_hand.append(np.mean([values[assay.name] for assay in assays if assay.selection == kind]))
    assert found.overall == pytest.approx(np.mean(by_hand))
    assert set(found.depth) == {"Low", "Medium", "High"}


def test_averages_over_ids_and_types() -> None:
    def assay(name: str, uniprot: str, selection: str) -> Assay:
        return Assay(name, "", uniprot, "Human", "", selection, "Low")

    assays = [assay("a", "P", "Activity"), assay("b", "P", "Activity"), assay("c", "Q", "Activity"),
              assay("d", "P", "Binding"), assay("e", "R", "Binding")]  # fmt: skip
    found = average_assays({"a": 0.1, "b": 0.3, "c": 0.6, "d": 0.9, "e": math.nan}, assays)
    assert found.selection == pytest.approx({"Activity": 0.4, "Binding": 0.9})  # ((0.1 + 0.3) / 2 + 0.6) / 2
    assert found.overall == pytest.approx(0.65)
    assert found.depth["Low"] == pytest.approx(((0.1 + 0.3 + 0.9) / 3 + 0.6) / 2)
    # two draws of two ids: Activity is 0.2, 0.4 or 0.6 with probabilities 1/4, 1/2 and 1/4; Binding is constant
    assert found.error == pytest.approx(math.sqrt(0.02) / 2, rel=0.05)


@pytest.mark.slow
def test_two_processes_give_the_same_report(model: Path, data: Path, report: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bionemo.cli", "evaluate"]
    subprocess.run([*command, *arguments(model, data, tmp_path / "two", "--devices=2")], check=True)
    assert read_section(tmp_path / "two") == report


@pytest.mark.slow
def test_an_evaluation_continues_after_kills(model: Path, tmp_path: Path) -> None:
    """20 assays; the command is killed five times, at any moment, in one and in two processes."""
    write_suite(tmp_path, 20)
    expected = evaluate(model, tmp_path, tmp_path / "whole")
    command = [sys.executable, "-m", "bionemo.cli", "evaluate"]
    killed = 0
    for attempt in range(30):
        more = [f"--devices={1 + attempt % 2}"]
        process = subprocess.Popen(
            [*command, *arguments(model, tmp_path, tmp_path / "parts", *more)], start_new_session=True
        )
        done, wanted = tmp_path / "parts" / "proteingym", 3 * (killed + 1)
        while process.poll() is None and killed < 5:
            if len(list(done.glob("*.json"))) >= wanted:
                os.killpg(process.pid, signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.01)
        if process.wait() == 0:
            break
    assert killed == 5
    assert read_section(tmp_path / "parts") == expected


FAULTS = {
    "wrong wild type": ("A1C", "residue 1 of the wild type is M, not A: correct the row"),
    "outside": ("A99C", "the sequence has residues 1 to 10"),
    "no number": ("M1A,MKTAYIAKQA,x,1", "the score 'x' is not a number"),
    "twice": ("M1A,,5,1\nM1A,,6,1", "M1A has the score 6, but 5 at"),
    "other sequence": ("M1A,MMTAYIAKQR,5,1", "`mutated_sequence` is not the wild type with these mutations"),
    "no class": ("M1A,,5,NA", "M1A has a DMS_score, but no DMS_score_bin: fill in both or none"),
    "format": ("Met1Ala", "expected a residue, its position and its replacement"),
}


@pytest.mark.parametrize(("rows", "message"), FAULTS.values(), ids=FAULTS)
def test_faulty_rows(rows: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "assay.csv"
    lines = [row if "," in row else f"{row},,1,1" for row in rows.split("\n")]
    path.write_text("\n".join(["mutant,mutated_sequence,DMS_score,DMS_score_bin", "K2A,,0.5,1", *lines]) + "\n")
    with pytest.raises(UserError) as caught:
        read_assay(path, "MKTAYIAKQR", Problems(keep_going=False))
    assert f"{path}:{1 + len(lines) + 1}" in str(caught.value)
    assert message in str(caught.value)
    if "number" in message:
        return
    problems = Problems(keep_going=True)
    assert read_assay(path, "MKTAYIAKQR", problems).names == ["K2A", *(["M1A"] if len(lines) == 2 else [])]
    assert problems.count == 1


def test_faulty_tasks_are_counted(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "P0_0.csv").write_text("mutant,score\nA1C,1\n")
    (tmp_path / "P0_1.csv").unlink()
    with (tmp_path / "P1_2.csv").open("a") as file:
        file.write("W500A,,1,1\n")
    with pytest.raises(SystemExit) as caught:
        evaluate(model, tmp_path, tmp_path / "stops")
    assert caught.value.code == 1
    assert "has no column 'DMS_score_bin'" in capsys.readouterr().err
    report = evaluate(model, tmp_path, tmp_path / "continues", "--keep-going")
    assert report["failed"] == ["P0_0", "P0_1"]
    assert report["faulty_rows"] == 1
    printed = capsys.readouterr().out
    assert re.search(r"proteingym: 4 tasks, 2 failed \(\w+: .+; \w+: .+\), 1 faulty rows left out", printed)


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "", "x y"])
def test_names_of_assays_are_file_names(name: str, tmp_path: Path) -> None:
    row = [name, "x.csv", "P", "Human", "MKT", "Activity", "Low"]
    write_csv(tmp_path / "reference.csv", [COLUMNS, row])
    with pytest.raises(UserError, match=r"reference\.csv:2: .* is not a file name"):
        read_reference(tmp_path / "reference.csv")


def test_an_output_belongs_to_one_model(model: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    theirs(other, layers=1)
    evaluate(model, data, tmp_path / "results")
    with pytest.raises(SystemExit):
        evaluate(other, data, tmp_path / "results")


def test_published_results_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("DMS ID", "Model A", "Model B", "Number of Mutants", "Selection Type", "UniProt ID",
             "MSA_Neff_L_category", "Taxon"),
            ("a", "0.2", "0.5", "10", "Activity", "P", "Low", "Human"),
            ("b", "0.4", "", "10", "Stability", "P", "Low", "Human")]  # fmt: skip
    write_csv(tmp_path / "published.csv", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate", "average", str(tmp_path / "published.csv")])
        main()
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("Model B  0.5000 +- 0.0000")
        assert second.startswith("Model A  0.3000 +- 0.0000")
        patch.setattr(sys, "argv", ["evaluate", "average", str(tmp_path / "published.csv"), "--models", "C"])
        with pytest.raises(SystemExit):
            main()
    assert "has no model 'C': choose some of Model A, Model B" in capsys.readouterr().err


def test_error_of_the_difference_by_hand() -> None:
    """Two ids, whose differences to the best model are 0.2 and 0.4: the mean of two draws is 0.2, 0.3 or 0.4."""
    assays = [Assay(name, "", name, "Human", "", "Activity", "Low") for name in ("P", "Q")]
    best = {"P": 0.9, "Q": 0.3}
    assert error_of_difference({"P": 0.7, "Q": -0.1}, best, assays) == pytest.approx(math.sqrt(0.005), rel=0.05)
    assert error_of_difference(best, best, assays) == 0
    assert average_assays(best, assays).error == pytest.approx(math.sqrt(0.045), rel=0.05)  # 0.9, 0.6 or 0.3


@pytest.mark.parametrize("folder", [".", "repository"])
def test_files_with_the_names_of_proteingym(folder: str, model: Path, tmp_path: Path) -> None:
    """As downloaded, and as in ProteinGym's repository; the page names both standard errors."""
    data = tmp_path / "data"
    data.mkdir()
    write_suite(data, 4)
    header = ["DMS ID", "Weak", "Strong", "Number of Mutants", "Selection Type", "UniProt ID", "MSA_Neff_L_category",
              "Taxon"]  # fmt: skip
    rows = [(f"P{n // 2}_{n}", 0.1, 0.4 + 0.1 * n, 9, KINDS[n % 5], f"P{n // 2}", "Low", "Human") for n in range(4)]
    published = data / "DMS_substitutions_Spearman_DMS_level.csv"
    write_csv(published, [header, *rows])
    if folder == "repository":
        scores, references = data / "benchmarks/DMS_zero_shot/substitutions/Spearman", data / "reference_files"
        assays = [(data / "DMS_ProteinGym_substitutions", file) for file in data.glob("P*.csv")]
        for place, file in [*assays, (scores, published), (references, data / "DMS_substitutions.csv")]:
            place.mkdir(parents=True, exist_ok=True)
            file.rename(place / file.name)
    summary = evaluate(model, data, tmp_path / "results")["summary"]
    assert summary["best"] == "Strong"
    assert summary["published"]["Strong"]["error_of_difference"] == 0
    assert summary["averages"]["spearman"]["error_of_difference"] > 0
    page = (tmp_path / "results" / "report.html").read_text()
    assert "<th>error</th>" in page and "<th>error_of_difference</th>" in page
    assert "standard error of the average, by bootstrap over UniProt ids" in page


@pytest.mark.slow
def test_published_standard_errors_are_reproduced() -> None:
    """Values of Summary_performance_DMS_substitutions_Spearman.csv in ProteinGym v1.3."""
    path = ROOT.parent / "shared" / "data" / "proteingym" / "Spearman_per_assay.csv"
    if not path.exists():
        pytest.skip("the published results are not here")
    published = {
        "AIDO Protein-RAG (16B)": (0.518, 0.0), "VenusREM": (0.518, 0.005), "ProSST (K=2048)": (0.507, 0.006),
        "GEMME": (0.455, 0.009), "ESM2 (650M)": (0.414, 0.012), "ESM-1b": (0.394, 0.011), "ESM2 (8M)": (0.226, 0.015),
        "Unirep": (0.19, 0.016),
    }  # fmt: skip
    assays, models = read_published(path)
    best = models["AIDO Protein-RAG (16B)"]
    for name, (mean, error) in published.items():
        assert average_assays(models[name], assays).overall == pytest.approx(mean, abs=6e-4)
        assert error_of_difference(models[name], best, assays) == pytest.approx(error, abs=6e-4)
