# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning with command lines and unchanged files of v1."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from bionemo.common.errors import UserError
from bionemo.config.compose import compose_typed, load, rewrite_overrides
from bionemo.config.paths import find_source, list_configs
from bionemo.config.schema import DownstreamConfig
from tests.conftest import EXAMPLES, ROOT
from tests.support.v1_configs import v1_base

HOME = EXAMPLES / "downstream" / "conf"
TASKS = ("sec_str", "scl", "meltome")
COLUMNS = {"sec_str": "3state", "scl": "scl_label", "meltome": "target"}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIONEMO_HOME", "/workspace")


def composed(path: Path, name: str, *overrides: str) -> tuple[DownstreamConfig, list[str]]:
    source = find_source("downstream_flip_sec_str", HOME, name, path)
    return compose_typed(source, rewrite_overrides(source, overrides), DownstreamConfig)


def values(cfg: DownstreamConfig) -> dict[str, Any]:
    model, data, optim = cfg.model, cfg.model.data, cfg.model.finetuning_optim
    return {
        "path": str(model.restore_encoder_path), "epochs": cfg.trainer.max_epochs, "batch": model.micro_batch_size,
        "task": (data.task_name, data.task_type, data.target_column, data.target_sizes, data.mask_column),
        "files": data.dataset_path, "lr": optim.lr, "decay": optim.weight_decay,
        "sched": (optim.sched.min_lr, optim.sched.warmup_steps), "dropout": model.downstream_task.dropout,
        "head": model.downstream_task.cnn_dim if data.task_type.startswith("token")
        else model.downstream_task.hidden_layer_size,
    }  # fmt: skip


# v1's values for each task, and exceptions for each family
V1: dict[str, dict[str, Any]] = {
    "sec_str": {"epochs": 10, "batch": 64, "dropout": 0.25, "head": 32,
                "files": "/workspace/data/FLIP/secondary_structure",
                "task": ("secondary_structure", "token-level-classification", ["3state"], [3], ["resolved"])},
    "scl": {"epochs": 20, "batch": 64, "dropout": 0.1, "head": 256, "files": "/workspace/data/FLIP/scl",
            "task": ("scl", "classification", ["scl_label"], [10], None)},
    "meltome": {"epochs": 20, "batch": 32, "dropout": 0.1, "head": 128, "files": "/workspace/data/FLIP/meltome",
                "task": ("meltome", "regression", ["target"], [1], None)},
}  # fmt: skip
COMMON = {"lr": 5e-4, "decay": 0.01, "sched": (1e-5, 10)}
OTHER: dict[tuple[str, str], dict[str, Any]] = {
    ("esm2nv", "sec_str"): {"epochs": 20, "lr": 1e-3, "decay": 0.0, "sched": (1e-3, 0)},
    ("prott5nv", "meltome"): {"batch": 16},
}
ENCODERS = {"esm1nv": "esm1nv", "esm2nv": "esm2nv_650M_converted", "prott5nv": "prott5nv"}


def expected(family: str, task: str) -> dict[str, Any]:
    path = f"/workspace/models/protein/{family}/{ENCODERS[family]}.nemo"
    return {"path": path, **COMMON, **V1[task], **OTHER.get((family, task), {})}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ENCODERS)
def test_each_family_has_the_values_of_v1(family: str, task: str) -> None:
    """Run `downstream_flip.py --config-path=../esm1nv/conf --config-name=downstream_flip_sec_str`."""
    cfg, notes = composed(EXAMPLES / family / "conf", f"downstream_flip_{task}")
    assert notes == []
    wanted = expected(family, task)
    if task == "meltome":  # a regression target has size 1
        wanted["task"] = (*wanted["task"][:3], None, None)
    assert values(cfg) == wanted
    name = f"{family}_flip_{cfg.model.data.task_name}_finetuning"
    assert cfg.exp_manager.wandb_logger_kwargs.project == name


