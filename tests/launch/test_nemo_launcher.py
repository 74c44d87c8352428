# SPDX-License-Identifier: Apache-2.0
"""Command lines of NeMo's launcher render the same job as ours."""

import os
from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.launch.nemo_launcher import translate_launcher_arguments
from tests.launch.test_render import GOLDEN, rendered
from tests.support.launches import launch

PAIRS = {
    "the benchmark of the AWS test case": (
        ["stages=[training]", "training=gpt3/126m", "cluster=bcm", "training.trainer.num_nodes=2",
         "training.trainer.max_steps=40", "training.trainer.val_check_interval=40",
         "++training.trainer.limit_val_batches=0.0", "training.exp_manager.create_checkpoint_callback=False",
         "training.exp_manager.resume_if_exists=False", "training.model.data.data_impl=mock",
         "training.model.data.data_prefix=[]", "base_results_dir=results", "container=/apps/nemo.sqsh",
         "container_mounts=[/fsx:/fsx]", "env_vars.NCCL_PROTO=simple", "launcher_scripts_path=/opt",
         "data_dir=/fsx/data"],
        ["--config-name=pretrain_gpt3_126m", "cluster=bcm", "trainer.num_nodes=2", "trainer.max_steps=40",
         "trainer.val_check_interval=40", "trainer.limit_val_batches=0.0",
         "exp_manager.create_checkpoint_callback=False", "exp_manager.resume_if_exists=False",
         "model.data.data_impl=mock", "model.data.data_prefix=[]", "exp_manager.exp_dir=results/gpt3_126m",
         "cluster.container_image=/apps/nemo.sqsh", "cluster.container_mounts=[/fsx:/fsx]",
         "cluster.env_vars.NCCL_PROTO=simple"],
    ),
    "names, times and preparation": (
        ["stages=[data_preparation,training]", "training=gpt3/5b", "cluster_type=bcm", "cluster.partition=main",
         "training.run.name=mine", "training.run.time_limit=1-00:00:00", "training.run.dependency=null",
         "training.run.results_dir=out"],
        ["--config-name=pretrain_gpt3_5b", "do_preprocessing=True", "cluster=bcm", "cluster.partition=main",
         "name=mine", "cluster.time=1-00:00:00", "cluster.dependency=null", "exp_manager.exp_dir=out"],
    ),
}  # fmt: skip


def directives(text: str) -> list[str]:
    """Return the options of sbatch, and the environment of the job."""
    return [line for line in text.splitlines() if line.startswith(("#SBATCH", "export ", "# HERE"))]


