# SPDX-License-Identifier: Apache-2.0
"""`bionemo certify`: bands, synthetic molecules, and detection of changes that harm learning."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rdkit import Chem

from bionemo.common.errors import UserError
from bionemo.data.molecules.smiles import parse_smiles
from bionemo.evaluation import certification
from bionemo.evaluation.certification import (
    RECIPES,
    SEEDS,
    band,
    certify,
    compare_curves,
    read_bands,
    train_recipe,
)
from bionemo.evaluation.mock_molecules import write_molecules
from bionemo.tokenizers import megamolbart


def test_every_recipe_has_a_band() -> None:
    recorded = read_bands()
    assert set(recorded) == set(RECIPES)
    for name, curves in recorded.items():
        quarter = RECIPES[name].steps // 4
        assert [list(curve) for curve in curves] == [[quarter, 2 * quarter, 3 * quarter, 4 * quarter]] * len(SEEDS)
        expected = band(curves, len(SEEDS))
        losses = [loss for loss, _ in expected.values()]
        assert losses == sorted(losses, reverse=True), f"{name} does not learn"
        # A band that is wide compared with what is learned would not detect anything.
        assert expected[4 * quarter][1] < 0.25 * (losses[0] - losses[-1]), name


def test_the_band_of_a_hand_computed_case() -> None:
    # mean 2 and standard deviation 0.1; difference of two means of 3: 0.1 * sqrt(2 / 3); times 4
    recorded = [{10: 1.9, 20: 1.0}, {10: 2.0, 20: 1.0}, {10: 2.1, 20: 1.0}]
    assert band(recorded, 3)[10] == pytest.approx((2.0, 0.32660), abs=1e-5)
    assert band(recorded, 3)[20] == (1.0, 0.01)
    assert band(recorded, 1)[10] == pytest.approx((2.0, 0.46188), abs=1e-5)


def test_a_loss_outside_the_band_is_reported() -> None:
    recorded = [{10: 1.9, 20: 1.0}, {10: 2.0, 20: 1.0}, {10: 2.1, 20: 1.0}]
    assert compare_curves("x", [{10: 2.32, 20: 1.009}] * 3, recorded) == []
    assert compare_curves("x", [{10: 2.33, 20: 0.98}] * 3, recorded) == [
        "x: the loss at step 10 is 2.3300, worse than 2.0000 ± 0.3266",
        "x: the loss at step 20 is 0.9800, better than 1.0000 ± 0.0100",
    ]
    assert compare_curves("x", [{10: float("nan"), 20: 1.0}] * 3, recorded)[0].startswith("x: the loss at step 10")
    assert compare_curves("x", [{5: 1.0}], recorded) == ["x: curves with other steps are recorded"]
    assert compare_curves("x", [{5: 1.0}], []) == ["x: no curve is recorded"]


def test_synthetic_molecules_are_valid(tmp_path: Path) -> None:
    write_molecules(tmp_path, {"train": 2000, "val": 100})
    texts = {split: (tmp_path / split / "x000.csv").read_text().splitlines() for split in ("train", "val")}
    assert texts["train"][0] == texts["val"][0] == "zinc_id,smiles"
    assert [len(lines) for lines in texts.values()] == [2001, 101]
    smiles = [line.split(",")[1] for line in texts["train"][1:]]
    assert all(parse_smiles(each) is not None for each in smiles)
    assert len({Chem.MolToSmiles(parse_smiles(each)) for each in smiles}) > 1000
    assert not any(megamolbart().find_unknown(each) for each in smiles)
    again = tmp_path / "again"
    write_molecules(again, {"train": 2000, "val": 100})
    assert (again / "val" / "x000.csv").read_text().splitlines() == texts["val"]


def test_a_recipe_trains_and_an_interrupted_certification_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(RECIPES["esm2nv"], steps=8, overrides=("model.hidden_size=32", "model.num_layers=1"))
    monkeypatch.setattr(certification, "RECIPES", {"esm2nv": short})
    monkeypatch.setattr(certification, "read_bands", dict)
    output = tmp_path / "out"
    assert certify(output, ["esm2nv"], seeds=[1]) == ["esm2nv: no curve is recorded"]
    curves = json.loads((output / "bands.json").read_text())
    assert list(curves["esm2nv"][0]) == ["2", "4", "6", "8"]
    assert "<svg" in (output / "certification.html").read_text()
    recorded = {"esm2nv": [{int(step): loss for step, loss in curve.items()} for curve in curves["esm2nv"]] * 3}
    monkeypatch.setattr(certification, "read_bands", lambda: recorded)
    assert certify(output, ["esm2nv"], seeds=[1]) == []  # the run is complete
    assert json.loads((output / "bands.json").read_text()) == curves


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe 'esm3': choose from esm2nv, esm1nv"):
        certify(tmp_path / "out", ["esm3"])
    with pytest.raises(UserError, match=r"the run in .* failed: error: .*hidden_size.*\(see .*train\.log\)"):
        train_recipe(RECIPES["esm2nv"], 1, tmp_path / "run", ["model.hidden_size=33"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "bionemo.cli", "certify", "--output", tmp_path / "other"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "was not created by bionemo" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_all_families_learn_as_recorded(tmp_path: Path, name: str) -> None:
    assert certify(tmp_path / "out", [name]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    ["model.optim.lr=1e-3", "model.hidden_dropout=0.2", "model.optim.sched.anneal_percentage=1",
     "model.data.mask_percent=0.5 model.data.perturb_percent=0.4"],
)  # fmt: skip
def test_harm_is_detected(tmp_path: Path, harm: str) -> None:
    curve = train_recipe(RECIPES["esm2nv"], 1, tmp_path, harm.split())
    assert compare_curves("esm2nv", [curve], read_bands()["esm2nv"]) != []
