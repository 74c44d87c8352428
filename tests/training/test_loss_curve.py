# SPDX-License-Identifier: Apache-2.0
"""The loss curve is replaced atomically, and errors in it do not end a run."""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from bionemo.training.loss_curve import LossCurve
from bionemo.training.progress import print_result


def draw(curve: LossCurve, train: bool = True) -> None:
    trainer: Any = SimpleNamespace(
        is_global_zero=True, global_step=10, callback_metrics={"val_loss": torch.tensor(2.0)},
        sanity_checking=False, state=SimpleNamespace(fn="fit"),
    )  # fmt: skip
    module: Any = SimpleNamespace(throughput=SimpleNamespace(paused=nullcontext))
    if train:
        curve.train.append([10, 2.5])
    curve.on_validation_end(trainer, module)


def test_the_figure_is_written_without_temporary_files(tmp_path: Path) -> None:
    curve = LossCurve(tmp_path)
    curve.references = {"frequencies alone": 2.8, "best possible": 1.5}
    draw(curve)
    assert [path.name for path in tmp_path.iterdir()] == ["loss_curve.png"]
    with Image.open(tmp_path / "loss_curve.png") as image:
        assert image.size == (1050, 780)
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)


def test_a_run_that_logs_no_step_draws_its_validations(tmp_path: Path) -> None:
    draw(LossCurve(tmp_path), train=False)
    assert (tmp_path / "loss_curve.png").exists()


@pytest.mark.parametrize("drawn", [True, False])
def test_the_curve_is_announced_only_if_it_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drawn: bool
) -> None:
    if drawn:
        draw(LossCurve(tmp_path))
    trainer: Any = SimpleNamespace(callback_metrics={}, global_step=3, max_steps=3, should_stop=False,
                                   lightning_module=SimpleNamespace(list_checkpoints=list))  # fmt: skip
    cfg: Any = SimpleNamespace(trainer=SimpleNamespace(max_epochs=None))
    print_result(cfg, trainer, {}, tmp_path, None, None)
    expected = "logs, checkpoints and the loss curve are in" if drawn else "logs and checkpoints are in"
    assert capsys.readouterr().err.splitlines() == ["step 3 of 3, no validation loss", f"{expected} {tmp_path}"]


def test_without_matplotlib_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("bionemo"), "propagate", True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    curve = LossCurve(tmp_path)
    draw(curve)
    draw(curve)
    (message,) = set(caplog.messages)
    assert message.startswith("there is no loss_curve.png: a plot requires the extra 'plots'")
    assert not [*tmp_path.iterdir()]


def test_a_missing_directory_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("bionemo"), "propagate", True)
    curve = LossCurve(tmp_path / "gone")
    draw(curve)
    assert curve.validation == [[10, 2.0]]
    assert f"{tmp_path}/gone/loss_curve.png cannot be written (No such file or directory)" in caplog.text
