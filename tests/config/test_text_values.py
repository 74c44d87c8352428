# SPDX-License-Identifier: Apache-2.0
"""Text keys keep what was written, in files and on the command line; numbers and booleans keep their meaning."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from bionemo.common.errors import UserError
from bionemo.config.compose import compose_typed, expand_sweep, load, rewrite_overrides
from bionemo.config.launcher_files import read_launcher_files
from bionemo.config.paths import find_source
from bionemo.config.schema import RunConfig
from bionemo.config.text_values import escape_interpolations
from tests.conftest import EXAMPLES

HOME = EXAMPLES / "esm1nv" / "conf"
# YAML 1.1 or Hydra read each of these as a number or a boolean that is written in another way.
TEXTS = (
    "0123", "010", "1_000", "2024_01_15", "0x1F", "0b11", "0o17", "+5", "-0", "12:00:00", "1:30", "1:00:00:00",
    "no", "yes", "on", "Off", "y", "true", "FALSE", "True", "1.10", "1.", ".5", "1e5", "7e3", "1E-3", "1.5e+3", "inf",
    "INF", "NaN", ".inf", "-inf", "12", "1.5", "1e16", "123456789012345678901234567890", "0.00001", "2024-01-15",
)  # fmt: skip


def compose_file(directory: Path, text: str, *overrides: str) -> RunConfig:
    (directory / "mine.yaml").write_text(f"defaults: [pretrain_small, _self_]\n{text}")
    source = find_source("pretrain_small", HOME, "mine", directory)
    return compose_typed(source, rewrite_overrides(source, overrides), RunConfig)[0]


def test_text_in_a_file(tmp_path: Path) -> None:
    listed = ", ".join(TEXTS)
    tags = ", ".join(f"{text}: {text}" for text in TEXTS)
    loggers = f"{{wandb_logger_kwargs: {{group: 010, tags: [{listed}]}}, mlflow_logger_kwargs: {{tags: {{{tags}}}}}}}"
    cfg = compose_file(tmp_path, f"name: 7e3\nexp_manager: {loggers}")
    assert (cfg.name, cfg.exp_manager.wandb_logger_kwargs.group) == ("7e3", "010")
    assert cfg.exp_manager.wandb_logger_kwargs.tags == list(TEXTS)
    assert cfg.exp_manager.mlflow_logger_kwargs.tags == {text: text for text in TEXTS}


def test_text_on_the_command_line() -> None:
    tags = {f"k{number}": text for number, text in enumerate(TEXTS)}
    overrides = [
        "desc=1e3",
        f"exp_manager.wandb_logger_kwargs={{group:1.10,tags:[{','.join(TEXTS)}]}}",
        f"exp_manager.mlflow_logger_kwargs.tags={{{','.join(f'{key}:{text}' for key, text in tags.items())}}}",
        "exp_manager.mlflow_logger_kwargs.tags.last=1_0",
    ]
    manager = (cfg := load("pretrain_small", overrides, HOME)).exp_manager
    assert (cfg.desc, manager.wandb_logger_kwargs.group) == ("1e3", "1.10")
    assert manager.wandb_logger_kwargs.tags == list(TEXTS)
    assert manager.mlflow_logger_kwargs.tags == tags | {"last": "1_0"}


def test_text_in_files_of_nemo_launcher(tmp_path: Path) -> None:
    lines = "".join(f"k{number}: {text}\nl{number}: [{text}]\n" for number, text in enumerate(TEXTS))
    (tmp_path / "config.yaml").write_text(lines)
    values = read_launcher_files(tmp_path, {})
    for number, text in enumerate(TEXTS):
        assert str(values[f"k{number}"]) == text
        assert [str(each) for each in values[f"l{number}"]] == [text]


def test_comma_in_a_value_of_a_map() -> None:
    cfg = load("pretrain_small", ["cluster.env_vars.NCCL_IB_HCA=mlx5_0,mlx5_1"], HOME)
    assert cfg.cluster.env_vars["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("trainer.max_steps", "1e3", 1000),
        ("trainer.max_steps", "1_000", 1000),
        ("trainer.max_steps", "+7", 7),
        ("model.optim.lr", "1e-3", 1e-3),
        ("model.optim.lr", ".5", 0.5),
        ("trainer.limit_val_batches", "1", 1),
        ("trainer.limit_val_batches", "1.", 1.0),
        ("trainer.limit_val_batches", "1.00", 1.0),
        ("do_testing", "yes", True),
        ("do_testing", "off", False),
        ("do_testing", "true", True),
        ("model.compile", "false", False),
        ("model.compile", "auto", "auto"),
        ("trainer.fast_dev_run", "true", True),
        ("trainer.fast_dev_run", "3", 3),
        ("trainer.precision", "32", "32"),
        ("desc", "null", None),
        ("exp_manager.summary_writer_kwargs", "{a: true, b: 3}", {"a": True, "b": 3}),
    ],
)
def test_numbers_and_booleans(key: str, written: str, expected: Any, tmp_path: Path) -> None:
    *groups, name = key.split(".")
    text = "".join(f"{'  ' * depth}{group}:\n" for depth, group in enumerate(groups))
    for cfg in (
        compose_file(tmp_path, f"{text}{'  ' * len(groups)}{name}: {written}\n"),
        load("pretrain_small", [f"{key}={written.replace(' ', '')}"], HOME),
    ):
        value: Any = cfg
        for part in key.split("."):
            value = getattr(value, part)
        assert value == expected
        assert type(value) is type(expected)


def test_a_saved_configuration_is_read_as_it_was(tmp_path: Path) -> None:
    keys = ["exp_manager.wandb_logger_kwargs.config={a:1e-05,b:010,c:True,d:1e3,e:2.5,f:x}", "desc=1e3", "name=010"]
    cfg = load("pretrain_small", keys, HOME)
    config = cfg.exp_manager.wandb_logger_kwargs.config
    assert config == {"a": 1e-5, "b": "010", "c": True, "d": "1e3", "e": 2.5, "f": "x"}
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(asdict(cfg)))
    assert compose_typed(find_source("pretrain_small", HOME, "saved", tmp_path), [], RunConfig)[0] == cfg


def test_a_time_is_no_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("trainer.max_steps is '1:30', expected int")):
        compose_file(tmp_path, "trainer: {max_steps: 1:30}")


def test_options_of_sbatch_may_be_text_or_booleans() -> None:
    cfg = load("pretrain_small", ["cluster=bcm", "cluster.additional_parameters={a:true,b:no,c:010,d:3}"], HOME)
    assert cfg.cluster.additional_parameters == {"a": True, "b": "no", "c": "010", "d": 3}


def test_runs_of_a_sweep_are_written_as_typed() -> None:
    source = find_source("pretrain_small", HOME)
    overrides = rewrite_overrides(source, ["model.optim.lr=1e-4,4e-4", "model.num_layers=range(1,3)"], sweep=True)
    assert expand_sweep(source, overrides)[-1] == ["++model.optim.lr=4e-4", "++model.num_layers=2"]


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\${a}", r"a\\${b}", "plain", r"back\slash"])
def test_escaped_interpolations_are_returned_unchanged(text: str) -> None:
    escaped = OmegaConf.create(escape_interpolations({"a": [text]}))
    assert OmegaConf.to_container(escaped, resolve=True) == {"a": [text]}
