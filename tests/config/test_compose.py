# SPDX-License-Identifier: Apache-2.0
"""Every configuration file of the package composes to the expected typed values."""

import pytest

from bionemo.config.compose import compose_typed, load
from bionemo.config.paths import CONF_DIR, find_source, list_configs
from bionemo.config.schema import DownstreamConfig, ESM1nvConfig, ESM2nvConfig, InferConfig, PreparationConfig
from bionemo.config.targets import import_target
from bionemo.preparation.flip import TASKS
from tests.conftest import EXAMPLES, PRETRAINING, ROOT, RUNNABLE

NAMES = [f"{path.parent.name}-{name}" for path, name in RUNNABLE]
DOWNSTREAM = EXAMPLES / "downstream" / "conf"


def esm1(*overrides, name="pretrain_small"):
    return load(name, overrides, EXAMPLES / "esm1nv" / "conf")


def esm2(*overrides, name="pretrain_esm2_8M"):
    return load(name, overrides, EXAMPLES / "esm2nv" / "conf")


@pytest.mark.parametrize(("directory", "name"), RUNNABLE, ids=NAMES)
def test_every_runnable_file_is_valid(directory, name):
    cfg = load(name, [], directory)
    assert cfg.exp_manager.create_wandb_logger is False
    assert cfg.trainer.accelerator == "auto"
    assert cfg.trainer.devices % cfg.model.tensor_model_parallel_size == 0


@pytest.mark.parametrize("name", list_configs(CONF_DIR / "preparation"))
def test_every_preparation_is_valid(name):
    cfg = load(name, ["output=/o", "++source=/s"], CONF_DIR / "preparation", PreparationConfig)
    assert callable(import_target(cfg._target_))
    assert cfg.output == "/o"
    assert cfg.source == "/s"
    assert cfg.force is False


@pytest.mark.parametrize("name", sorted({*list_configs(DOWNSTREAM)} - {"downstream_table"}))
def test_every_downstream_task_is_valid(name):
    cfg = load(name, ["++model.data.preprocessed_data_path=/p"], DOWNSTREAM, DownstreamConfig)
    assert cfg.model.data.preprocessing.task_name in TASKS
    assert cfg.model.data.preprocessing.output == "/p"
    assert cfg.model.data.dataset_path == f"/p/{cfg.model.data.task_name}"


@pytest.mark.parametrize("directory", [path for path in PRETRAINING if "infer" in list_configs(path)], ids=str)
def test_every_prediction_is_valid(directory):
    overrides = ["model.downstream_task.restore_from_path=/m", "model.data.dataset_path=/d"]
    cfg = load("infer", overrides, directory, InferConfig)
    assert cfg.model.downstream_task.outputs == ["embeddings"]
    assert (directory.parent / "infer.py").is_file()


def test_the_properties_of_molecules():
    cfg = load("finetune_config", ["model.data.task_name=ESOL"], schema=DownstreamConfig)
    assert cfg.model.data.dataset_path == "./data/physchem/ESOL"


ROOTS = ("preparation", "downstream")  # groups of complete configurations
GROUPS = [group for group in sorted(CONF_DIR.iterdir()) if group.is_dir() and group.name not in ROOTS]
CHOICES = [(group.name, name) for group in GROUPS for name in list_configs(group)]


FITTING = {"zinc15": "megamolbart_small", "uspto50k": "megamolbart_small", "text": "gpt3", "mock_text": "gpt3"}


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=["=".join(choice) for choice in CHOICES])
def test_every_choice_of_every_group_fits_the_base(group, name):
    model = name if group == "model" else FITTING.get(name, "esm2nv_8M")
    overrides = [f"model={model}", f"{group}={name}", "name=x", "trainer.devices=8"]
    overrides += ["model.data.dataset_path=/d"] if group == "data" and name not in ("text", "mock_text") else []
    overrides += ["model.data.mixture.one.weight=1"] if name == "mixture" else []
    base, directory = ("base_config", ROOT / "examples/gpt3/conf") if model == "gpt3" else ("pretrain", CONF_DIR)
    load(base, overrides, directory)


