# SPDX-License-Identifier: Apache-2.0
"""Reuse of trained weights: .nemo files, averages, and the `bionemo checkpoint` command."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from bionemo.checkpoint import Checkpoint, TensorsInMemory
from bionemo.common.errors import UserError
from bionemo.formats import nemo_archive
from bionemo.tokenizers import load_tokenizer
from bionemo.training.identity import check_same_model
from bionemo.training.resume import open_initial_weights
from tests.conftest import checkpoint_command
from tests.support.runs import config, last_checkpoint, logged, run, train

NEMO = "exp_manager.checkpoint_callback_params"


def weights(source: Checkpoint | TensorsInMemory) -> dict[str, torch.Tensor]:
    return {name: source.read(f"weights/{name}") for name in source.shapes("weights")}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module", params=[pytest.param("esm1nv", marks=pytest.mark.slow), "esm2nv"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(request.param) / "run"
    train(config(directory, f"{NEMO}.save_nemo_on_train_end=True", model=request.param))
    return request.param, directory


def test_a_run_writes_a_nemo_file(trained: tuple[str, Path]) -> None:
    _, directory = trained
    (archive,) = (directory / "checkpoints").glob("*.nemo")
    assert equal(nemo_archive.read(archive).weights, weights(Checkpoint(last_checkpoint(directory))))


@pytest.mark.parametrize("through", ["nemo", "checkpoint", "converted"])
def test_a_new_run_starts_from_exported_weights(
    tmp_path: Path, trained: tuple[str, Path], through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first loss is that of the trained model, for every format."""
    model, directory = trained
    last = last_checkpoint(directory)
    (archive,) = (directory / "checkpoints").glob("*.nemo")
    source = {"nemo": archive, "checkpoint": last, "converted": tmp_path / "converted"}[through]
    if through == "converted":
        assert checkpoint_command(monkeypatch, "convert", archive, source) == 0
    found = open_initial_weights(str(source))
    assert isinstance(found, Checkpoint | TensorsInMemory)
    assert equal(weights(found), weights(Checkpoint(last)))
    once = ("trainer.max_steps=1", "model.optim.lr=1e-60", "model.optim.sched.min_lr=0.0")
    train(config(tmp_path / "next", f"restore_from_path={source}", *once, model=model))
    assert equal(weights(Checkpoint(last_checkpoint(tmp_path / "next"))), weights(Checkpoint(last)))
    train(config(tmp_path / "anew", "trainer.max_steps=1", model=model))
    assert logged(tmp_path / "next", "reduced_train_loss")[1] != logged(tmp_path / "anew", "reduced_train_loss")[1]


@pytest.mark.parametrize("model", ["prott5nv", "megamolbart", "gpt3"])
def test_nemo_files_of_other_families(tmp_path: Path, model: str) -> None:
    train(config(tmp_path / "run", f"{NEMO}.save_nemo_on_train_end=True", model=model))
    (archive,) = (tmp_path / "run" / "checkpoints").glob("*.nemo")
    expected = weights(Checkpoint(last_checkpoint(tmp_path / "run")))
    assert equal(nemo_archive.read(archive).weights, expected)
    once = ("trainer.max_steps=1", "model.optim.lr=1e-60", "model.optim.sched.min_lr=0.0")
    train(config(tmp_path / "next", f"restore_from_path={archive}", *once, model=model))
    assert equal(weights(Checkpoint(last_checkpoint(tmp_path / "next"))), expected)


def test_a_model_without_a_nemo_format_is_trained_to_the_end(tmp_path: Path) -> None:
    """One note, no .nemo file, exit status 0."""
    overrides = (f"{NEMO}.always_save_nemo=True", f"{NEMO}.save_nemo_on_train_end=True", "trainer.max_steps=4")
    status, lines = run(tmp_path / "run", *overrides, "trainer.val_check_interval=2", model="esm1b")
    assert status == 0, lines
    assert sum("no .nemo file is written" in line and "ESM1b" in line for line in lines) == 1, lines
    assert not list((tmp_path / "run").rglob("*.nemo*"))
    assert "step=4" in last_checkpoint(tmp_path / "run").name
    status, lines = run(tmp_path / "end", f"{NEMO}.save_nemo_on_train_end=True", "trainer.max_steps=1", model="esm1b")
    assert status == 0, lines
    assert sum("no .nemo file is written" in line for line in lines) == 1, lines


