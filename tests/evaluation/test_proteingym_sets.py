# SPDX-License-Identifier: Apache-2.0
"""ProteinGym's indels and clinical variants: scores, labels, averages, faulty rows."""

import csv
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.evaluation.proteingym_files import read_assay
from bionemo.evaluation.tasks import Problems
from bionemo.inference.variants import score_sequences, score_variants
from tests.support import evaluation
from tests.support.huggingface import theirs
from tests.support.proteingym import AMINO_ACIDS, COLUMNS, write_csv

evaluate = partial(evaluation.evaluate, "proteingym")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    theirs(path)
    return path


def write_sets(path: Path) -> None:
    """Write four assays of indels of three ids, and four clinical proteins of each kind, one of them benign."""
    random = np.random.default_rng(0)
    indels, clinical = path / "DMS_ProteinGym_indels", path / "clinical_ProteinGym_indels"
    substitutions, references = path / "clinical_ProteinGym_substitutions", path / "reference_files"
    for folder in (indels, clinical, substitutions, references):
        folder.mkdir(parents=True)
    rows: list[tuple[str, ...]] = []
    proteins: list[tuple[str, ...]] = []
    for index in range(4):
        sequence = "".join(random.choice(list(AMINO_ACIDS), 30 if index < 3 else 120))
        places = random.choice(20, 12, replace=False)
        variants = [sequence[:place] + "GS"[: 1 + place % 2] + sequence[place + index :] for place in places]
        measured = [f"{value:.2f}" for value in random.normal(size=12)]
        name, protein = f"A{index}_indels", f"NP_{index}.1"
        write_csv(
            indels / f"{name}.csv",
            [
                ("mutated_sequence", "DMS_score", "DMS_score_bin"),
                *((v, m, int(float(m) > 0)) for v, m in zip(variants, measured, strict=True)),
            ],
        )
        labels = ["Benign" if n % 3 or index == 1 else "Pathogenic" for n in range(12)]
        write_csv(
            clinical / f"{protein}.csv",
            [
                ("", "protein", "mutated_sequence", "DMS_bin_score"),
                *((n, protein, v, labels[n]) for n, v in enumerate(variants)),
            ],
        )
        mutants = [f"{sequence[p]}{p + 1}{'W' if sequence[p] != 'W' else 'A'}" for p in places]
        write_csv(
            substitutions / f"{protein}.csv",
            [("protein", "mutant", "DMS_bin_score"), *((protein, m, labels[n]) for n, m in enumerate(mutants))],
        )
        kind = "Stability" if index < 3 else "Activity"
        rows.append((name, f"{name}.csv", "P" if index < 2 else f"Q{index}", "Human", sequence, kind, "Low"))
        proteins.append((protein, f"{protein}.csv", sequence))
    write_csv(references / "DMS_indels.csv", [COLUMNS, *rows])
    for name in ("clinical_indels", "clinical_substitutions"):
        write_csv(references / f"{name}.csv", [("DMS_id", "DMS_filename", "target_seq"), *proteins])


