# SPDX-License-Identifier: Apache-2.0
"""Heads for variants of one protein: features, learning, prediction with the trained head, refused data."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import RidgeCV
from transformers import EsmForMaskedLM

import bionemo
from bionemo.cli.analysis import main as analysis
from bionemo.cli.finetune import prepare_and_fine_tune
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning.variants import compute_variant_vectors
from bionemo.inference.batching import BatchLimits
from tests.inference.molecules import trained

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
GENERATOR = np.random.default_rng(4)
WILD_TYPE = "".join(GENERATOR.choice(list(LETTERS), 60))


def mutate(*mutations: str) -> str:
    letters = list(WILD_TYPE)
    for mutation in mutations:
        letters[int(mutation[:-1])] = mutation[-1]
    return "".join(letters)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all single variants; the effect of a residue depends on the site."""
    directory = tmp_path_factory.mktemp("variants")
    (directory / "wild_type.fasta").write_text(f">wt\n{WILD_TYPE}\n")
    sites, residues = GENERATOR.standard_normal(60), dict(zip(LETTERS, GENERATOR.standard_normal(20), strict=True))
    rows = [
        [mutate(f"{site}{letter}"), f"{sites[site] * (residues[letter] - residues[own]):.4f}"]
        for site, own in enumerate(WILD_TYPE) for letter in LETTERS if letter != own
    ]  # fmt: skip
    rows = [rows[number] for number in GENERATOR.permutation(len(rows))]
    for name, part in {"val": rows[:100], "test": rows[100:250], "train": rows[250:]}.items():
        (directory / name).mkdir()
        with (directory / name / "x000.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["sequence", "target"], *part])
    return directory


def overrides(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", "trainer.accelerator=cpu",
            f"exp_manager.exp_dir={output}", "model.finetuning_optim.lr=1e-3", "trainer.max_epochs=40",
            *more]  # fmt: skip


def fine_tune(*given: str) -> None:
    prepare_and_fine_tune(load("downstream_flip_gb1", given, schema=DownstreamConfig))


@pytest.mark.parametrize("tokens", [1 << 13, 130])
def test_features_equal_those_of_transformers(model: Path, tokens: int) -> None:
    ours, reference = bionemo.load(model, "cpu"), EsmForMaskedLM.from_pretrained(model).eval()
    texts = [WILD_TYPE, mutate("0W"), mutate("3A", "17C", "59K"), mutate("30P")]
    found = np.concatenate([*compute_variant_vectors(ours, WILD_TYPE, ours.ids(texts), texts, BatchLimits(tokens))])
    ids = torch.tensor([[0, *each.tolist(), 2] for each in ours.ids(texts)])
    with torch.no_grad():
        hiddens = reference(ids, output_hidden_states=True).hidden_states[-1][:, 1:-1].numpy()
    for row, text, hidden in zip(found, texts, hiddens, strict=True):
        sites = [site for site in range(60) if text[site] != WILD_TYPE[site]]
        assert np.flatnonzero(row[:60]).tolist() == sites
        np.testing.assert_allclose(row[60:], (hidden - hiddens[0])[sites].sum(0), atol=2e-5)
    assert not found[0].any()


def test_a_head_learns_what_a_residue_changes_at_its_site(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    wild_type = f"model.data.wild_type={data / 'wild_type.fasta'}"
    fine_tune(*overrides(model, data, output, wild_type))
    report = json.loads((output / "report.json").read_text())
    rows = {}
    for name in ("train", "test"):
        with (data / name / "x000.csv").open(newline="") as file:
            rows[name] = [(row["sequence"], float(row["target"])) for row in csv.DictReader(file)]
    one_hot = {
        name: np.stack([np.eye(20)[[LETTERS.index(each) for each in text]].ravel() for text, _ in part])
        for name, part in rows.items()
    }
    targets = {name: [target for _, target in part] for name, part in rows.items()}
    ridge = RidgeCV(np.logspace(-2, 4, 13)).fit(one_hot["train"], targets["train"])
    baseline = spearmanr(ridge.predict(one_hot["test"]), targets["test"]).statistic
    assert report["test_spearman"] > baseline + 0.1
    # the head alone predicts the same: it contains the wild type
    (tmp_path / "x.fasta").write_text("".join(f">{n}\n{text}\n" for n, (text, _) in enumerate(rows["test"])))
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", f"--head={output}/head.safetensors",
                                      f"--input={tmp_path}/x.fasta", f"--output={tmp_path}/x.csv"])  # fmt: skip
    analysis()
    with (tmp_path / "x.csv").open(newline="") as file:
        predictions = [float(row["prediction"]) for row in csv.DictReader(file)]
    assert spearmanr(predictions, targets["test"]).statistic == pytest.approx(report["test_spearman"], abs=1e-5)
    # another wild type is another run
    (tmp_path / "other.fasta").write_text(f">wt\n{mutate('5W', '6W')}\n")
    with pytest.raises(UserError, match="belongs to another run"):
        fine_tune(*overrides(model, data, output, f"model.data.wild_type={tmp_path}/other.fasta"))


def test_unsuitable_data_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    ours = bionemo.load(model, "cpu")
    texts, names = [WILD_TYPE, WILD_TYPE[:-1]], ["x.csv:2", "x.csv:3"]
    with pytest.raises(UserError, match=r"x\.csv:3: .* 59 residues and .*wild_type 60: only substitutions"):
        next(compute_variant_vectors(ours, WILD_TYPE, ours.ids(texts), names, BatchLimits()))
    with pytest.raises(UserError, match="the wild type has 120 tokens, but the model accepts at most 94"):
        next(compute_variant_vectors(ours, WILD_TYPE * 2, ours.ids([WILD_TYPE]), [""], BatchLimits()))
    trained(tmp_path / "molecules")
    with pytest.raises(UserError, match="molecules does not read proteins: remove it"):
        next(compute_variant_vectors(bionemo.load(tmp_path / "molecules", "cpu"), "CCO", [], [], BatchLimits()))
    wild_type = f"model.data.wild_type={data / 'wild_type.fasta'}"
    with pytest.raises(UserError, match=r"the encoder must be frozen: set model\.encoder_frozen"):
        fine_tune(*overrides(model, data, tmp_path / "x", wild_type, "model.encoder_frozen=False"))
    with pytest.raises(UserError, match="variants need a label for each sequence"):
        fine_tune(*overrides(model, data, tmp_path / "x", wild_type,
                             "model.data.task_type=token-level-classification"))  # fmt: skip