@pytest.mark.parametrize("length", [32, 160])
def test_learned_positions_are_adapted_to_another_length(tmp_path: Path, length: int) -> None:
    """Like in v1: a shorter model keeps the first of 64 positions, a longer one repeats them; the rest is equal."""
    train(config(tmp_path / "run", "trainer.max_steps=1", model="megamolbart"))
    last = last_checkpoint(tmp_path / "run")
    status, lines = run(
        tmp_path / "next", f"restore_from_path={last}", f"model.seq_length={length}", "trainer.max_steps=1",
        "model.optim.lr=1e-60", "model.optim.sched.min_lr=0.0", model="megamolbart",
    )  # fmt: skip
    assert status == 0, lines
    (note,) = [line for line in lines if "learned positions" in line]
    done = "truncated" if length < 64 else "repeated"
    assert note.endswith(f"64 learned positions, {done} to model.max_position_embeddings={length}")
    before, after = weights(Checkpoint(last)), weights(Checkpoint(last_checkpoint(tmp_path / "next")))
    table, fitted = before.pop("position_embeddings.weight"), after.pop("position_embeddings.weight")
    assert torch.equal(fitted, torch.cat([table, table, table])[:length])
    assert equal(before, after)


def test_weights_are_created_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning makes the GPU the default device while the model is built; here a device without values."""
    once = ("trainer.max_steps=1", "model.seq_length=64")
    for name in ("expected", "found"):
        if name == "found":
            monkeypatch.setattr(Strategy, "tensor_init_context", lambda *_, **__: torch.device("meta"))
        train(config(tmp_path / name, *once, model="esm1nv"))
        longer = ("model.seq_length=96", f"restore_from_path={last_checkpoint(tmp_path / 'expected')}")
        train(config(tmp_path / f"{name}-longer", *once, *longer, model="esm1nv"))
    for name in ("", "-longer"):
        expected, found = (
            weights(Checkpoint(last_checkpoint(tmp_path / f"{each}{name}"))) for each in ("expected", "found")
        )
        assert equal(found, expected)


def test_the_nemo_file_can_be_replaced_at_every_save(tmp_path: Path) -> None:
    overrides = (f"{NEMO}.always_save_nemo=True", f"++{NEMO}.save_best_model=True", f"{NEMO}.prefix=mine")
    train(config(tmp_path, *overrides, "exp_manager.checkpoint_callback_params.mode=max"))
    archive = nemo_archive.read(tmp_path / "checkpoints" / "mine.nemo")
    saved = {path.name: Checkpoint(path) for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    best = max(saved.values(), key=lambda checkpoint: checkpoint.manifest["metrics"]["val_loss"])
    assert best.manifest["step"] == 4  # the loss falls, and the mode is "max"
    assert equal(archive.weights, weights(best))


def test_average_is_the_mean(tmp_path: Path, trained: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, directory = trained
    inputs = [path for path in (directory / "checkpoints").glob("*step=*") if not path.name.endswith("-last")]
    assert len(inputs) == 2
    assert checkpoint_command(monkeypatch, "average", tmp_path / "mean", *inputs) == 0
    mean, (one, other) = weights(Checkpoint(tmp_path / "mean")), [weights(Checkpoint(path)) for path in inputs]
    for name, values in mean.items():
        assert torch.equal(values, ((one[name].double() + other[name].double()) / 2).float()), name
    assert open_initial_weights(str(tmp_path / "mean"))
    status, lines = run(tmp_path / "next", f"exp_manager.resume_from_checkpoint={tmp_path / 'mean'}", model=model)
    assert status == 1
    assert "contains weights only" in lines[-1]
    assert lines[-1].startswith("error: ")


def test_models_that_compute_different_functions_are_not_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of models with 2 and 4 heads have the same shapes."""
    short = ("trainer.max_steps=1", "trainer.val_check_interval=1")
    train(config(tmp_path / "two", *short, "model.num_attention_heads=2"))
    train(config(tmp_path / "four", *short, "model.num_attention_heads=4"))
    train(config(tmp_path / "seed", *short, "model.num_attention_heads=2", "model.seed=5"))
    paths = {name: last_checkpoint(tmp_path / name) for name in ("two", "four", "seed")}
    capsys.readouterr()
    assert checkpoint_command(monkeypatch, "average", tmp_path / "mean", paths["two"], paths["four"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"^error: .* has model\.(kv_channels|num_attention_heads)=\d+, .* has \d+: their weights", line)
    assert checkpoint_command(monkeypatch, "average", tmp_path / "mean", paths["two"], paths["seed"]) == 0


def test_inspect_and_verify(
    trained: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, directory = trained
    last = last_checkpoint(directory)
    assert checkpoint_command(monkeypatch, "inspect", "--tensors", last) == 0
    output = capsys.readouterr().out
    assert "step         8\n" in output
    assert "exp_avg, exp_avg_sq" in output
    assert f"{sum(tensor.numel() for tensor in weights(Checkpoint(last)).values()):,} in" in output
    assert "encoder.layers.1.mlp.linear_fc2.weight  32 x 128" in output
    assert checkpoint_command(monkeypatch, "verify", directory / "checkpoints") == 0
    assert capsys.readouterr().out.count(": valid\n") == 3
    (broken := tmp_path / "broken").mkdir()
    (broken / "manifest.json").write_text("{}")
    assert checkpoint_command(monkeypatch, "verify", last, broken) == 1
    out, error = capsys.readouterr()
    assert "valid" in out
    assert error == "error: 1 checkpoint cannot be used\n"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["convert", "{last}", "{tmp}/other"], "a checkpoint needs no conversion between layouts"),
        (["convert", "{tmp}/none.nemo", "{tmp}/other"], "none.nemo"),
        (["convert", "{tmp}/none", "{tmp}/x.nemo"], "none: there is no such checkpoint"),
        (["average", "{tmp}/mean", "{last}"], "at least two checkpoints"),
        (["average", "{last}", "{last}", "{last}"], "exists: choose another output"),
        (["inspect", "{tmp}"], "is not a checkpoint, a .nemo archive, a Hugging Face directory or a .pt"),
        (["verify", "{tmp}/none"], "none: there is no such checkpoint"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, trained: tuple[str, Path], overrides: list[str], expected: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    last = last_checkpoint(trained[1])
    assert checkpoint_command(monkeypatch, *(override.format(last=last, tmp=tmp_path) for override in overrides)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
    assert list(tmp_path.iterdir()) == []


def test_another_vocabulary_or_class_is_refused(tmp_path: Path, trained: tuple[str, Path]) -> None:
    """The embeddings of both models have 128 rows, so only the position embeddings differ in shape."""
    model, directory = trained
    other = {"esm1nv": "esm2nv", "esm2nv": "esm1nv"}[model]
    status, lines = run(tmp_path / "next", f"restore_from_path={last_checkpoint(directory)}", model=other)
    assert status == 1
    assert "the checkpoint belongs to another model: its model._target_ is bionemo.models." in lines[-1]


@pytest.mark.parametrize(("size", "fits"), [(33, True), (None, True), (34, False)])
def test_a_converted_checkpoint_contains_the_vocabulary_size(size: int | None, fits: bool) -> None:
    alphabet = load_tokenizer("esm2nv")
    known = {"model._target_": "bionemo.models.esm2nv.ESM2nv", "vocabulary": alphabet.identity}
    model: Any = SimpleNamespace(identity=known, vocabulary=alphabet)
    saved = {"model._target_": known["model._target_"], "words": size}
    with nullcontext() if fits else pytest.raises(UserError, match="its vocabulary size is 34, not 33"):
        check_same_model(saved, model)