def v1_file(family: str, task: str) -> str:
    """Return a file of v1 whose `defaults` contain the base_config next to it."""
    wanted = expected(family, task)
    kind, columns = wanted["task"][1], wanted["task"][2]
    encoder: dict[str, Any] = {
        "micro_batch_size": wanted["batch"], "post_process": False, "encoder_frozen": True, "global_batch_size": None,
        "restore_encoder_path": wanted["path"].replace("/workspace", "${oc.env:BIONEMO_HOME}"), "modify_percent": 0.0,
        "dropout_rate": wanted["dropout"], "tokenizer": {"library": "sentencepiece", "type": None},
    }  # fmt: skip
    encoder |= {"cnn_dim": 32} if task == "sec_str" else {"hidden_layer_size": wanted["head"], "loss_func": "MSELoss"}
    encoder["data"] = {
        "dataset_path": "${model.data.preprocessed_data_path}/${model.data.task_name}", "modify_percent": 0.0,
        "micro_batch_size": "${model.micro_batch_size}", "dataset": dict.fromkeys(("train", "val", "test"), "x000"),
        "task_name": wanted["task"][0], "task_type": kind, "sequence_column": "sequence", "target_column": columns,
        "preprocessed_data_path": "${oc.env:BIONEMO_HOME}/data/FLIP", "target_sizes": wanted["task"][3],
        "emb_batch_size": "${model.micro_batch_size}", "max_seq_length": "${model.seq_length}", "num_workers": 8,
    }  # fmt: skip
    encoder["data"] |= {"mask_column": ["resolved"]} if task == "sec_str" else {"shuffle": True, "num_classes": 10}
    optim: dict[str, Any] = {"name": "adam", "lr": wanted["lr"]}
    encoder["finetuning_optim"] = optim
    if wanted["decay"]:
        sched = {"name": "WarmupAnnealing", "min_lr": 1e-05, "last_epoch": -1, "warmup_steps": 10}
        encoder["finetuning_optim"] = {
            **optim,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "sched": sched,
        }
    whole = {
        "defaults": ["base_config"], "name": f"{family}_flip", "do_testing": True, "do_preprocessing": False,
        "target": "bionemo.model.protein.esm1nv.ESM1nvModel", "infer_target": "bionemo.model.protein.infer.Inference",
        "trainer": {"max_epochs": wanted["epochs"], "val_check_interval": 20, "limit_val_batches": 1000},
        "exp_manager": {"wandb_logger_kwargs": {"project": "${name}_${model.data.task_name}_finetuning"}},
        "model": encoder,
    }  # fmt: skip
    return OmegaConf.to_yaml(OmegaConf.create(whole))


