# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are kept, where a run resumes, and how it is stopped."""

import errno
import os
import re
import signal
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from bionemo import checkpoint
from bionemo.checkpoint import writer
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert
from bionemo.megatron import async_save
from bionemo.training.checkpointing import CheckpointCallback
from bionemo.training.module import TrainingModule
from tests.support.runs import Command, config, fingerprint, last_checkpoint, logged, read_weights, run, train

PARAMS = "exp_manager.checkpoint_callback_params"


def saved(directory: Path) -> dict[str, int]:
    """Return names of checkpoints and their steps."""
    return {path.name: checkpoint.load_manifest(path)["step"] for path in (directory / "checkpoints").iterdir()}


def best_steps(directory: Path) -> list[int]:
    return sorted(step for name, step in saved(directory).items() if not name.endswith("-last"))


LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 6.0, 6: 3.5, 7: 9.0, 8: 8.0}


@pytest.fixture
def given_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate after every step, with the losses in LOSSES."""

    def report(self: TrainingModule, stage: str) -> None:
        loss = LOSSES[self.trainer.global_step]
        self.log_dict({"val_loss": loss, "val_perplexity": loss}, logger=False)
        self._log_metrics({"val_loss": loss})

    monkeypatch.setattr(TrainingModule, "_log_evaluation", report)


@pytest.mark.usefixtures("given_losses")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("save_top_k=2",), [2, 4]),
        (("save_top_k=2", "mode=max"), [7, 8]),
        (("save_top_k=0",), []),
        (("save_top_k=-1",), list(LOSSES)),
        (("save_top_k=3", "monitor=val_perplexity"), [2, 4, 6]),
        (("save_top_k=3", "monitor=null"), []),
    ],
    ids=str,
)
def test_the_best_and_the_last_are_kept(tmp_path: Path, overrides: tuple[str, ...], expected: list[int]) -> None:
    train(config(tmp_path, "trainer.val_check_interval=1", *(f"{PARAMS}.{override}" for override in overrides)))
    assert best_steps(tmp_path) == expected
    assert saved(tmp_path)[last_checkpoint(tmp_path).name] == 8


@pytest.mark.usefixtures("given_losses")
def test_the_best_checkpoints_are_ranked_across_restarts_with_other_names(tmp_path: Path) -> None:
    overrides = ("trainer.val_check_interval=1", f"{PARAMS}.save_top_k=2")
    train(config(tmp_path, *overrides, f"{PARAMS}.filename=earlier--{{step}}"), stop_before_step=4)
    assert saved(tmp_path) == {"earlier--step=2": 2, "earlier--step=3": 3, "earlier--step=3-last": 3}
    train(config(tmp_path, *overrides))
    assert best_steps(tmp_path) == [2, 4]
    assert saved(tmp_path)["earlier--step=2"] == 2
    assert sorted(saved(tmp_path).values()) == [2, 4, 8]


@pytest.mark.parametrize("v1", [False, True])
def test_names_of_checkpoints(tmp_path: Path, v1: bool) -> None:
    """By default they are short, and the key of v1 gives those of v1."""
    pattern, overrides = r"step=(4|8)-val_loss=\d\.\d\d(-last)?", []
    if v1:
        pattern = r"megatron_bert--val_loss=\d\.\d\d-step=(4|8)-consumed_samples=\d+(-last)?"
        name = "'megatron_bert--{val_loss:.2f}-{step}-{consumed_samples}'"
        overrides.append(f"exp_manager.checkpoint_callback_params.filename={name}")
    train(config(tmp_path, *overrides))
    assert len(saved(tmp_path)) == 3
    for name, step in saved(tmp_path).items():
        assert (match := re.fullmatch(pattern, name))
        assert int(match[1]) == step
        assert v1 or len(name) <= 40
    if not v1:
        return
    (consumed,) = re.findall(r"samples=(\d+)-last", last_checkpoint(tmp_path).name)
    assert int(consumed) == logged(tmp_path, "consumed_samples")[8]
    value = checkpoint.load_manifest(last_checkpoint(tmp_path))["metrics"]["val_loss"]
    assert value == pytest.approx(logged(tmp_path, "val_loss")[8])


def steps_of_saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    save = async_save.save_distributed

    def watched(path: Path, state: dict[str, Any], *others: Any) -> None:
        steps.append(state["global_step"])
        save(path, state, *others)

    monkeypatch.setattr(async_save, "save_distributed", watched)
    return steps


@pytest.mark.parametrize(("every", "expected"), [(3, [3, 4, 6, 8]), (0, [4, 8])])
def test_save_interval_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    steps = steps_of_saves(monkeypatch)
    train(config(tmp_path, f"{PARAMS}.every_n_train_steps={every}"))
    assert steps == expected  # 4 and 8 are validations


def test_an_asynchronous_save_writes_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, continued = [], threading.Event()

    def save(path: Path, state: dict[str, Any], *others: Any) -> None:
        continued.wait()
        written.append(state)

    monkeypatch.setattr(async_save, "save_distributed", save)
    writer, points = async_save.CheckpointWriter(asynchronous=True), [[1, 2.5]]
    writer.save(tmp_path, {"callbacks": {"LossCurve": {"train": points}}}, [])
    points.append([2, 2.4])  # training continues
    continued.set()
    writer.wait()
    assert written == [{"callbacks": {"LossCurve": {"train": [[1, 2.5]]}}}]


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "remove", fail)
    train(config(tmp_path, f"{PARAMS}.save_top_k=1"))
    assert list(logged(tmp_path, "reduced_train_loss")) == list(range(1, 9))
    assert {4, 8} <= set(saved(tmp_path).values())
    assert "cannot be deleted (Input/output error)" in capsys.readouterr().err


def test_save_interval_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of_saves(monkeypatch)
    train(config(tmp_path, f"{PARAMS}.train_time_interval='00:00:00:00'", "trainer.max_steps=3"))
    assert steps == [1, 2, 3]
    with pytest.raises(UserError, match=r"train_time_interval is soon, expected a duration: DD:HH:MM:SS"):
        train(config(tmp_path, f"{PARAMS}.train_time_interval=soon"))


def test_checkpoints_can_be_disabled(tmp_path: Path) -> None:
    train(config(tmp_path, "exp_manager.create_checkpoint_callback=False"))
    assert saved(tmp_path) == {}


def test_without_resume_if_exists_a_run_starts_from_scratch(tmp_path: Path) -> None:
    train(config(tmp_path, "trainer.max_steps=3"))
    train(config(tmp_path, "trainer.max_steps=3", "exp_manager.resume_if_exists=False"))
    losses = [file for file in tmp_path.glob("events.out.tfevents.*")]
    assert len(losses) == 2
    assert list(logged(tmp_path, "reduced_train_loss")) == [1, 2, 3]  # both runs are equal


def test_a_missing_checkpoint_can_be_an_error(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    status, lines = run(directory, "exp_manager.resume_ignore_no_checkpoint=False")
    assert status == 1
    assert lines == [
        f"error: exp_manager.resume_if_exists=True: no checkpoint in {directory}/checkpoints; "
        "set exp_manager.resume_ignore_no_checkpoint=True to start from the beginning"
    ]
    assert not directory.exists()


@pytest.mark.parametrize("key", ["exp_manager.resume_from_checkpoint", "model.resume_from_checkpoint"])
def test_resuming_from_a_given_checkpoint(tmp_path: Path, key: str) -> None:
    train(config(tmp_path / "first"))
    (at_4,) = (tmp_path / "first" / "checkpoints").glob("*step=4*")
    train(config(tmp_path / "second", f"{key}={at_4}"))
    assert list(logged(tmp_path / "second", "reduced_train_loss")) == [5, 6, 7, 8]
    assert fingerprint(tmp_path / "second") == fingerprint(tmp_path / "first")
    with pytest.raises(UserError, match="nowhere: there is no such checkpoint"):
        train(config(tmp_path / "third", f"{key}=nowhere"))
    assert not (tmp_path / "third").exists()
    train(config(tmp_path / "second", f"{key}={at_4}", "trainer.max_steps=9"))  # a requeued job continues its branch
    assert list(logged(tmp_path / "second", "reduced_train_loss")) == [5, 6, 7, 8, 9]


def test_a_run_continues_its_last_branch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After a run went back to step 4 and reached step 6, the next start continues from step 6, not from step 8."""
    train(config(tmp_path))
    (at_4,) = (tmp_path / "checkpoints").glob("*step=4*")
    named = (f"exp_manager.resume_from_checkpoint={at_4}", "model.optim.lr=1e-4", "model.optim.sched.max_steps=8")
    train(config(tmp_path, "trainer.max_steps=6", *named))
    train(config(tmp_path, "trainer.max_steps=10", *named[1:]))
    resumed = re.findall(r"resuming from .*step=(\d+)-", capfd.readouterr().err)
    assert resumed == ["4", "6"]


