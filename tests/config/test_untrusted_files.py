# SPDX-License-Identifier: Apache-2.0
"""An untrusted configuration file runs no code, sends no credentials and cannot exhaust the machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bionemo.common.errors import UserError
from bionemo.config.compose import compose_typed, rewrite_overrides
from bionemo.config.interpolations import escape_interpolations
from bionemo.config.paths import CONF_DIR, find_source
from bionemo.config.schema import RunConfig
from tests.conftest import EXAMPLES, ROOT

HOME = EXAMPLES / "esm1nv" / "conf"
BASE = "defaults: [pretrain_small, _self_]\n"


def compose(directory: Path, text: str, *overrides: str, trusted: bool = False) -> RunConfig:
    """Compose a user's file."""
    (directory / "theirs.yaml").write_text(text)
    source = find_source("pretrain_small", HOME, "theirs", directory, trusted=trusted)
    return compose_typed(source, rewrite_overrides(source, overrides))[0]


def error_message(directory: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(directory, text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WANDB = "exp_manager.wandb_logger_kwargs.settings"
PROTECTED = {
    f"{WANDB}.base_url": "exp_manager: {wandb_logger_kwargs: {settings: {base_url: x}}}",
    "exp_manager.mlflow_logger_kwargs.tracking_uri": "exp_manager: {mlflow_logger_kwargs: {tracking_uri: x}}",
    "exp_manager.neptune_logger_kwargs.proxies.https": "exp_manager: {neptune_logger_kwargs: {proxies: {https: x}}}",
    "exp_manager.files_to_copy": "exp_manager: {files_to_copy: [x]}",
    "cluster.env_vars.PYTHONPATH": "cluster: {env_vars: {PYTHONPATH: x}}",
    "cluster.env_vars.LD_PRELOAD": "cluster: {env_vars: {LD_PRELOAD: x}}",
    "cluster.env_vars.WANDB_BASE_URL": "cluster: {env_vars: {WANDB_BASE_URL: x}}",
    "cluster.env_vars.NCCL_NET_PLUGIN": "cluster: {env_vars: {NCCL_NET_PLUGIN: x}}",
    "hydra.callbacks.x._target_": "hydra: {callbacks: {x: {_target_: os.system}}}",
    "hydra.job_logging.handlers.x.()": "hydra: {job_logging: {handlers: {x: {(): os.system}}}}",
}


@pytest.mark.parametrize("key", PROTECTED)
def test_protected_keys_count_only_on_the_command_line(key: str, tmp_path: Path) -> None:
    message = error_message(tmp_path, BASE + PROTECTED[key])
    for part in (str(tmp_path / "theirs.yaml"), key, f"{key}=...", "--trust-config"):
        assert part in message
    compose(tmp_path, BASE + PROTECTED[key].replace("LD_PRELOAD", "OMP_NUM_THREADS"), trusted=True)


def test_command_line_replaces_the_value_of_the_file(tmp_path: Path) -> None:
    key = "exp_manager.wandb_logger_kwargs.settings.base_url"
    cfg = compose(tmp_path, BASE + PROTECTED[key], f"++{key}=https://mine")
    assert cfg.exp_manager.wandb_logger_kwargs.settings == {"base_url": "https://mine"}
    override = "exp_manager.wandb_logger_kwargs.settings={console: off}"
    assert key in error_message(tmp_path, BASE + PROTECTED[key], override)


def test_an_interpolation_instead_of_a_group_is_rejected(tmp_path: Path) -> None:
    text = "exp_manager: {summary_writer_kwargs: {settings: {a: b}}, wandb_logger_kwargs: '${.summary_writer_kwargs}'}"
    assert "exp_manager.wandb_logger_kwargs" in error_message(tmp_path, BASE + text)


def test_a_file_of_a_group_is_checked_and_a_copy_of_ours_passes(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    mine, text = tmp_path / "cluster" / "mine.yaml", (CONF_DIR / "cluster" / "bcm.yaml").read_text()
    base = "defaults: [pretrain_small, {override /cluster: mine}, _self_]\n"
    mine.write_text(text.replace("partition: null", "partition: gpu") + "\n")
    assert compose(tmp_path, base).cluster.partition == "gpu"
    mine.write_text(text.replace("--no-container-mount-home", "--export=ALL"))
    message = error_message(tmp_path, base)
    assert str(mine) in message and "cluster.srun_args" in message


def test_keys_that_a_file_may_set(tmp_path: Path) -> None:
    text = "cluster: {env_vars: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: '2'}}\nhydra: {run: {dir: x}}\n"
    cfg = compose(tmp_path, BASE + text + "exp_manager: {wandb_logger_kwargs: {project: p, entity: e}}\n")
    assert cfg.cluster.env_vars == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_search_path_of_a_file_may_contain_only_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "evil_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(package.parent)
    message = error_message(tmp_path, BASE + "hydra: {searchpath: ['pkg://evil_package']}\n")
    assert "hydra.searchpath" in message and not (tmp_path / "canary").exists()
    assert "pkg://" in error_message(tmp_path, BASE + "name: pk\nhydra: {searchpath: ['${name}g://evil_package']}\n")
    (tmp_path / "more" / "data").mkdir(parents=True)
    (tmp_path / "more" / "data" / "ours.yaml").write_text("defaults: [mock, _self_]\npacking_window: 7\n")
    monkeypatch.setenv("BIONEMO_HOME", str(tmp_path))
    for entry in ("${oc.env:BIONEMO_HOME}/more", "file://${oc.env:BIONEMO_HOME}/more"):  # like files of v1
        text = "defaults: [pretrain_small, {override /data@model.data: ours}, _self_]\n"
        assert compose(tmp_path, f"{text}hydra: {{searchpath: ['{entry}']}}\n").model.data.packing_window == 7


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("${oc.env:WANDB_API_KEY}", "may not read the secret WANDB_API_KEY"),
        ("${oc.env:HOME,${oc.env:WANDB_API_KEY}}", "may not read the secret WANDB_API_KEY"),
        ("${oc.env:${desc}}", "the name of an environment variable"),
        ("${oc.decode:1}", "may use oc.env, multiply, sum, now, not oc.decode"),
        ("${model.${desc}}", "may not compute the name of a key"),
        (r"\${oc.env:WANDB_API_KEY}", r"\${ is not allowed"),  # it would be resolved when parsed again
        ("${multiply:[1],300000000}", "multiply takes numbers"),
        ("${multiply:true,3}", "multiply takes numbers"),
        ("${multiply:ab,3}", "multiply takes numbers"),
        ("${sum:[1],[2]}", "sum takes numbers"),
        ("${multiply:1e17,1e17}", "expected at most"),
        ("${name}", "Recursive interpolation"),
    ],
)
def test_interpolations_in_a_file(text: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    message = error_message(tmp_path, f"{BASE}name: '{text}'\n")
    assert part in message and "canary" not in message


def test_interpolations_of_v1_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIONEMO_HOME", "/home/bionemo")
    text = "desc: ${oc.env:BIONEMO_HOME}-${now:%y}\nmodel: {ffn_hidden_size: '${multiply:${.hidden_size}, 2}'}\n"
    cfg = compose(tmp_path, BASE + text)
    assert cfg.desc.startswith("/home/bionemo-") and cfg.model.ffn_hidden_size == 1536


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
BOMBS = {
    LAUGHS: "more than 5000 values",
    "a: &a [*a]\n": "*a contains itself",
    "a: " + "[" * 100_000: "nested more than 50 levels",
    "a: " + "x" * 300_000: "300003 bytes",
    BASE + "".join(f"k{n}: ${{k{n + 1}}}${{k{n + 1}}}\n" for n in range(60)) + "k60: x\nname: ${k0}\n": "lookups",
    BASE + "".join(f"k{n}: ${{k{n + 1}}}\n" for n in range(1000)) + "k1000: x\nname: ${k0}\n": "too deeply",
    BASE + "name: '" + "${a" * 2000 + "'\n": "at most 1000 characters",
}


@pytest.mark.parametrize("text", BOMBS, ids=BOMBS.values())
def test_a_file_that_would_exhaust_the_machine(text: str, tmp_path: Path) -> None:
    before = time.process_time()
    assert BOMBS[text] in error_message(tmp_path, text)
    assert time.process_time() - before < 10


def test_plugins_are_not_imported_from_the_working_directory(tmp_path: Path) -> None:
    plugin = tmp_path / "hydra_plugins" / "evil"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    command = [sys.executable, "-m", "bionemo.pretrain", "--cfg", "job", "--package", "name"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "esm2-8M\n"), done.stderr
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\${a}", r"a\\${b}", "plain", r"back\slash"])
def test_escaped_interpolations_are_returned_unchanged(text: str) -> None:
    assert OmegaConf.to_container(OmegaConf.create(escape_interpolations({"a": [text]})), resolve=True) == {
        "a": [text]
    }