# Lin et al. 2023 and the published checkpoints' configurations
@pytest.mark.parametrize(
    ("size", "layers", "hidden", "heads", "parallel"),
    [
        ("8M", 6, 320, 20, 1),
        ("35M", 12, 480, 20, 1),
        ("150M", 30, 640, 20, 1),
        ("650M", 33, 1280, 20, 1),
        ("3B", 36, 2560, 40, 2),
        ("15B", 48, 5120, 40, 8),
    ],
)
def test_sizes_of_esm2(size, layers, hidden, heads, parallel):
    model = esm2(name=f"pretrain_esm2_{size}").model
    assert isinstance(model, ESM2nvConfig)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, hidden, heads)
    assert model.ffn_hidden_size == 4 * hidden
    assert model.tensor_model_parallel_size == parallel


def test_the_target_class_selects_the_schema():
    model = esm1().model
    assert type(model) is ESM1nvConfig
    assert (model.optim.lr, model.optim.sched.name) == (2e-4, "CosineAnnealing")
    assert isinstance(model.native_amp_init_scale, float)


def test_the_two_ways_to_name_training_files_agree():
    assert esm2("++model.data.dataset.train=x000").model.data.train.range == "x000"
    data = esm2("model.data.train.range=x001", "model.data.dataset.train=x000").model.data
    assert (data.train.range, data.dataset.train) == ("x001", "x000")


def test_splits_inherit_keys_that_they_do_not_set():
    data = esm1("model.data.data_impl_kwargs.csv_mmap.data_col=1", "model.data.num_workers=3").model.data
    assert data.val.data_impl_kwargs.csv_mmap.data_col == 1
    assert data.test.num_workers == data.val.data_impl_kwargs.csv_mmap.workers == 3
    data = esm1("model.data.val.data_impl_kwargs.csv_mmap.data_col=2").model.data
    assert [split.data_impl_kwargs.csv_mmap.data_col for split in (data.train, data.val)] == [3, 2]
    assert data.val.data_impl_kwargs.csv_mmap.data_sep == ","


def test_validation_of_esm2_never_reads_the_training_sequences():
    data = esm2().model.data
    assert data.val.uf50_datapath == data.test.uf50_datapath != data.train.uf50_datapath


def test_selecting_another_model_selects_its_data_and_optimizer():
    cfg = esm1("model=esm2nv_650M")
    assert (cfg.model.num_layers, cfg.model.optim.sched.name) == (33, "WarmupAnnealDecayHold")
    assert cfg.model.data.train.uf90 is not None


@pytest.mark.parametrize(
    "override", ["data@model.data=mock", "data=mock", "model.data=mock", "++data@model.data=mock"]
)
def test_data_source_can_be_selected_by_each_of_its_names(override):
    data = esm2(override).model.data
    assert [split.data_impl for split in (data.train, data.val, data.test)] == ["mock"] * 3
    assert data.mock.num_validation_sequences == 512


def test_home_is_optional(monkeypatch):
    monkeypatch.delenv("BIONEMO_HOME", raising=False)
    assert esm1().exp_manager.explicit_log_dir == "./results/nemo_experiments/esm1nv/esm1nv_pretraining"
    monkeypatch.setenv("BIONEMO_HOME", "/workspace")
    assert esm1().model.data.dataset_path == "/workspace/data/uniref2022_05"


def test_home_directory_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = esm1("exp_manager.exp_dir=~/run", "model.data.dataset_path=~/data", "name=a~/b", "exp_manager.name=~")
    assert esm1("model.data.dataset_path=~root/data").model.data.dataset_path == "/root/data"
    manager = cfg.exp_manager
    assert (manager.exp_dir, manager.explicit_log_dir, manager.name) == ("/home/me/run", "/home/me/run", "~")
    assert (cfg.model.data.dataset_path, cfg.name) == ("/home/me/data", "a~/b")


def test_numbers_from_the_environment_are_numbers(monkeypatch):
    monkeypatch.setenv("N", "2")
    cfg = esm1("trainer.devices=${oc.env:N}", "model.seed=${multiply:${oc.env:N},3}", "name=${sum:1,2,3}")
    assert (cfg.trainer.devices, cfg.model.seed, cfg.name) == (2, 6, "6")