def test_weights_after_going_back_are_exported(tmp_path: Path) -> None:
    """A run that continues from an earlier checkpoint of its own exports its weights, not those of later ones."""
    overrides = ("trainer.val_check_interval=1", f"{PARAMS}.save_top_k=-1", "trainer.max_steps=4")
    train(config(tmp_path, *overrides))
    (at_1,) = (tmp_path / "checkpoints").glob("*step=1-*")
    nemo = (f"{PARAMS}.save_nemo_on_train_end=True", f"{PARAMS}.save_best_model=False")
    changed = (f"exp_manager.resume_from_checkpoint={at_1}", "trainer.max_steps=2", "model.optim.lr=0.1")
    train(config(tmp_path, *overrides, *nemo, *changed))
    (archive,) = (tmp_path / "checkpoints").glob("*.nemo")
    convert(archive, tmp_path / "exported")
    (last,) = (tmp_path / "checkpoints").glob("*step=2-*-last")
    expected, found = read_weights(last), read_weights(tmp_path / "exported")
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_checkpoints_in_another_directory(tmp_path: Path) -> None:
    overrides = (f"{PARAMS}.dirpath={tmp_path / 'elsewhere' / 'checkpoints'}",)
    train(config(tmp_path / "run", *overrides, "trainer.max_steps=4", "model.optim.sched.max_steps=8"))
    train(config(tmp_path / "run", *overrides))
    assert list(logged(tmp_path / "run", "reduced_train_loss")) == list(range(1, 9))
    assert max(saved(tmp_path / "elsewhere").values()) == 8
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_initial_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run loads weights; step, schedule and data start from the beginning."""
    train(config(tmp_path / "first"))
    old = last_checkpoint(tmp_path / "first")
    begun_with: list[dict[str, torch.Tensor]] = []
    start = TrainingModule.on_train_start

    def watched(self: TrainingModule) -> None:
        begun_with.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        start(self)

    monkeypatch.setattr(TrainingModule, "on_train_start", watched)
    train(config(tmp_path / "second", f"restore_from_path={old}", "trainer.max_steps=2"))
    weights = {f"model.{name}": values for name, values in read_weights(old).items()}
    assert weights.keys() == begun_with[0].keys()
    assert all(torch.equal(weights[name], begun_with[0][name]) for name in weights)
    assert list(logged(tmp_path / "second", "lr").values()) == pytest.approx([4e-5, 4e-5 + 3.6e-4 / 2000])
    assert logged(tmp_path / "second", "reduced_train_loss")[1] < logged(tmp_path / "first", "reduced_train_loss")[1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["restore_from_path=nowhere"], "nowhere: there is no such checkpoint"),
        (["restore_from_path=x.nemo"], "x.nemo: there is no such checkpoint"),
        (["restore_from_path={first}", "exp_manager.exp_dir={new}", "model.num_layers=1"], "not part of this model"),
        (["model.hidden_size=64"], "has shape [128, 32] and should have shape [128, 64]"),
        (["restore_from_path={empty}", "exp_manager.exp_dir={new}"], "is not a checkpoint, a .nemo archive,"),
    ],
    ids=["missing", "nemo", "other model", "resume other model", "no checkpoint"],
)  # fmt: skip
def test_weights_of_other_shapes_are_one_line(
    tmp_path: Path, trained: Path, overrides: list[str], expected: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    places = {"first": last_checkpoint(trained), "new": tmp_path / "new", "empty": empty}
    target = trained if "hidden_size" in overrides[0] else tmp_path / "run"
    status, lines = run(target, *(override.format(**places) for override in overrides))
    assert status == 1
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert expected in line
    assert not any("Traceback" in line for line in lines)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train(config(directory))
    return directory


@pytest.mark.parametrize("name", ["tensors-0.safetensors", "index.json", "state.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_note(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "run"
    train(config(directory))
    whole = fingerprint(directory)
    for path in (directory / "checkpoints").glob("*step=8*"):  # both names are the same file
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).unlink()
        (path / name).write_bytes(content)
    status, lines = run(directory)
    assert status == 0
    notes = [line for line in lines if "skipped" in line]
    assert notes
    assert all("step=8" in line and name in line for line in notes)
    assert any("resuming from" in line and "step=4" in line for line in lines)
    assert logged(directory, "reduced_train_loss").keys() == set(range(1, 9))
    assert fingerprint(directory) == whole


@pytest.mark.usefixtures("given_losses")
def test_no_checkpoint_is_deleted_before_its_successor_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each deletion a complete checkpoint of a later step exists, and the best are kept."""
    remove, removed = checkpoint.remove, []

    def watched(path: Path) -> None:
        step = checkpoint.load_manifest(path)["step"]
        newest = checkpoint.find_newest(path.parent, lambda path, why: pytest.fail(why))
        assert newest is not None
        assert checkpoint.load_manifest(newest)["step"] > step
        removed.append(path.name.endswith("-last"))
        remove(path)

    monkeypatch.setattr(checkpoint, "remove", watched)
    train(config(tmp_path, "trainer.val_check_interval=1", f"{PARAMS}.save_top_k=1"))
    assert best_steps(tmp_path) == [4]
    assert removed.count(True) == 7
    assert removed.count(False) == 2  # 5.0 was replaced by 3.0, and that by 2.0


