# SPDX-License-Identifier: Apache-2.0
"""`bionemo tune`: choice of learning rates, narrow models, schedules, and a complete run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.evaluation import tuning
from bionemo.evaluation.tuning import narrow_overrides, next_rate, peak_rate, rate_overrides, tune


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (0.01, [0.0025, 0.005, 0.01, 0.02, 0.04]),
        (0.04, [0.0025, 0.005, 0.01, 0.02, 0.04, 0.08]),
        (0.001, [0.0025, 0.005, 0.01, 0.02, 0.04, 0.00125, 0.000625]),
        (10.0, [0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64]),  # at most 9
    ],
)
def test_rates_around_the_lowest_loss(best: float, expected: list[float]) -> None:
    losses: dict[float, float] = {}
    while (rate := next_rate(losses, 0.01)) is not None:
        losses[rate] = math.inf if rate > 20 * best else abs(math.log(rate / best))
    assert list(losses) == pytest.approx(expected, rel=1e-2)


def test_the_narrow_model_has_the_same_head_size_and_feed_forward_ratio() -> None:
    cfg = load("pretrain_esm2_650M")  # 20 heads of 64, feed-forward layers of 5120
    assert narrow_overrides(cfg, 192) == [
        "model.hidden_size=192", "model.num_attention_heads=3", "model.ffn_hidden_size=768",
    ]  # fmt: skip
    for width in (100, 0, 1344):
        with pytest.raises(UserError, match=f"--width={width}: expected a multiple of 64 .* up to 1280"):
            narrow_overrides(cfg, width)


def test_peak_rates_of_all_schedules() -> None:
    noam = [
        "model=megamolbart_xsmall",
        "name=x",
        "model.optim.sched.warmup_steps=100",
    ]  # Vaswani et al. 2017, equation 3
    for name, overrides, peak in [
        ("pretrain_esm2_mock", [], 6e-3), ("pretrain_gpt3_mock", ["model.optim.lr=1e-3"], 1e-3),
        ("pretrain", ["model=prott5nv_small", "name=x", "model.optim.lr=2e-3"], 2e-3),
        ("pretrain", [*noam, "model.optim.lr=0.5", "model.hidden_size=256"], 0.5 * 256**-0.5 * 100**-0.5),
    ]:  # fmt: skip
        cfg = load(name, overrides)
        assert peak_rate(cfg) == pytest.approx(peak, rel=1e-4)
        changed = load(name, [*overrides, *rate_overrides(cfg, 3e-3)])
        assert peak_rate(changed) == pytest.approx(3e-3, rel=3e-3)
    endless = ["trainer.max_steps=-1", "trainer.max_epochs=2", "model.optim.sched.name=InverseSquareRootAnnealing"]
    with pytest.raises(UserError, match=r"the number of steps is unknown: set trainer\.max_steps"):
        peak_rate(load("pretrain_esm2_mock", endless))
    assert peak_rate(load("pretrain_esm2_mock", [*endless, "model.optim.sched.max_steps=1000"])) == pytest.approx(6e-3)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load("pretrain_esm2_mock")
    monkeypatch.setattr(tuning, "_final_loss", lambda directory, arguments, steps: math.inf)
    with pytest.raises(UserError, match=r"diverged with all learning rates from 9\.4e-05 to 0\.024"):
        tune(cfg, ["--config-name=pretrain_esm2_mock"], tmp_path / "out", None, 20)
    changed = load("pretrain_esm2_mock", ["model.seed=3"])  # as if the file had been edited
    for other, steps in ((cfg, 30), (changed, 20)):
        with pytest.raises(UserError, match="out has runs with other settings: choose another directory"):
            tune(other, ["--config-name=pretrain_esm2_mock"], tmp_path / "out", None, steps)
    for arguments, message in {
        ("--steps=1",): "--steps=1: expected 10 or more: see --help",
        (): "--output is missing: set it to a directory for the runs",
        (f"--output={tmp_path}", "model.hiden_size=3"): "hiden_size",
    }.items():
        done = subprocess.run(
            [sys.executable, "-m", "bionemo.cli", "tune", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_diverged_run_has_an_infinite_loss_and_other_errors_end_the_search(tmp_path: Path) -> None:
    tiny = ["--config-name=pretrain_esm2_mock", "model.num_layers=1", "model.replica_batch_size=2",
            "model.hidden_size=16", "model.num_attention_heads=1", "trainer.max_steps=4",
            "trainer.val_check_interval=4"]  # fmt: skip
    diverging = [*tiny, "model.optim.name=fused_adam", "model.optim.sched.warmup_steps=0", "model.optim.lr=1e37"]
    assert tuning._final_loss(tmp_path / "diverged", diverging, 4) == math.inf
    with pytest.raises(UserError, match="hiden_size"):
        tuning._final_loss(tmp_path / "wrong", [*tiny, "model.hiden_size=3"], 4)


def test_a_search_that_is_complete_is_not_repeated(tmp_path: Path) -> None:
    overrides = ["--config-name=pretrain_esm2_mock", "model.num_layers=1", "model.replica_batch_size=2",
                 "model.hidden_size=32", "model.num_attention_heads=2", "model.optim.lr=0.2"]  # fmt: skip
    command = [sys.executable, "-m", "bionemo.cli", "tune", f"--output={tmp_path}/out", "--width=16", "--steps=10"]
    first, second = (
        subprocess.run([*command, *overrides], capture_output=True, text=True, check=False) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    record = json.loads((tmp_path / "out" / "tune.json").read_text())
    losses = {float(rate): loss for rate, loss in record["losses"].items() if loss is not None}
    best = min(losses, key=lambda rate: losses[rate])
    assert record["overrides"] == [f"model.optim.{key}={best / math.sqrt(2):.3g}" for key in ("lr", "sched.max_lr")]
    assert "<svg" in (tmp_path / "out" / "tune.html").read_text()