# A two-node Base Command job from the v1 documentation
V1_MANUAL = """
do_training=True model.data.dataset_path=/data/uniref ++model.data.dataset.train=x_OP_000..009_CL_
++model.data.dataset.val=x_OP_000..009_CL_ ++model.data.dataset.test=x_OP_000..009_CL_
exp_manager.exp_dir=/workspace/bionemo/nemo_experiments/esm1nv/pretrain_small-000-009
++exp_manager.create_wandb_logger=True ++exp_manager.wandb_logger_kwargs.offline=False
++exp_manager.wandb_logger_kwargs.name=esm1nv_2node_bs128_test1 ++trainer.devices=8 ++trainer.num_nodes=2
model.validation.validation_enabled=False model.micro_batch_size=128 ++trainer.max_steps=100
++trainer.val_check_interval=50 model.data.num_workers=0 ++model.tensor_model_parallel_size=1
++trainer.accumulate_grad_batches=1 ++exp_manager.checkpoint_callback_params.always_save_nemo=False
"""


def test_the_command_line_of_the_v1_manual():
    cfg = esm1(*V1_MANUAL.split())
    assert (cfg.trainer.devices, cfg.trainer.num_nodes, cfg.trainer.max_steps) == (8, 2, 100)
    assert cfg.trainer.val_check_interval == 50
    assert cfg.model.micro_batch_size == 128
    assert cfg.model.data.num_workers == cfg.model.data.train.num_workers == 0
    assert cfg.model.data.train.range == cfg.model.data.test.range == "x_OP_000..009_CL_"
    assert cfg.model.data.val.dataset_path == "/data/uniref"
    assert cfg.exp_manager.explicit_log_dir == "/workspace/bionemo/nemo_experiments/esm1nv/pretrain_small-000-009"
    assert cfg.exp_manager.wandb_logger_kwargs.name == "esm1nv_2node_bs128_test1"
    assert cfg.exp_manager.wandb_logger_kwargs.job_type == "Localhost_nodes_2_gpus_8"
    assert cfg.exp_manager.create_wandb_logger is True


def test_a_user_file_may_refer_to_our_configs_and_groups(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - pretrain_esm2_650M\n  - override /model: esm2nv_35M\n  - _self_\nmodel: {num_layers: 2}\n"
    )
    home = EXAMPLES / "esm2nv" / "conf"
    for flags in ({"config_path": tmp_path}, {"config_dir": tmp_path}):
        model = compose_typed(find_source("pretrain_esm2_8M", home, config_name="mine.yaml", **flags), [])[0].model
        assert (model.num_layers, model.hidden_size) == (2, 480)


def test_directories_named_in_the_environment_are_searched(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    (tmp_path / "last").mkdir()
    (tmp_path / "first" / "pretrain_small.yaml").write_text("defaults: [base_config, _self_]\nname: first\n")
    (tmp_path / "last" / "own.yaml").write_text("defaults: [base_config, _self_]\nname: last\n")
    monkeypatch.setenv("BIONEMO_PREPEND_SEARCH_PATH", f"{tmp_path}/first")
    monkeypatch.setenv("BIONEMO_APPEND_SEARCH_PATH", f"{tmp_path}/nowhere, {tmp_path}/last")
    assert esm1().name == "first"
    assert esm1(name="own").name == "last"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_directories_named_in_a_file_are_searched(scheme, tmp_path, monkeypatch):
    (tmp_path / "more" / "data").mkdir(parents=True)
    (tmp_path / "more" / "data" / "ours.yaml").write_text("defaults: [mock, _self_]\npacking_window: 7\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [pretrain_small, {override /data@model.data: ours}, _self_]\n"
        f"hydra: {{searchpath: ['{scheme}${{oc.env:BIONEMO_HOME}}/more']}}\n"
    )
    monkeypatch.setenv("BIONEMO_HOME", str(tmp_path))
    source = find_source("pretrain_small", EXAMPLES / "esm1nv" / "conf", "mine", tmp_path)
    assert compose_typed(source, [])[0].model.data.packing_window == 7