def test_saving_to_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = writer.write

    def full(path: Path, pieces: Any) -> str:
        if "step=8" in str(path):
            write(path, pieces[:3])
            raise OSError(28, "No space left on device")
        return write(path, pieces)

    monkeypatch.setattr(writer, "write", full)
    directory = tmp_path / "run"
    with pytest.raises(UserError, match=r"\(No space left on device\): free disk space") as caught:
        train(config(directory))
    assert "\n" not in str(caught.value)
    assert {step for step in saved(directory).values()} == {4}
    monkeypatch.undo()
    train(config(directory))
    train(config(tmp_path / "whole"))
    assert fingerprint(directory) == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("every", [1, 100], ids=["logged", "not logged"])
def test_nonfinite_weights_are_never_saved(tmp_path: Path, every: int) -> None:
    """The last good checkpoint remains the newest, whether the step is logged or only saved."""
    directory = tmp_path / "run"
    train(config(directory, "trainer.max_steps=4"))
    overrides = ("model.optim.lr=1e38", "model.optim.sched.max_lr=1e38", f"trainer.log_every_n_steps={every}")
    status, lines = run(directory, *overrides)
    assert status == 1
    assert re.search(r"error: step [5-8]: the loss is .*nan.*lower model\.optim\.lr", lines[-1]), lines
    assert {*saved(directory).values()} == {4}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """The resumed run equals an uninterrupted one bitwise."""
    directory = tmp_path / "run"
    overrides = (f"exp_manager.exp_dir={directory}", "trainer.max_steps=150", "trainer.val_check_interval=100")
    command = Command(tmp_path / "console", *overrides)
    while "step 5 of" not in ((tmp_path / "console").read_text() if (tmp_path / "console").exists() else ""):
        time.sleep(0.01)
        assert command.process.is_alive()
    os.kill(command.process.pid or 0, number)
    status, lines = command.end()
    assert status == 128 + number
    at = max(map(int, re.findall(r"step (\d+) of 150", "\n".join(lines))))
    assert f"note: received {number.name}: saving step {at} and exiting" in lines
    assert list(saved(directory).values()) == [at]
    assert 5 <= at < 150

    assert Command(tmp_path / "console", *overrides).end()[0] == 0
    train(config(tmp_path / "whole", *overrides[1:]))
    assert logged(directory, "reduced_train_loss") == logged(tmp_path / "whole", "reduced_train_loss")
    assert fingerprint(directory) == fingerprint(tmp_path / "whole")


