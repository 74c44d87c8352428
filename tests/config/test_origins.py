# SPDX-License-Identifier: Apache-2.0
"""`--cfg job --origin` names the file and line that set each value."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bionemo.config.compose import compose, rewrite_overrides
from bionemo.config.paths import find_source
from bionemo.config.schema import DownstreamConfig, InferConfig, RunConfig
from tests.conftest import ROOT

ESM2NV = ROOT / "examples" / "protein" / "esm2nv"


def origins(command: str, *arguments: str) -> dict[str, tuple[str, str]]:
    words = [sys.executable, "-m", f"bionemo.{command}", *arguments, "--cfg", "job", "--origin"]
    done = subprocess.run(words, cwd=ESM2NV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pairs = (line.rpartition("  # ") for line in done.stdout.splitlines())
    return {value.partition("=")[0]: (value.partition("=")[2], origin) for value, _, origin in pairs}


@pytest.mark.parametrize(
    "command, schema, name",
    [("pretrain", RunConfig, "pretrain_esm2_8M"), ("finetune", DownstreamConfig, "downstream_flip_scl"),
     ("predict", InferConfig, "predict")],
)  # fmt: skip
def test_the_line_sets_the_value(command: str, schema: type, name: str) -> None:
    """Every value of the configuration is listed once, and its line has its key and its value."""
    directory = ROOT / "conf" if command == "predict" else ESM2NV / "conf"
    found = origins(command, f"--config-name={name}", f"--config-path={directory}")
    source = find_source(name, directory)
    container = OmegaConf.to_container(compose(source, rewrite_overrides(source, []), schema)[0])
    leaves = {}

    def walk(node: object, key: str) -> None:
        if isinstance(node, dict) and node:
            for each, value in node.items():
                walk(value, f"{key}.{each}" if key else each)
        else:
            leaves[key] = node

    walk(container, "")
    assert [*found] == [*leaves]
    for key, (_, origin) in found.items():
        path, _, number = origin.rpartition(":")
        line = (ESM2NV / path).read_text().splitlines()[int(number) - 1]
        match = re.match(r"\s*([\w.]+):(.*)", line)
        assert match and match[1] in key.split("."), (key, line)
        value = yaml.load(match[2], yaml.BaseLoader)
        if isinstance(value, str) and value not in ("", "null"):
            assert value in (leaves[key], str(leaves[key])), (key, line)


def test_command_line_and_own_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer:\n  max_steps: 5\n")
    found = origins("pretrain", f"--config-path={tmp_path}", "--config-name=mine", "model.num_layers=2")
    assert found["model.num_layers"] == ("2", "command line")
    assert found["trainer.max_steps"][0] == "5" and found["trainer.max_steps"][1].endswith("mine.yaml:2")
    assert found["model.seq_length"][1].endswith("conf/model/_esm2nv.yaml:10")  # of the default configuration
    part = origins("pretrain", "--package", "model.optim", "model.optim.lr=1e-3")
    assert {key.split(".")[1] for key in part} == {"optim"} and part["model.optim.lr"] == ("1e-3", "command line")
    assert part["model.optim.sched.max_lr"][0] == "${..lr}"
    resolved = origins("pretrain", "--package", "model.optim", "model.optim.lr=1e-3", "--resolve")
    assert resolved["model.optim.sched.max_lr"] == ("1e-3", part["model.optim.sched.max_lr"][1])


@pytest.mark.parametrize("arguments", [["--origin"], ["--origin", "--cfg", "hydra"]])
def test_flags_that_do_not_fit(arguments: list[str]) -> None:
    words = [sys.executable, "-m", "bionemo.pretrain", *arguments]
    done = subprocess.run(words, cwd=ESM2NV, capture_output=True, text=True, check=False)
    assert done.returncode and "--cfg job" in done.stderr.splitlines()[-1]


def test_secrets_are_redacted() -> None:
    found = origins("pretrain", "cluster=bcm", "+cluster.env_vars.WANDB_API_KEY=abcdefghij0123456789")
    assert found["cluster.env_vars.WANDB_API_KEY"][0] != "abcdefghij0123456789"
