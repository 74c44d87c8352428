# SPDX-License-Identifier: Apache-2.0
"""Weights are loaded only by a model that computes the function they were trained for."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bionemo.checkpoint import Checkpoint
from bionemo.checkpoint.tools import write_weights
from bionemo.common.errors import UserError
from bionemo.config import saved_model
from bionemo.formats.convert import convert
from bionemo.training.identity import check_same_function, log_changed_settings
from tests.support.runs import config, last_checkpoint, logged, train

NEMO = "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True"
SHORT = ("trainer.max_steps=2", "model.optim.sched.max_steps=4", "trainer.val_check_interval=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(config(directory, *SHORT, NEMO))
    convert(last_checkpoint(directory), directory / "hf", "hf")
    return directory


OTHER_FUNCTIONS = [
    ("num_attention_heads", "4", "2"),
    ("layernorm_epsilon", "0.1", "1e-05"),
    ("activation", "gelu_tanh", "gelu"),
    ("embedding_token_dropout", "False", "True"),
]


def written(directory: Path) -> dict[str, tuple[int, int]]:
    """Return inodes and modification times of all files; log files of a run in this process remain open."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("logs.txt")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(("key", "value", "before"), OTHER_FUNCTIONS)
def test_a_run_with_another_function_does_not_resume(trained: Path, key: str, value: str, before: str) -> None:
    files = written(trained)
    with pytest.raises(UserError) as caught:
        train(config(trained, f"model.{key}={value}"))
    assert f"model.{key} was {before} and is now {value}" in str(caught.value)
    assert f"set model.{key}={before}" in str(caught.value)
    assert written(trained) == files


def test_a_key_that_a_checkpoint_lacks_had_its_default(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a version without a key compute the same function only with the default of its dataclass."""

    @dataclass
    class Later:
        embedding_token_dropout: bool = True

    path = last_checkpoint(trained)
    older = {key: value for key, value in Checkpoint(path).config.items() if key != "embedding_token_dropout"}
    monkeypatch.setattr(Checkpoint, "config", older)
    monkeypatch.setattr(saved_model, "target_schema", lambda *_: Later)
    expected = "model.embedding_token_dropout was True and is now False"
    with pytest.raises(UserError, match=expected):
        train(config(trained, "model.embedding_token_dropout=False"))
    with pytest.raises(UserError, match=expected):
        train(config(trained.parent / "other", f"restore_from_path={path}", "model.embedding_token_dropout=False"))


@pytest.mark.parametrize("overrides", [("model.hidden_size=64",), ("model.num_layers=3",)])
def test_a_run_of_another_size_does_not_change_the_directory(trained: Path, overrides: tuple[str, ...]) -> None:
    files = written(trained)
    with pytest.raises(UserError, match="belong to another model"):
        train(config(trained, *overrides))
    assert written(trained) == files


@pytest.mark.parametrize("source", ["checkpoint", "nemo", "hf"])
def test_a_new_run_rejects_weights_of_another_function(trained: Path, tmp_path: Path, source: str) -> None:
    checkpoint = last_checkpoint(trained)
    (archive,) = (trained / "checkpoints").glob("*.nemo")
    path = {"checkpoint": checkpoint, "nemo": archive, "hf": trained / "hf"}[source]
    for key, value, before in OTHER_FUNCTIONS:
        if (source, key) == ("nemo", "activation"):
            continue  # causes a note
        with pytest.raises(UserError, match=rf"model\.{key} was {before} and is now {value}"):
            train(config(tmp_path / "run", f"restore_from_path={path}", f"model.{key}={value}"))
    assert not (tmp_path / "run").exists()
    train(config(tmp_path / "run", f"restore_from_path={path}", "trainer.max_steps=1", "model.optim.lr=0.1"))


def test_permitted_changes_are_accepted_with_one_note(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(tmp_path, *SHORT))
    capsys.readouterr()
    overrides = (
        "trainer.max_steps=4", "model.optim.sched.max_steps=4", "model.optim.lr=0.001", "model.hidden_dropout=0.2",
        "model.micro_batch_size=2", "model.seq_length=128", "model.kv_channels=16", "model.data.num_workers=1",
        "model.init_method_std=0.5", "model.activations_checkpoint_granularity=selective",
    )  # fmt: skip
    train(config(tmp_path, *overrides))
    (note,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "settings changed since" in line and "model.optim" in line
    ]
    for change in ("optim.lr 0.0004 -> 0.001", "hidden_dropout 0.0 -> 0.2", "micro_batch_size 4 -> 2"):
        assert f"model.{change}" in note
    for free in ("seq_length", "kv_channels", "num_workers", "init_method_std", "granularity"):
        assert free not in note
    assert list(logged(tmp_path, "lr")) == [1, 2, 3, 4]


@pytest.mark.parametrize("kept", [{}, {"hidden_size": 32}], ids=["no configuration", "a part"])
def test_a_checkpoint_without_some_keys_is_accepted(trained: Path, tmp_path: Path, kept: dict[str, Any]) -> None:
    old = Checkpoint(last_checkpoint(trained))
    weights = ((name, old.read(f"weights/{name}")) for name in old.shapes("weights"))
    state = {**old.state, "config": kept}
    write_weights(tmp_path / "old", state, weights)
    train(config(tmp_path / "run", f"restore_from_path={tmp_path / 'old'}", "trainer.max_steps=1"))


def test_the_approximation_of_gelu_in_an_archive_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In v1's archives it follows from fused kernels, and v1's command lines do not contain it."""
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("bionemo.training.identity"), "callHandlers", records.append)
    check_same_function("esm1nv.nemo", {"activation": "gelu_tanh"}, {"activation": "gelu"})
    assert "set model.activation=gelu_tanh to continue with the same function" in records[0].getMessage()
    with pytest.raises(UserError, match="activation was relu"):
        check_same_function("esm1nv.nemo", {"activation": "relu"}, {"activation": "gelu"})
    with pytest.raises(UserError, match="activation was gelu_tanh"):
        check_same_function("run/checkpoints/last", {"activation": "gelu_tanh"}, {"activation": "gelu"})