@pytest.fixture(scope="module")
def output(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets")
    write_sets(path / "data")
    evaluate(model, path / "data", path / "results")
    return path


def tables(output: Path, kind: str) -> dict[str, list[dict[str, str]]]:
    found = {}
    for path in sorted((output / "results" / "proteingym").glob(f"{kind}.*.csv")):
        with path.open(newline="") as file:
            found[path.stem.removeprefix(f"{kind}.")] = list(csv.DictReader(file))
    return found


@pytest.mark.parametrize("method", ["masked-marginal", "pseudo-perplexity"])
def test_scores_of_indels_are_differences_of_log_likelihoods(method: str, model: Path) -> None:
    """Compare with the model of transformers, without masks, or with a mask at each residue in turn."""
    sequences = ["MKTAYIAKQR", "MKTAYIQR", "MKTAYWWIAKQR", "M"]
    ours, network = bionemo.load(model, "cpu"), EsmForMaskedLM.from_pretrained(model).eval()

    def likelihood(text: str) -> float:
        tokens = torch.tensor([[0, *ours.ids([text])[0].tolist(), 2]])
        total = 0.0
        for place in range(1, tokens.shape[1] - 1):
            given = tokens.clone()
            if method == "pseudo-perplexity":
                given[0, place] = 32
            with torch.no_grad():
                total += float(network(given).logits[0, place].log_softmax(-1)[tokens[0, place]])
        return total

    found = score_sequences(ours, sequences[0], sequences, ["a", "b", "c", "d"], method)
    expected = [likelihood(text) - likelihood(sequences[0]) for text in sequences]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found[0] == 0


def test_a_substitution_has_the_pseudo_perplexity_score_of_its_sequence(model: Path) -> None:
    """Also if the protein is longer than the model."""
    ours, wild = bionemo.load(model, "cpu"), "MKTAYIAKQRGG" * 10
    (one,) = score_variants(ours, wild, ["K2W:Y5A"], "pseudo-perplexity", window="overlapping")
    other = score_sequences(ours, wild, ["MWTAA" + wild[5:]], ["a"], "pseudo-perplexity", "overlapping")
    assert other[0] == pytest.approx(one, abs=1e-4)


def test_sets_are_averaged_as_proteingym_does(output: Path) -> None:
    section = evaluation.read_section(output / "results")
    averages = section["summary"]["averages"]
    values = {task["task"]: task["metrics"] for task in section["results"]}
    assert len(values) == 12 and values.keys() > {"DMS_indels.A0_indels", "clinical_indels.NP_0.1"}
    rho = [values[f"DMS_indels.A{n}_indels"]["spearman"] for n in range(4)]
    stability, activity = np.mean([np.mean(rho[:2]), rho[2]]), rho[3]  # two assays of one id
    found = averages["DMS_indels spearman"]
    assert found["selection"] == pytest.approx({"Activity": activity, "Stability": stability})
    assert found["overall"] == pytest.approx((stability + activity) / 2)
    for kind in ("clinical_substitutions", "clinical_indels"):
        areas: list[float] = []
        pooled: dict[str, list[float]] = defaultdict(list)
        for name, rows in tables(output, kind).items():
            fit, scores = ([float(row[column]) for row in rows] for column in ("DMS_score", "score"))
            pooled["fit"] += fit
            pooled["scores"] += scores
            if name == "NP_1.1":
                assert set(fit) == {1.0} and values[f"{kind}.{name}"] == {"auc": None}
                continue
            areas.append(float(roc_auc_score(fit, scores)))
            assert values[f"{kind}.{name}"]["auc"] == pytest.approx(areas[-1])
        assert averages[f"{kind} auc"]["overall"] == pytest.approx(np.mean(areas))
        assert averages[f"{kind} auc"]["pooled"] == pytest.approx(roc_auc_score(pooled["fit"], pooled["scores"]))
    page = (output / "results" / "report.html").read_text()
    assert "clinical_indels auc" in page and "<th>pooled</th>" in page


def test_only_sets_with_files_are_evaluated(model: Path, output: Path, tmp_path: Path) -> None:
    """A copy of ProteinGym's repository has the reference files of all."""
    folder = tmp_path / "data"
    write_sets(folder)
    for name in ("clinical_ProteinGym_substitutions", "DMS_ProteinGym_indels"):
        for file in (folder / name).iterdir():
            file.unlink()
    section = evaluate(model, folder, tmp_path / "results")
    assert {task["kind"] for task in section["results"]} == {"clinical_indels"}
    same = evaluation.read_section(output / "results")["summary"]["averages"]["clinical_indels auc"]
    assert section["summary"]["averages"] == {"clinical_indels auc": same}


FAULTS = {
    "label": (
        "clinical_indels",
        "MKT,Uncertain",
        "the score 'Uncertain' is not a number: set it to Benign or Pathogenic",
    ),
    "contradiction": ("clinical_indels", "MKA,Benign\nMKA,Pathogenic", "MKA has the score 0, but 1 at"),
    "no number": ("DMS_indels", "MKA,x", "the score 'x' is not a number"),
}


@pytest.mark.parametrize(("kind", "rows", "message"), FAULTS.values(), ids=FAULTS)
def test_faulty_rows(kind: str, rows: str, message: str, tmp_path: Path) -> None:
    path, is_clinical = tmp_path / "x.csv", kind.startswith("clinical")
    header = "mutated_sequence,DMS_bin_score" if is_clinical else "mutated_sequence,DMS_score,DMS_score_bin"
    path.write_text("\n".join([header, *(row if is_clinical else f"{row},1" for row in rows.split("\n"))]) + "\n")
    with pytest.raises(UserError, match=message) as caught:
        read_assay(path, "MKT", Problems(keep_going=False), kind)
    assert f"{path}:" in str(caught.value)


@pytest.mark.parametrize("column", ["DMS_bin_score", "DMS_score_bin"])
def test_labels_of_clinical_variants(column: str, tmp_path: Path) -> None:
    """The downloaded files have the former with names, ProteinGym's documentation the latter with 1 for pathogenic."""
    labels = ["Benign", "Pathogenic", ""] if column == "DMS_bin_score" else ["0", "1.0", "NA"]
    write_csv(tmp_path / "x.csv", [("mutant", column), *zip(["M1A", "K2A", "T3A"], labels, strict=True)])
    found = read_assay(tmp_path / "x.csv", "MKT", Problems(keep_going=False), "clinical_substitutions")
    assert (found.names, found.measured.tolist(), found.fit.tolist(), found.missing) == (
        ["M1A", "K2A"], [1.0, 0.0], [True, False], 1,
    )  # fmt: skip


def test_a_folder_without_files_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate(model, tmp_path, tmp_path / "results")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "has no assay files of DMS_substitutions.csv or DMS_indels.csv or clinical" in line
