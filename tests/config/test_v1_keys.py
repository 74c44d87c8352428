# SPDX-License-Identifier: Apache-2.0
"""Command lines and files of v1 keep working."""

from dataclasses import asdict
from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import compose_typed, load, rewrite_overrides
from bionemo.config.paths import find_source
from bionemo.config.v1_keys import IGNORED, describe_ignored_keys, replacement
from tests.conftest import EXAMPLES, ROOT
from tests.support.v1_configs import v1_overrides


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: leaf for name, below in value.items() for key, leaf in flat(below, f"{prefix}.{name}").items()}


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("BIONEMO_HOME", "/workspace")


# Keys whose default differs from v1.
CHANGED = {
    "esm1nv": {"devices", "model", "library", "type", "num_workers", "train.num_workers", "val.num_workers"}
    | {"test.num_workers", "workers"},
    "esm2nv": {"sample_from_map", "train.data_impl_kwargs.csv_mmap.data_col", "val.uf50_datapath", "type"}
    | {"test.uf50_datapath", "cluster_mapping_tsv", "preprocessing.val_datapath", "preprocessing.test_datapath"},
    "prott5nv": {"devices", "model", "vocab_file", "num_workers", "workers", "desc", "sort_dataset_paths"}
    | {"last_epoch"},
    "megamolbart": {"devices", "num_nodes", "model", "vocab_file"},
    "gpt3": {"accumulate_grad_batches", "vocab_file", "merge_file", "data_prefix", "log_step_timing"}
    | {"activations_checkpoint_num_layers"},
}
RUNNABLE = {
    "esm1nv": ("base_config", "protein", 140),
    "esm2nv": ("pretrain_esm2_8M", "protein", 210),
    "prott5nv": ("base_config", "protein", 169),
    "megamolbart": ("pretrain_base", "molecule", 159),
    "gpt3": ("pretrain_gpt3_126m", ".", 131),
}
BOTH = {"accelerator", "create_wandb_logger", "notes", "job_type", "precision", "pin_memory", "micro_batch_size"}
BOTH |= {"filename"}


@pytest.mark.parametrize("model", RUNNABLE)
def test_every_key_of_v1_is_accepted_and_has_its_default(model):
    overrides = v1_overrides(model)
    config, directory, number = RUNNABLE[model]
    assert len(overrides) == number
    source = find_source(config, ROOT / "examples" / directory / model / "conf")
    ours, _ = compose_typed(source, [])
    theirs, notes = compose_typed(source, rewrite_overrides(source, overrides))
    theirs_flat = flat(asdict(theirs))
    differing = {key for key, value in flat(asdict(ours)).items() if theirs_flat.get(key) != value}
    unexpected = {key for key in differing if not key.endswith(tuple(f".{name}" for name in CHANGED[model] | BOTH))}
    assert not unexpected
    assert ours.model.replica_batch_size == theirs.model.micro_batch_size
    assert len(notes) == 1
    assert "\n" not in notes[0]


def test_ignored_keys_are_not_in_the_schema():
    cfg = flat(asdict(load("pretrain_esm2_8M", config_dir=EXAMPLES / "esm2nv" / "conf")))
    assert not {f".{key}" for key in IGNORED} & set(cfg)


def test_ignored_key_includes_the_keys_below_it():
    assert replacement("progress_bar_kwargs.warmup") == replacement("progress_bar_kwargs")
    assert replacement("model.onnx") is None
    assert replacement("") is None


def test_note_contains_each_reason_once():
    assert describe_ignored_keys({}) == []
    assert describe_ignored_keys({"a": "x", "b": "y", "c": "x"}) == ["keys of v1 without effect: a, c (x); b (y)"]


@pytest.mark.parametrize("value", ["false", "False", "null", "0", "'false'"])
def test_defaults_of_unsupported_keys_are_accepted_without_a_note(value: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"trainer: {{barebones: {value}}}\nexp_manager: {{ema: {{enable: {value}}}}}\n"
    )
    source = find_source("pretrain_small", EXAMPLES / "esm1nv" / "conf", "mine", tmp_path)
    assert not [note for note in compose_typed(source, [])[1] if "without effect" in note]


def test_another_value_of_an_unsupported_key_is_an_error() -> None:
    with pytest.raises(UserError, match=r"trainer\.barebones is .*, which is not supported: set it to False"):
        load("pretrain_small", ["++trainer.barebones=true"], EXAMPLES / "esm1nv" / "conf")


V1_FILE = """
name: mine
do_training: True
trainer: {precision: 16-mixed, max_steps: 77}
exp_manager:
  exp_dir: ${oc.env:BIONEMO_HOME}/results/${.name}
  name: ${name}
  wandb_logger_kwargs: {notes: "date: ${now:%y%m%d-%H%M%S}"}
model:
  micro_batch_size: 3
  num_layers: 4
  hidden_size: 96
  ffn_hidden_size: ${multiply:${model.hidden_size}, 4}
  onnx_safe: False
  data:
    dataset_path: /data
    dataset: {train: "x[000..003]", val: x000, test: x000}
"""


def test_complete_file_of_v1_is_merged_over_the_default(tmp_path):
    (tmp_path / "base_config.yaml").write_text(V1_FILE)  # also the name of one of our configs
    (tmp_path / "child.yaml").write_text("defaults:\n  - base_config\nmodel:\n  num_layers: 2\n")
    source = find_source("pretrain_small", EXAMPLES / "esm1nv" / "conf", "child", tmp_path)
    cfg, notes = compose_typed(source, rewrite_overrides(source, ["model.micro_batch_size=5"]))
    assert (cfg.name, cfg.model.num_layers, cfg.model.micro_batch_size) == ("mine", 2, 5)
    assert cfg.model.ffn_hidden_size == 384
    assert cfg.exp_manager.exp_dir == "/workspace/results/mine"
    assert cfg.model.data.train.range == "x[000..003]"
    assert ["selects no model" in notes[0], "onnx_safe" in notes[1]] == [True, True]