@pytest.mark.parametrize("case", PAIRS)
def test_both_command_lines_render_the_same_job(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arguments in PAIRS[case]:
        assert launch(monkeypatch, tmp_path, *arguments, "--dry-run") == 0
        output = capsys.readouterr().out
        texts.append((directives(rendered(output, tmp_path)), output.partition("_hydra.yaml\n")[2]))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 8
    assert "trainer:" in texts[0][1]  # the whole configuration is compared


CONFIG = """
defaults:
  - _self_
  - cluster: bcm
  - data_preparation: gpt3/download_gpt3_pile
  - training: gpt3/5b
  - override hydra/job_logging: stdout
hydra: {output_subdir: null}
debug: False
stages: [training, conversion]
cluster_type: bcm
launcher_scripts_path: ???
data_dir: ${launcher_scripts_path}/data
base_results_dir: ${launcher_scripts_path}/results
container_mounts: [null]
container: null
wandb_api_key_file: /keys/wandb
env_vars: {NCCL_DEBUG: null, NCCL_PROTO: simple, TRANSFORMERS_OFFLINE: 1}
numa_mapping: {enable: True}
training_config: ${hydra:runtime.choices.training}
"""
CLUSTER = """
partition: main
account: null
exclusive: True
gpus_per_task: null
gpus_per_node: 4
mem: 0
job_name_prefix: "mine-"
srun_args: ["--no-container-mount-home"]
"""
TRAINING = """
run: {name: gpt3_tiny, results_dir: "${base_results_dir}/${.name}", time_limit: "0-02:00:00", dependency: singleton}
trainer: {num_nodes: 2, devices: 4, precision: bf16, logger: False, max_steps: 100, max_time: "00:01:30:00"}
exp_manager:
  explicit_log_dir: ${training.run.results_dir}/results
  exp_dir: null
  name: megatron_gpt
  wandb_logger_kwargs: {name: "${training.run.name}"}
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${training.model.tensor_model_parallel_size}, 2}
model:
  micro_batch_size: 2
  global_batch_size: 16
  tensor_model_parallel_size: 2
  num_layers: 2
  hidden_size: 64
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  activations_checkpoint_granularity: selective
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 0
  megatron_amp_O2: True
  tokenizer:
    {library: megatron, type: GPT2BPETokenizer, vocab_file: "${data_dir}/v.json", merge_file: "${data_dir}/m.txt"}
  optim: {lr: 6e-4, betas: [0.9, 0.95]}
  data: {data_impl: mock, data_prefix: [.5, "${data_dir}/a", .5, "${data_dir}/b"], splits_string: "99990,8,2"}
"""
OURS = [
    "--config-name=pretrain_gpt3_126m", "cluster=bcm", "cluster.partition=main", "cluster.gpus_per_node=4",
    "cluster.job_name_prefix=mine-", "cluster.env_vars.NCCL_PROTO=simple", "cluster.env_vars.TRANSFORMERS_OFFLINE=1",
    "cluster.time=0-02:00:00", "name=gpt3_tiny", "exp_manager.exp_dir=/ls/results/gpt3_tiny",
    "exp_manager.wandb_logger_kwargs.name=gpt3_tiny", "trainer.num_nodes=2", "trainer.devices=4",
    "trainer.precision=bf16", "trainer.max_steps=40", "trainer.max_time=00:01:30:00", "model.micro_batch_size=2",
    "model.global_batch_size=16", "model.tensor_model_parallel_size=2", "model.num_layers=2", "model.hidden_size=64",
    "model.ffn_hidden_size=256", "model.num_attention_heads=4", "model.activations_checkpoint_granularity=selective",
    "model.activations_checkpoint_method=block", "model.activations_checkpoint_num_layers=0",
    "model.tokenizer.library=megatron", "model.tokenizer.type=GPT2BPETokenizer",
    "model.tokenizer.vocab_file=/ls/data/v.json", "model.tokenizer.merge_file=/ls/data/m.txt",
    "model.optim.lr=6e-4", "model.optim.betas=[0.9,0.95]", "model.data.data_impl=mock",
    "model.data.data_prefix=[.5,/ls/data/a,.5,/ls/data/b]", "model.data.splits_string='99990,8,2'",
]  # fmt: skip
CANARY = "canary-0d5f2c91"
THEIRS = ["stages=[training]", "training=gpt3/tiny", "cluster=bcm", "launcher_scripts_path=/ls",
          "training.trainer.max_steps=40"]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A configuration directory of the launcher."""
    directory = tmp_path / "conf"
    for name, text in (("config", CONFIG), ("cluster/bcm", CLUSTER), ("training/gpt3/tiny", TRAINING)):
        path = directory / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def approved(found: str) -> None:
    """Compare with golden/nemo_launcher.txt; to approve changes, run with BIONEMO_APPROVE=1 and review the diff."""
    file = GOLDEN / "nemo_launcher.txt"
    if os.environ.get("BIONEMO_APPROVE"):
        file.write_text(found)
    assert found == file.read_text()


def test_a_secret_in_a_file_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "config.yaml").write_text(CONFIG.replace("NCCL_PROTO: simple", f"WANDB_API_KEY: {CANARY}"))
    assert launch(monkeypatch, tmp_path, f"--config-path={files}", *THEIRS, "--dry-run") == 1
    output = capsys.readouterr()
    assert CANARY not in output.out + output.err
    assert "WANDB_API_KEY" in output.err


def test_files_of_the_launcher_render_the_same_job(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(CANARY)
    (files / "config.yaml").write_text(CONFIG.replace("/keys/wandb", str(tmp_path / "key")))
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    texts = []
    for arguments in ([f"--config-path={files}", *THEIRS], OURS):
        assert launch(monkeypatch, tmp_path, *arguments, "--dry-run") == 0
        output = capsys.readouterr().out
        texts.append((directives(rendered(output, tmp_path)), output.partition("_hydra.yaml\n")[2]))
        if arguments is not OURS:
            approved(rendered(output, tmp_path))
    assert texts[0] == texts[1]
    assert "#SBATCH --partition=main" in texts[0][0]
    assert CANARY not in str(texts)
    assert "max_steps: 40" in texts[0][1]
    assert "ffn_hidden_size: 256" in texts[0][1]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "message"),
    [
        ("config", CONFIG + "x: [", [], r"config.yaml is not YAML: "),
        ("config", "- 1", [], r"config.yaml contains no keys"),
        ("config", CONFIG, ["training=../../x"], r"training=../../x is not a file in .*/conf/training"),
        ("config", CONFIG, ["training=gpt3/7b"], r"conf/training/gpt3/7b.yaml cannot be read \(No such file"),
        ("training/t5/small", TRAINING, ["training=t5/small"], r"training=t5/small is not supported: choose a file"),
        ("training/gpt3/tiny", TRAINING.replace("data_dir}/v", "nothing}/v"), [], r"conf: .*'nothing' not found: set"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(files: Path, name: str, text: str, arguments: list[str], message: str) -> None:
    path = files / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        translate_launcher_arguments([f"--config-path={files}", *THEIRS, *arguments])


def test_key_that_the_command_line_must_set(files: Path) -> None:
    with pytest.raises(UserError, match="Missing mandatory value: launcher_scripts_path: set the key on the command"):
        translate_launcher_arguments(["--config-path", str(files), "stages=[training]", "training=gpt3/tiny"])


def test_a_container_in_a_file(files: Path) -> None:
    (files / "config.yaml").write_text(CONFIG.replace("container: null", "container: /images/bionemo.sqsh"))
    found = translate_launcher_arguments([f"--config-path={files}", *THEIRS, "--trust-config"])
    assert "cluster.container_image=/images/bionemo.sqsh" in found
    assert "--trust-config" in found  # the command prints a note


def test_other_command_lines_are_unchanged() -> None:
    arguments = ["--config-name=pretrain_gpt3_126m", "training=gpt3/5b", "trainer.devices=8"]
    assert translate_launcher_arguments(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stages=[training,evaluation]"], r"'evaluation' is not supported, choose from data_preparation, training"),
        (["stages=[training]", "cluster_type=k8s"], r"cluster_type=k8s is not supported: choose from bcm, bcp, inter"),
    ],
)
def test_what_is_not_supported_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        translate_launcher_arguments(arguments)
