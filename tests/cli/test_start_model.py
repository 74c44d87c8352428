# SPDX-License-Identifier: Apache-2.0
"""A run that starts from a MODEL takes its architecture and tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from bionemo.cli.start_model import add_architecture
from bionemo.cli.sweep import check_jobs
from bionemo.config.compose import compose_typed, expand_sweep, rewrite_overrides
from bionemo.config.paths import find_source
from bionemo.config.schema import RunConfig
from tests.support.huggingface import theirs
from tests.support.runs import Command, config, last_checkpoint, read_weights, train

DEFAULT = "pretrain_esm2_8M"


def composed(model: Path, *overrides: str, named: str = "") -> Any:
    words = [f"restore_from_path={model}", *overrides]
    source, words = add_architecture(find_source(named or DEFAULT), words, bool(named), sweep=False)
    return compose_typed(source, rewrite_overrides(source, words))[0]


@pytest.fixture(scope="module")
def esm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "esm2_t2"
    theirs(path, layers=3, token_dropout=False)
    return path


def test_the_last_override_names_the_model(esm2: Path) -> None:
    assert composed(Path("none"), f"++restore_from_path={esm2}").model.num_layers == 3
    assert composed(esm2, "restore_from_path=null").name == "esm2-8M"


def test_the_architecture_is_that_of_the_model(esm2: Path) -> None:
    cfg = composed(esm2, "data=mock")
    model = cfg.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads) == (3, 32, 96, 4)
    assert (model.seq_length, model.max_position_embeddings, model.embedding_token_dropout) == (96, 96, False)
    assert cfg.name == "esm2_t2-continued"


def test_overrides_of_the_user_win(esm2: Path) -> None:
    cfg = composed(esm2, "data=mock", "model.seq_length=64", "name=mine", "model.embedding_token_dropout=True")
    assert (cfg.model.seq_length, cfg.model.max_position_embeddings, cfg.model.num_layers) == (64, 64, 3)
    assert cfg.name == "mine" and cfg.model.embedding_token_dropout


def test_a_named_configuration_keeps_its_lengths(esm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = composed(esm2, named="pretrain_esm2_650M")
    assert (cfg.name, cfg.model.seq_length, cfg.model.num_layers, cfg.model.hidden_size) == ("esm2-650M", 1024, 3, 32)
    note = capsys.readouterr().err
    assert "determines " in note and "model.num_layers=3" in note and "layernorm_epsilon" not in note


def test_a_model_of_another_family_has_its_own_configuration(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=3, n_head=2)).save_pretrained(
        tmp_path / "gpt"
    )
    (tmp_path / "gpt" / "vocab.json").write_text("{" + ", ".join(f'"{n}": {n}' for n in range(257)) + "}")
    (tmp_path / "gpt" / "merges.txt").write_text("")
    cfg = composed(tmp_path / "gpt", "data=mock_text")
    assert cfg.model._target_.endswith("GPT3") and (cfg.model.num_layers, cfg.model.seq_length) == (3, 64)
    assert cfg.model.tokenizer.vocab_file == str(tmp_path / "gpt" / "vocab.json")


def test_a_configuration_of_another_family_is_left_unchanged(esm2: Path) -> None:
    assert composed(esm2, named="pretrain_esm1b_small").model.num_layers != 3


def test_runs_of_a_sweep_have_the_architecture_of_the_model(esm2: Path) -> None:
    words = [f"restore_from_path={esm2}", "data=mock", "model.optim.lr=1e-4,2e-4"]
    source, words = add_architecture(find_source(DEFAULT), words, named=False, sweep=True)
    jobs = check_jobs(source, expand_sweep(source, rewrite_overrides(source, words, sweep=True)), RunConfig)
    assert [(job.config.model.num_layers, job.config.model.optim.lr) for job in jobs] == [(3, 1e-4), (3, 2e-4)]
    for job in jobs:  # Lightning starts their command lines for other devices
        source, words = add_architecture(find_source(DEFAULT), job.overrides, named=False, sweep=False)
        assert compose_typed(source, rewrite_overrides(source, words))[0] == job.config


def test_a_missing_model_of_a_named_configuration_is_found_later(tmp_path: Path) -> None:
    """`bionemo launch` runs on another machine than the job."""
    assert composed(tmp_path / "none", named="pretrain_esm2_650M").model.num_layers == 33


def test_a_run_continues_with_the_architecture_of_a_run(tmp_path: Path) -> None:
    train(config(tmp_path / "first", "trainer.max_steps=2", "model.ffn_hidden_size=40"))
    model = tmp_path / "first"
    overrides = [f"exp_manager.exp_dir={tmp_path / 'second'}", "trainer.max_steps=1", f"restore_from_path={model}"]
    rc, lines = Command(tmp_path / "log", *overrides).end()
    assert rc == 0, lines
    assert any(line.endswith(f"weights from {model}") for line in lines)
    name = "encoder.layers.0.mlp.linear_fc1.weight"
    assert read_weights(last_checkpoint(tmp_path / "second"))[name].shape[0] == 40