def test_the_time_of_training_is_limited(tmp_path: Path) -> None:
    """The run validates, saves and exits; it has used its time when it is started again."""
    long = ("trainer.max_time='00:00:00:01'", "trainer.max_steps=100000", "trainer.val_check_interval=100000")
    at = []
    for _ in range(2):
        status, lines = run(tmp_path, *long)
        assert status == 0
        (note,) = (line for line in lines if "is reached" in line)
        at.append(int(note.removeprefix("note: trainer.max_time=00:00:00:01 is reached: exiting at step ")))
        assert at[-1] in logged(tmp_path, "val_loss")
        assert saved(tmp_path)[last_checkpoint(tmp_path).name] == at[-1]
    assert at[1] == at[0] + 1


def test_the_time_of_a_run_is_limited(tmp_path: Path) -> None:
    """The run saves and exits successfully; the next start has the full time again."""
    directory = tmp_path / "run"
    for start, step in enumerate((1, 2), 1):
        status, lines = run(directory, "exp_manager.max_time_per_run='00:00:00:00'", "trainer.min_steps=4")
        assert status == 0
        assert f"note: exp_manager.max_time_per_run=00:00:00:00 is reached: exiting at step {step}" in lines
        assert not any("training data ended" in line for line in lines)
        assert saved(directory)[last_checkpoint(directory).name] == step == start
    assert not logged(directory, "val_loss")
    with pytest.raises(UserError, match=r"exp_manager\.max_time_per_run is 1h, expected a duration"):
        train(config(directory, "exp_manager.max_time_per_run=1h"))


