# SPDX-License-Identifier: Apache-2.0
"""Training on a mixture: validation losses of the sources, layouts, and weights that change on resume."""

from pathlib import Path

import numpy as np
import pytest

from bionemo.cli.pretrain import pretrain
from bionemo.common.errors import UserError
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.evaluation.run_report import render_runs
from bionemo.tokenizers import load_tokenizer
from tests.support.runs import config, fingerprint, logged, run, run_on_ranks, train, write_shards
from tests.training.test_parallel import LAYOUTS, console_of_rank_0, same_run

ROWS = {"large": 150, "small": 21}  # records of the sources
LOSSES = {name: f"val_loss/{name}" for name in ROWS}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of two sources; the proteins of the small one have glycine only."""
    found = {name: tmp_path_factory.mktemp("sources") / name for name in ROWS}
    for name, path in found.items():
        write_shards(path, files=1, rows=ROWS[name])
    for path in found["small"].glob("*/x000.csv"):
        rows = [line.split(",") for line in path.read_text().splitlines()]
        path.write_text(
            "".join(f"{a},{b},{c},{'sequence' if a == 'record_id' else 'G' * len(d)}\n" for a, b, c, d in rows)
        )
    return found


def mixture(shards: dict[str, Path], **weights: float) -> list[str]:
    return [
        "data=mixture", *(f"model.data.dataset.{split}=x000" for split in ("train", "val", "test")),
        *(f"model.data.mixture.{name}.weight={weight}" for name, weight in weights.items()),
        *(f"model.data.mixture.{name}.dataset_path={shards[name]}" for name in weights),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def single(shards: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for 8 steps in one process, with two micro-batches per step."""
    directory = tmp_path_factory.mktemp("mixture") / "single"
    train(config(directory, *mixture(shards, large=0.6, small=0.4), "trainer.accumulate_grad_batches=2"))
    return directory


def test_losses_of_the_sources_are_those_of_separate_validations(shards: dict[str, Path], single: Path) -> None:
    """The trained model is tested on the validation file of each source alone."""
    losses = {}
    for name, path in shards.items():
        alone = ["data=uniref50", f"model.data.dataset_path={path}", f"model.data.dataset.test={path}/val/x000.csv"]
        losses[name] = pretrain(config(single, *alone, "do_training=False", "do_testing=True"))["test_loss"]
        assert logged(single, LOSSES[name])[8] == pytest.approx(losses[name], rel=1e-6)
    assert abs(losses["large"] - losses["small"]) > 0.02
    cfg = config(single, *mixture(shards, large=0.6, small=0.4))
    dataset = MaskedDataset.open(cfg.model, load_tokenizer("esm2nv"), "val")
    targets = {
        name: len(dataset.tokenize(np.zeros_like(records), records).target_ids)
        for name, records in dataset.mixture.records.items()
    }
    mean = sum(losses[name] * targets[name] for name in ROWS) / sum(targets.values())
    assert logged(single, "val_loss")[8] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    "layout", ["DP=2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("TP=2", "PP=2", "TP=2 x DP=2"))]
)
def test_layouts_equal_a_single_process(layout: str, shards: dict[str, Path], single: Path, tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    overrides = [*mixture(shards, large=0.6, small=0.4), *overrides]
    console_of_rank_0(run_on_ranks(tmp_path / "run", *overrides, ranks=ranks))
    same_run(tmp_path / "run", single)
    for key in LOSSES.values():
        found, expected = logged(tmp_path / "run", key), logged(single, key)
        assert list(found) == [4, 8]
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def test_a_stopped_run_resumes_bitwise(shards: dict[str, Path], tmp_path: Path) -> None:
    overrides = mixture(shards, large=0.6, small=0.4)
    saving = "exp_manager.checkpoint_callback_params.every_n_train_steps=3"
    for name, stop in (("straight", None), ("stopped", 5)):
        train(config(tmp_path / name, *overrides, saving), stop_before_step=stop)
    train(config(tmp_path / "stopped", *overrides, saving))
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "straight")


def test_weights_change_on_resume_with_one_note(shards: dict[str, Path], tmp_path: Path) -> None:
    assert run(tmp_path / "run", *mixture(shards, large=0.9, small=0.1), "trainer.max_steps=4")[0] == 0
    status, lines = run(tmp_path / "run", *mixture(shards, large=0.1, small=0.9))
    assert status == 0, lines
    (note,) = [line for line in lines if "mixture" in line]
    assert note.startswith(
        "note: the weights in model.data.mixture are different from the checkpoint; they apply from "
    )
    (shown,) = [line for line in lines if line.startswith("step 8  val_loss")]
    for key in LOSSES.values():
        assert f"  {key} {logged(tmp_path / 'run', key)[8]:.4f}" in shown


def test_the_report_shows_the_losses_of_the_sources(single: Path) -> None:
    page = render_runs([single])
    assert "validation loss of each source" in page
    assert all(key in page for key in LOSSES.values())


def test_a_loss_of_a_source_can_be_monitored(shards: dict[str, Path], tmp_path: Path) -> None:
    monitor = "exp_manager.checkpoint_callback_params.monitor=val_loss/"
    overrides = [*mixture(shards, large=0.6, small=0.4), "trainer.max_steps=4"]
    with pytest.raises(UserError, match=r"monitor=val_loss/smal: .*did you mean val_loss/small\?"):
        train(config(tmp_path / "wrong", *overrides, f"{monitor}smal"))
    train(config(tmp_path / "run", *overrides, f"{monitor}small"))
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(("limit", "batches"), [("1", {"large": 1, "small": 1}), ("0.5", {"large": 19, "small": 6})])
def test_the_validation_may_be_limited(
    limit: str, batches: dict[str, int], shards: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number applies to each source, a fraction is that of the largest source."""
    from bionemo.training.module import TrainingModule

    seen = dict.fromkeys(ROWS, 0)
    original = TrainingModule.validation_step

    def count(module: TrainingModule, step: object, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        seen[list(ROWS)[dataloader_idx]] += 1
        original(module, step, batch_idx, dataloader_idx)

    monkeypatch.setattr(TrainingModule, "validation_step", count)
    short = ["model.data.packing=False", "trainer.max_steps=1", "trainer.val_check_interval=1"]
    train(config(tmp_path, *mixture(shards, large=0.6, small=0.4), *short, f"trainer.limit_val_batches={limit}"))
    assert seen == batches
