# SPDX-License-Identifier: Apache-2.0
"""A run moves, replaces and deletes only files written by itself or by the run that it resumes."""

import os
import re
from pathlib import Path

import pytest
import yaml

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.common.lock import LOCK, run_lock
from bionemo.config.compose import load
from tests.support.runs import config, last_checkpoint, logged, run, train

PARAMS = "exp_manager.checkpoint_callback_params"
SHORT = ("trainer.max_steps=2", "trainer.val_check_interval=1", "model.optim.sched.max_steps=8")


def kept(directory: Path) -> dict[str, int]:
    """Return names of checkpoints and their steps."""
    found = {path: checkpoint.load_manifest(path) for path in directory.iterdir()}
    return {path.name: manifest["step"] for path, manifest in found.items() if manifest}


def test_user_files_in_the_log_directory_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like with exp_manager.exp_dir=. in a directory with data."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.fasta", "notes.txt", "head.safetensors"):
        (tmp_path / name).write_text(name)
    for _ in range(3):
        train(config(Path("."), *SHORT))
    for name in ("train.fasta", "notes.txt", "head.safetensors"):
        assert (tmp_path / name).read_text() == name


def test_logs_of_earlier_starts_are_moved_aside(tmp_path: Path) -> None:
    copied = tmp_path / "settings.json"
    copied.write_text("{}")
    directory = tmp_path / "run"
    for steps in (1, 2, 3):
        overrides = (f"trainer.max_steps={steps}", "trainer.val_check_interval=1", "model.optim.sched.max_steps=8")
        train(config(directory, *overrides, f"+exp_manager.files_to_copy=[{copied}]"), plot=True)
    logs = {"cmd-args.log", "git-info.log", "config.yaml", "hparams.yaml", "lightning_logs.txt", "nemo_error_log.txt",
            "nemo_log_globalrank-0_localrank-0.txt", "loss_curve.png", "settings.json"}  # fmt: skip
    for number, place in enumerate((directory / "run_0", directory / "run_1", directory), 1):
        assert logs <= {path.name for path in place.iterdir()}
        assert yaml.safe_load((place / "config.yaml").read_text())["trainer"]["max_steps"] == number
    assert not (directory / "run_2").exists()
    assert sorted(logged(directory, "reduced_train_loss")) == [1, 2, 3]


def test_logs_of_an_earlier_version_are_moved_aside(tmp_path: Path) -> None:
    train(config(tmp_path, *SHORT))
    (tmp_path / ".bionemo-run.json").unlink()
    train(config(tmp_path, *SHORT))
    assert (tmp_path / "run_0" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["config.yaml", "copied.txt"])
