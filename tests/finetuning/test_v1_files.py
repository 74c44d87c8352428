# SPDX-License-Identifier: Apache-2.0
"""v1's fine-tuning command with an unchanged v1 file trains and writes a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bionemo.formats.convert import convert
from tests.conftest import EXAMPLES
from tests.support.finetuning import written
from tests.support.huggingface import theirs
from tests.support.v1_configs import v1_base

TASK = """
defaults:
  - base_config
name: esm1nv_flip
do_testing: True
target: bionemo.model.protein.esm1nv.ESM1nvModel
trainer: {max_epochs: 4, val_check_interval: 20, accelerator: cpu}
model:
  micro_batch_size: 8
  post_process: False
  restore_encoder_path: ${oc.env:BIONEMO_HOME}/models/protein/esm1nv/esm1nv.nemo
  encoder_frozen: True
  dropout_rate: 0.25
  cnn_dim: 16
  data:
    dataset_path: ${model.data.preprocessed_data_path}/${model.data.task_name}
    dataset: {train: x000, val: x000, test: x000}
    task_name: secondary_structure
    task_type: token-level-classification
    preprocessed_data_path: ${oc.env:BIONEMO_HOME}/data/FLIP
    sequence_column: sequence
    target_column: ["3state"]
    target_sizes: [3]
    mask_column: ["resolved"]
    emb_batch_size: ${model.micro_batch_size}
  finetuning_optim: {name: adam, lr: 0.01}
"""


def test_a_file_of_v1_trains(tmp_path: Path) -> None:
    theirs(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    (tmp_path / "models/protein/esm1nv").mkdir(parents=True)
    convert(tmp_path / "checkpoint", tmp_path / "models/protein/esm1nv/esm1nv.nemo")
    written(tmp_path / "data/FLIP/secondary_structure")
    conf = tmp_path / "esm1nv" / "conf"
    conf.mkdir(parents=True)
    (conf / "base_config.yaml").write_text(v1_base("esm1nv"))
    (conf / "downstream_flip_sec_str.yaml").write_text(TASK)
    script = EXAMPLES / "downstream" / "downstream_flip.py"
    arguments = [
        f"--config-path={conf}",
        "--config-name=downstream_flip_sec_str",
        f"exp_manager.exp_dir={tmp_path}/run",
    ]
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "BIONEMO_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("keys of v1 without effect") == 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["test_accuracy"] > 80