def refused(saved: dict[str, Any], here: dict[str, Any]) -> str:
    try:
        check_same_function("SOURCE", saved, here)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ({"conv_dilation": 1}, {"conv_dilation": 2}),  # an unknown key
        ({"conv": {"dilation": [1, 2]}}, {"conv": {"dilation": [1, 3]}}),
        ({"conv_dilation": None}, {"conv_dilation": 2}),
        ({"kv_channels": None, "hidden_size": 32, "num_attention_heads": 2}, {"kv_channels": 8}),
        ({"bias": True}, {"bias": False}),
        ({"layernorm_epsilon": "1e-5"}, {"layernorm_epsilon": 1e-6}),
    ],
)
def test_all_keys_are_compared_except_listed_ones(saved: dict[str, Any], here: dict[str, Any]) -> None:
    assert "compute another function" in refused(saved, {**saved, **here})


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ({}, {"conv_dilation": 2}),
        ({"conv_dilation": 2}, {}),
        ({"layernorm_epsilon": "1e-5"}, {"layernorm_epsilon": 1e-5}),
        ({"kv_channels": None, "hidden_size": 32, "num_attention_heads": 2}, {"kv_channels": 16}),
        ({"mask_token_id": "${.tokenizer.mask_id}"}, {"mask_token_id": 32}),
        ({"betas": (0.9, 0.98)}, {"betas": [0.9, 0.98]}),
        ({"tensor_model_parallel_size": 2, "compile": True}, {"tensor_model_parallel_size": 1, "compile": False}),
        ({"data": {"dataset_path": "a"}, "seq_length": 8}, {"data": {"dataset_path": "b"}, "seq_length": 16}),
    ],
)
def test_equivalent_and_irrelevant_values_are_accepted(saved: dict[str, Any], here: dict[str, Any]) -> None:
    assert refused(saved, {**saved, **here} if here else {}) == ""


def test_a_note_about_many_changes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("bionemo.training.identity"), "callHandlers", records.append)
    saved = {"optim": {f"key{number}": 0 for number in range(20)}}
    log_changed_settings("SOURCE", saved, {"optim": {f"key{number}": 1 for number in range(20)}})
    (record,) = records
    assert record.getMessage().endswith("and 14 more")
    assert "\n" not in record.getMessage()
    log_changed_settings("SOURCE", saved, saved)
    assert len(records) == 1