def test_a_user_file_is_not_replaced(tmp_path: Path, name: str) -> None:
    directory, source = tmp_path / "run", tmp_path / "copied.txt"
    source.write_text("source")
    directory.mkdir()
    (directory / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{name} was not written by a run, .*exp_manager\.exp_dir") as caught:
        train(config(directory, *SHORT, f"+exp_manager.files_to_copy=[{source}]"))
    assert "\n" not in str(caught.value)
    assert (directory / name).read_text() == "mine"
    assert {path.name for path in directory.iterdir()} <= {name, "checkpoints"}


def test_a_new_run_keeps_checkpoints_of_other_runs(tmp_path: Path) -> None:
    """With resume_if_exists=False, and in a shared directory."""
    shared = (f"{PARAMS}.dirpath={tmp_path / 'shared'}", f"{PARAMS}.save_top_k=1", *SHORT)
    train(config(tmp_path / "a", *shared))
    first = kept(tmp_path / "shared")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").glob("*/*")}
    train(config(tmp_path / "a", *shared, "exp_manager.resume_if_exists=False"))
    train(config(tmp_path / "b", *shared, "exp_manager.resume_if_exists=False"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    after = kept(tmp_path / "shared")
    assert {name for name in after if not re.search(r"-v\d", name)} == first.keys()
    assert sum(name.endswith("-last") for name in after) == 3
    assert len({checkpoint.read_run_id(tmp_path / "shared" / name) for name in after}) == 3


def test_a_run_resumes_from_its_own_checkpoints_in_a_shared_directory(tmp_path: Path) -> None:
    shared = (
        f"{PARAMS}.dirpath={tmp_path / 'shared'}",
        "trainer.val_check_interval=1",
        "model.optim.sched.max_steps=8",
    )
    train(config(tmp_path / "a", *shared, "trainer.max_steps=4"))
    train(config(tmp_path / "b", *shared, "trainer.max_steps=2", "exp_manager.resume_if_exists=False"))
    train(config(tmp_path / "b", *shared, "trainer.max_steps=3"))
    assert list(logged(tmp_path / "b", "reduced_train_loss")) == [1, 2, 3]
    steps = [step for name, step in kept(tmp_path / "shared").items() if name.endswith("-last")]
    assert sorted(steps) == [3, 4]  # only the last one of each run


def test_a_resumed_run_deletes_its_own_earlier_checkpoints(tmp_path: Path) -> None:
    overrides = ("trainer.val_check_interval=1", f"{PARAMS}.save_top_k=0", "model.optim.sched.max_steps=8")
    for steps in (1, 2, 3):
        train(config(tmp_path, *overrides, f"trainer.max_steps={steps}"))
    assert list(kept(tmp_path / "checkpoints").values()) == [3]


def test_a_run_of_a_version_without_run_ids_is_resumed(tmp_path: Path) -> None:
    overrides = ("trainer.val_check_interval=1", f"{PARAMS}.save_top_k=0", "model.optim.sched.max_steps=8")
    train(config(tmp_path, *overrides, "trainer.max_steps=1"))
    path = last_checkpoint(tmp_path)
    manifest = {key: value for key, value in checkpoint.load_manifest(path).items() if key != "run"}
    (path / "manifest.json").write_text(checkpoint.manifest.format_manifest(manifest))
    (tmp_path / ".bionemo-run.json").unlink()
    assert checkpoint.find_damage(path) == ""
    for steps in (2, 3):
        train(config(tmp_path, *overrides, f"trainer.max_steps={steps}"))
        assert list(kept(tmp_path / "checkpoints").values()) == [steps]


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    overrides = (f"{PARAMS}.filename=model", *SHORT)
    for name in ("model", "model-last"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "thesis.tex").write_text("precious")
    train(config(tmp_path, *overrides))
    for name in ("model", "model-last"):
        assert (tmp_path / "checkpoints" / name / "thesis.tex").read_text() == "precious"
    assert kept(tmp_path / "checkpoints").keys() == {"model-v1", "model-v1-last"}


def test_an_archive_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    overrides = (*SHORT, f"{PARAMS}.save_nemo_on_train_end=True", f"{PARAMS}.prefix=model")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model.nemo").write_text("precious")
    train(config(tmp_path, *overrides))
    own = (tmp_path / "checkpoints" / "model-v1.nemo").stat()
    train(config(tmp_path, *overrides[1:], "trainer.max_steps=3"))
    assert (tmp_path / "checkpoints" / "model-v1.nemo").stat().st_ino != own.st_ino  # it replaces its own archive
    assert {path.name for path in tmp_path.glob("checkpoints/*.nemo")} == {"model.nemo", "model-v1.nemo"}
    assert (tmp_path / "checkpoints" / "model.nemo").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", "shared"])
def test_two_runs_in_one_directory(tmp_path: Path, place: str) -> None:
    """The second run is rejected in one line, and the first is not disturbed."""
    overrides = (f"{PARAMS}.dirpath={tmp_path / 'shared'}", *SHORT)
    with run_lock(tmp_path / place):
        before = (tmp_path / place / LOCK).read_text()
        status, lines = run(tmp_path / "run", *overrides)
        assert (tmp_path / place / LOCK).read_text() == before
        assert {path.name for path in (tmp_path / place).iterdir()} == {LOCK}
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {tmp_path / place} is in use by another run (process {os.getpid()} on host ")
    assert run(tmp_path / "run", *overrides)[0] == 0
    assert not (tmp_path / place / LOCK).exists()


def test_a_run_that_lost_its_lock_saves_nothing(tmp_path: Path) -> None:
    from bionemo.training.module import TrainingModule

    original = TrainingModule.training_step

    def step(self: TrainingModule, batch: object) -> None:
        if self.trainer.global_step == 5:
            lock = tmp_path / LOCK
            lock.write_text(re.sub("token=.*", "token=0", lock.read_text()))
        original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", step)
        with pytest.raises(UserError, match="was taken over by another run"):
            train(config(tmp_path))
    assert {*kept(tmp_path / "checkpoints").values()} == {4}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{PARAMS}.filename=a/b-{{step}}", "expected a name without /"),
        (f"{PARAMS}.filename=../../x", "expected a name without /"),
        (f"{PARAMS}.filename=/tmp/x", "expected a name without /"),
        (f"{PARAMS}.filename={{val_loss:d}}", r"\{val_loss:d\}, but a format in it is invalid .*\{val_loss:\.2f\}"),
        (f"{PARAMS}.filename={{val_loss:/>9}}", "expected a name without /"),
        (f"{PARAMS}.filename=x-last", "does not end in the reserved -last"),
        (f"{PARAMS}.filename={'x' * 250}", "gives 250 bytes, expected at most"),
        (f"{PARAMS}.filename=..", "expected a name"),
        (f"{PARAMS}.save_top_k=-2", "save_top_k is -2, expected at least -1"),
        (f"{PARAMS}.prefix=a/b", "prefix is a/b, expected part of a file name"),
        (f"{PARAMS}.postfix=/b.nemo", "postfix is /b.nemo, expected part of a file name"),
        ("exp_manager.name=../x", r"exp_manager\.name is \.\./x, expected a name"),
        ("exp_manager.version=/x", r"exp_manager\.version is /x, expected a name"),
    ],
)
def test_invalid_names_are_rejected_before_writing(tmp_path: Path, override: str, expected: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(UserError, match=expected) as caught:
        config(tmp_path / "run", f"++{key}={value}" if value == "-2" else f'++{key}="{value}"')
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "override", "expected"),
    [
        (
            "esm2nv",
            f"{PARAMS}.monitor=val_los",
            r"monitor=val_los: .* \(did you mean val_loss\?\); they compute",
        ),
        ("esm2nv", f"{PARAMS}.monitor=reduced_train_loss", "they compute val_loss, val_perplexity"),
        ("megamolbart", f"{PARAMS}.monitor=val_accuracy", "val_character_accuracy, val_molecular_accuracy"),
        ("esm2nv", f'{PARAMS}.filename="{{val_los}}"', r"filename: \{val_los\}: .*step, global_step, epoch, consumed"),
        (
            "esm2nv",
            "exp_manager.early_stopping_callback_params.monitor=x",
            "params.monitor=x: valid",
        ),
    ],
)
def test_unknown_metrics_are_rejected_before_writing(tmp_path: Path, model: str, override: str, expected: str) -> None:
    overrides = (f"++{override}", "++exp_manager.create_early_stopping_callback=True")
    with pytest.raises(UserError, match=expected) as caught:
        train(config(tmp_path / "run", *overrides, model=model))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("metric", ["val_loss", "val_perplexity"])
def test_known_metrics_are_accepted(tmp_path: Path, metric: str) -> None:
    overrides = (f"{PARAMS}.monitor={metric}", f'{PARAMS}.filename="{{{metric}:.3f}}-{{step:06d}}-{{global_step}}"')
    train(config(tmp_path, *SHORT, *overrides))
    assert checkpoint.load_manifest(last_checkpoint(tmp_path))["metrics"].keys() == {metric}
    assert "step=000002-global_step=2-last" in last_checkpoint(tmp_path).name


def test_shipped_configurations_are_accepted(tmp_path: Path) -> None:
    from tests.support.runs import MODELS, tiny

    for model, family in MODELS.items():
        load(family.name, tiny(model=model), family.directory / "conf")