def test_a_validation_that_the_time_limit_prevents_is_made_by_the_next_start(tmp_path: Path) -> None:
    """Also after the last step: the second start writes the best checkpoint and the .nemo file."""
    limited = ("exp_manager.max_time_per_run='00:00:00:00'", "trainer.max_steps=1", "trainer.val_check_interval=1",
               f"{PARAMS}.save_nemo_on_train_end=True")  # fmt: skip
    for directory, starts in ((tmp_path / "limited", 2), (tmp_path / "whole", 1)):
        for _ in range(starts):
            train(config(directory, *limited[starts == 1 :]))
    assert logged(tmp_path / "limited", "val_loss") == logged(tmp_path / "whole", "val_loss") != {}
    found, expected = (
        sorted(path.name for path in tmp_path.glob(f"{name}/checkpoints/[!.]*")) for name in ("limited", "whole")
    )
    assert found == expected
    assert len(found) == 3  # the newest and the best checkpoint, and the .nemo file


@pytest.mark.usefixtures("given_losses")
def test_early_stopping(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that stopped early stays stopped; every checkpoint has the counter of its own step."""
    overrides = ["trainer.val_check_interval=1", "exp_manager.create_early_stopping_callback=True",
                 "exp_manager.early_stopping_callback_params.patience=3", f"{PARAMS}.save_top_k=-1"]  # fmt: skip
    for _ in range(2):
        train(config(tmp_path, *overrides))
        assert list(logged(tmp_path, "val_loss")) == [1, 2, 3, 4, 5, 6, 7]  # 4 is the best
        assert saved(tmp_path)[last_checkpoint(tmp_path).name] == 7
        reason = "stopped early at step 7: Monitored metric val_loss did not improve in the last 3 records."
        assert reason in capfd.readouterr().err
    counts = {}
    for path in checkpoint.list_complete(tmp_path / "checkpoints"):
        state = checkpoint.Checkpoint(path).state
        (stopping,) = (value for key, value in state["callbacks"].items() if key.startswith("EarlyStopping"))
        counts[state["global_step"]] = stopping["wait_count"]
    assert [counts[step] for step in range(4, 8)] == [0, 1, 2, 3]
    train(config(tmp_path, *overrides, "exp_manager.early_stopping_callback_params.patience=4"))
    assert list(logged(tmp_path, "val_loss"))[:8] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "change", ["trainer.limit_val_batches=1", "model.data.mock.num_validation_sequences=9", f"{PARAMS}.mode=max"]
)
def test_metrics_of_other_validations_are_not_compared(
    tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of the earlier validations are kept, and the best of the new ones is exported."""
    overrides = ["trainer.val_check_interval=2", f"{PARAMS}.save_top_k=1", f"{PARAMS}.save_nemo_on_train_end=True",
                 f"{PARAMS}.save_best_model=True", "model.optim.sched.max_steps=8"]  # fmt: skip
    train(config(tmp_path, *overrides, "trainer.max_steps=4"))
    (before,) = best_checkpoints(tmp_path)
    capfd.readouterr()
    train(config(tmp_path, *overrides, "trainer.max_steps=4"))
    assert "other validations" not in capfd.readouterr().err
    train(config(tmp_path, *overrides, change))
    assert "note: 1 checkpoint of other validations" in capfd.readouterr().err
    (new,) = set(best_checkpoints(tmp_path)) - {before}
    assert checkpoint.load_manifest(new)["step"] in (6, 8)
    (archive,) = (tmp_path / "checkpoints").glob("*.nemo")
    convert(archive, tmp_path / "exported")
    expected, found = read_weights(new), read_weights(tmp_path / "exported")
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def best_checkpoints(directory: Path) -> list[Path]:
    paths = checkpoint.list_complete(directory / "checkpoints")
    return [path for path in paths if not path.name.endswith("-last")]


@pytest.mark.slow
def test_a_finished_run_of_epochs_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ["trainer.max_steps=-1", "model.optim.sched.max_steps=100", "trainer.val_check_interval=1000"]
    for epochs, note in ((1, False), (1, True), (2, False)):
        train(config(tmp_path, *overrides, f"trainer.max_epochs={epochs}"))
        said = "note: the run has reached trainer.max_epochs=1 before, so nothing is trained" in capfd.readouterr().err
        assert said == note


def test_restarting_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    train(config(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").glob("*/*")}
    train(config(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").glob("*/*")} == before


@pytest.mark.parametrize(("method", "call"), [("_link_and_prune", 4), ("_export", 1)])
def test_a_run_killed_in_its_last_save_completes_it(
    tmp_path: Path, method: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = (f"{PARAMS}.save_top_k=2", f"{PARAMS}.save_nemo_on_train_end=True")
    overrides = ("trainer.max_steps=4", "trainer.val_check_interval=1", *best)
    train(config(tmp_path / "whole", *overrides))
    original, calls = getattr(CheckpointCallback, method), count(1)

    def interrupt(*arguments: Any) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(CheckpointCallback, method, interrupt)
        train(config(tmp_path / "run", *overrides))
    killed, whole = ({path.name for path in (tmp_path / run / "checkpoints").iterdir()} for run in ("run", "whole"))
    assert killed != whole
    train(config(tmp_path / "run", *overrides))
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == whole


def test_saving_a_step_twice_writes_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of_saves(monkeypatch)
    end = CheckpointCallback.on_train_end

    def twice(*args: Any) -> None:
        end(*args)
        end(*args)

    monkeypatch.setattr(CheckpointCallback, "on_train_end", twice)
    train(config(tmp_path, "trainer.max_steps=2"))
    assert steps == [2]


def test_a_run_that_is_complete_trains_nothing_and_says_so(tmp_path: Path) -> None:
    note = (
        "note: the run has reached trainer.max_steps=2 before, so nothing is trained: set a larger number to continue"
    )
    for expected in (False, True):
        status, lines = run(tmp_path / "run", "trainer.max_steps=2")
        assert status == 0, lines
        assert any(line.startswith(note) for line in lines) == expected, lines