@pytest.mark.parametrize("base", ["v1", "ours"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ENCODERS)
def test_unchanged_file_of_v1(family: str, task: str, base: str, tmp_path: Path) -> None:
    """Test next to v1's base_config and next to ours."""
    ours = EXAMPLES / family / "conf" / "base_config.yaml"
    (tmp_path / "base_config.yaml").write_text(v1_base(family) if base == "v1" else ours.read_text())
    (tmp_path / "downstream.yaml").write_text(v1_file(family, task))
    cfg, notes = composed(tmp_path, "downstream")
    assert values(cfg) == expected(family, task)
    assert (cfg.name, cfg.do_testing, cfg.model.data.emb_batch_size) == (
        f"{family}_flip",
        True,
        cfg.model.micro_batch_size,
    )
    assert cfg.exp_manager.wandb_logger_kwargs.project == f"{family}_flip_{cfg.model.data.task_name}_finetuning"
    assert [("selects no task" in notes[0]), "that were renamed: model.dropout_rate" in notes[1]] == [True, True]
    assert "pretraining keys are ignored" in notes[2]
    assert "keys of v1 without effect" in notes[3]
    assert "model.post_process" in notes[3]
    assert len(notes) == 4
    assert not any("\n" in note for note in notes)


MOLECULES = """
defaults: [base_config]
name: mmb_physchem
trainer: {devices: 1, max_epochs: 100, max_steps: 10000, val_check_interval: 8}
model:
  name: small_span_aug
  post_process: False
  num_layers: 6
  restore_encoder_path: ${oc.env:BIONEMO_HOME}/models/molecule/megamolbart/megamolbart.nemo
  encoder_frozen: True
  downstream_task: {n_outputs: 1, hidden_layer_size: 96, loss_func: MSELoss}
  data:
    links_file: ${oc.env:BIONEMO_HOME}/examples/molecule/megamolbart/dataset/PhysChem-downloader.txt
    preprocessed_data_path: ${oc.env:BIONEMO_HOME}/data/physchem/
    dataset_path: ${model.data.preprocessed_data_path}/${model.data.task_name}
    split_data: True
    val_frac: 0.15
    test_frac: 0.15
    dataset: {train: x000, test: x000, val: x000}
    task_name: SAMPL
    task_type: regression
    sequence_column: smiles
    target_column: expt
    emb_batch_size: ${model.micro_batch_size}
    shuffle: False
  finetuning_optim: {name: adam, lr: 0.002}
"""


def test_the_file_of_molecules(tmp_path: Path) -> None:
    (tmp_path / "base_config.yaml").write_text(v1_base("megamolbart"))
    (tmp_path / "mine.yaml").write_text(MOLECULES)
    home = ROOT / "examples/molecule/megamolbart/conf"
    source = find_source("finetune_config", home, "mine", tmp_path)
    cfg, notes = compose_typed(source, [], DownstreamConfig)
    assert (cfg.trainer.max_epochs, cfg.model.data.shuffle) == (100, False)
    assert cfg.model.downstream_task.hidden_layer_size == 96
    assert (cfg.model.finetuning_optim.lr, cfg.model.finetuning_optim.sched.min_lr) == (2e-3, 2e-3)
    assert cfg.model.data.dataset_path == "/workspace/data/physchem//SAMPL"
    assert "model.downstream_task.loss_func (the loss follows" in notes[-1].replace("model.loss_func, ", "")


def test_keys_that_were_given_on_the_command_line(tmp_path: Path) -> None:
    """The old key takes precedence with our files, the new key with files of v1."""
    cfg, notes = composed(HOME, "downstream_flip_scl", "model.dropout_rate=0.3", "++model.loss_func=CrossEntropyLoss")
    assert cfg.model.downstream_task.dropout == 0.3
    assert notes == [
        "keys of v1 that were renamed: model.dropout_rate (model.downstream_task.dropout)",
        "keys of v1 without effect: model.loss_func (the loss follows from model.data.task_type)",
    ]
    (tmp_path / "base_config.yaml").write_text("model: {seq_length: 512}\n")
    (tmp_path / "downstream.yaml").write_text(v1_file("esm1nv", "scl"))
    cfg, _ = composed(tmp_path, "downstream", "model.downstream_task.dropout=0.4", "model.hidden_layer_size=64")
    assert (cfg.model.downstream_task.dropout, cfg.model.downstream_task.hidden_layer_size) == (0.4, 64)


def test_small_file_keeps_the_other_values_of_the_default(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {restore_encoder_path: x.nemo, finetuning_optim: {lr: 1e-4}}\n")
    cfg, _ = composed(tmp_path, "mine")
    assert cfg.model.data.mask_column == ["resolved"]
    assert (cfg.model.finetuning_optim.lr, cfg.model.finetuning_optim.sched.warmup_steps) == (1e-4, 10)


@pytest.mark.parametrize(
    "override", ["model.dropuot_rate=0.1", "model.num_layers=6", "model.optim.lr=0.1", "model.data.train.range=x000"]
)
def test_unknown_keys_are_refused(override: str) -> None:
    """Pretraining keys are also rejected, except in a file of v1."""
    with pytest.raises(UserError, match="unknown key"):
        composed(HOME, "downstream_flip_scl", override)


@pytest.mark.parametrize("name", sorted({*list_configs(HOME)} - {"downstream_table"}))  # it has no task
def test_task_without_model_when_several_examples_have_it(name: str) -> None:
    assert load(name, schema=DownstreamConfig).model.restore_encoder_path is None
