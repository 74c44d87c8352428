# SPDX-License-Identifier: Apache-2.0
"""Command lines, each run in its own process."""

import os
import subprocess
import sys

import pytest

from bionemo.cli.help import PRETRAINING, help_text
from bionemo.common.launcher_environment import is_global_rank_zero
from bionemo.config.paths import CONF_DIR
from tests.conftest import EXAMPLES, ROOT

TASK = f"""
import atexit
import sys
from pathlib import Path
from bionemo.cli.command import run
from bionemo.common.errors import UserError

def write_heavy_modules(path=Path(__file__).with_name("heavy")):
    heavy = {{"torch", "lightning", "megatron", "nemo", "pytorch_lightning", "transformers"}} & set(sys.modules)
    path.write_text(" ".join(heavy))

atexit.register(write_heavy_modules)

def task(cfg):
    if cfg.name == "fails":
        raise UserError("the task\\nsays no")
    print("task", cfg.name, cfg.model.micro_batch_size, sys.argv[1:])

run(task, "pretrain_small", {str(EXAMPLES / "esm1nv" / "conf")!r})
"""


@pytest.fixture
def command(tmp_path):
    """Return a function that runs the task and returns (status, stdout, stderr).

    It checks that the command imports no module that takes seconds, and writes no files.
    """
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(TASK)
    here = tmp_path / "here"
    here.mkdir()

    def start(*arguments, **environment):
        clean = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "BIONEMO_HOME")
        }
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=here,
            env={**clean, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not list(here.iterdir())
        heavy = script.with_name("heavy")
        assert heavy.read_text() == ""
        heavy.unlink()
        return done.returncode, done.stdout, done.stderr

    start.directory = script.parent
    return start


def test_plain_run(command):
    status, out, err = command("model.micro_batch_size=3", "+model.onnx_safe=True")
    assert (status, out) == (0, "task esm1nv 3 ['model.micro_batch_size=3', '+model.onnx_safe=True']\n")
    assert err.startswith("note: keys of v1 without effect: model.onnx_safe (")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["model.hiden_size=3"],
        ["--config-name=pretrain_smal"],
        ["--config-path=nowhere"],
        ["--confg-name=pretrain_small"],
        ["--cfg", "jobb"],
        ["--resolve"],
        ["model.hiden_size=3", "--cfg", "job"],
        ["model.hiden_size=3", "--info", "defaults-tree"],
        ["-m", "model.micro_batch_size=1,x"],
        ["name=fails"],
        ["name"],
    ],
    ids=" ".join,
)
def test_mistake_is_reported_in_one_line(command, arguments):
    status, out, err = command(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_full_error_shows_the_traceback(command):
    status, _, err = command("model.hiden_size=3", HYDRA_FULL_ERROR="1")
    assert status == 1
    assert "Traceback" in err


@pytest.mark.parametrize(
    "environment", [{"RANK": "1"}, {"SLURM_PROCID": "3"}, {"LOCAL_RANK": "1"}, {"NODE_RANK": "1"}]
)
def test_only_rank_zero_prints(command, environment):
    assert command("model.hiden_size=3", **environment) == (1, "", "")


def test_help_lists_configs_groups_and_flags(command):
    status, out, err = command("--help")
    assert (status, err) == (0, "")
    for text in ("key=value", "pretrain_small", "esm2nv_650M", "uniref50_90", "--cfg job", "--info", "train.py"):
        assert text in out
    assert out.split("examples\n")[1].count("train.py") == 6
    assert "_encoder" not in out


def test_help_lists_the_configs_of_all_examples():
    directory = EXAMPLES / "protein/esm2nv/conf"
    text = help_text("bionemo pretrain", "pretrain_esm2_8M", directory, CONF_DIR, PRETRAINING)
    for part in ("protein/esm2nv", "pretrain_esm2_8M", "molecule/megamolbart", "pretrain_gpt3_mock", "gpt3/1.3b"):
        assert part in text
    assert "downstream_flip_scl" not in text


def test_cfg_job_prints_the_config(command):
    status, out, err = command("--cfg", "job", "--resolve", "--package", "model.data.dataset", "model.seed=1")
    assert (status, err) == (0, "")
    assert "train: x[000..049]" in out


def test_cfg_job_prints_a_config_that_lacks_values(command):
    status, out, err = command("--cfg", "job", "--package", "model.data", "model.data.dataset_path=???")
    assert (status, err) == (0, "")
    assert "dataset_path: ???" in out
    status, out, err = command("--cfg", "job", "model.data.dataset_path=???", "model.hidden_sise=3")
    assert (status, out) == (1, "")
    assert "model.hidden_sise" in err


@pytest.mark.parametrize(
    "arguments", [["--info", "searchpath"], ["--info", "defaults-tree"], ["--hydra-help"], ["--version"]]
)
def test_flags_that_hydra_answers(command, arguments):
    status, out, err = command(*arguments)
    assert (status, err) == (0, "")
    assert out


def test_shell_completion(command):
    assert "complete" in command("-sc", "install=bash")[1]
    assert "model.hidden_size=" in command("-sc", "query=bash", COMP_LINE="python train.py model.hidden_s")[1]


def test_sweep_runs_one_after_the_other(command):
    status, out, err = command("-m", "model.micro_batch_size=1,2", "model.data.dataset.train=x[000..001]")
    assert status == 0
    assert [line.split()[:3] for line in out.splitlines()] == [["task", "esm1nv", "1"], ["task", "esm1nv", "2"]]
    assert "'++model.micro_batch_size=2'" in out.splitlines()[1]  # Lightning starts this command again for other ranks
    assert [line.split()[:3] for line in err.splitlines()[2:]] == [
        ["run", "model.micro_batch_size", "result"], ["1", "1", "done"], ["2", "2", "done"],
    ]  # fmt: skip


def test_a_failed_run_does_not_end_a_sweep(command):
    status, out, err = command("-m", "name=first,fails,last")
    assert status == 1
    assert [line.split()[1] for line in out.splitlines()] == ["first", "last"]
    assert err.count("error: the task says no\n") == 1
    assert [line.split()[:3] for line in err.splitlines()[-3:]] == [
        ["1", "first", "done"], ["2", "fails", "failed"], ["3", "last", "done"],
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_of_a_sweep_have_different_directories(command):
    """The default directory, and one that is given, get directories named after the values."""
    for directory in ([], ["exp_manager.exp_dir=/x/y"]):
        status, out, err = command("-m", "model.optim.lr=1e-4,4e-4", *directory)
        found = [line.split()[-1] for line in err.splitlines()[-2:]]
        assert status == 0
        assert [name.rpartition("/")[2] for name in found] == ["model.optim.lr=1e-4", "model.optim.lr=4e-4"]
        assert f"explicit_log_dir='{found[1]}'" in out.splitlines()[1]
    status, _, err = command("-m", "model.optim.lr=1e-4,4e-4", "exp_manager.exp_dir=/x/${model.optim.lr}")
    assert [line.split()[-1] for line in err.splitlines()[-2:]] == ["/x/1e-4", "/x/4e-4"]


@pytest.mark.parametrize(
    ("override", "key"),
    [("model.optim.lr=1e-4,1e-4", "exp_dir"),
     ("exp_manager.checkpoint_callback_params.dirpath=/x model.optim.lr=1e-4,2e-4", "dirpath")],
)  # fmt: skip
def test_runs_that_share_a_directory_are_refused_before_the_first_one(command, override, key):
    status, out, err = command("-m", *override.split())
    assert (status, out) == (1, "")
    assert err.startswith("error: runs 1 and 2 have the same directory ")
    assert f"{key}, such as " in err


def test_a_directory_without_effect_is_refused(command):
    arguments = ["exp_manager.exp_dir=/new", "exp_manager.explicit_log_dir=/old"]
    assert command(*arguments)[0] == 0
    (command.directory / "saved.yaml").write_text(
        "defaults: [pretrain_small, _self_]\nexp_manager: {exp_dir: /old, explicit_log_dir: /old}\n"
    )
    status, out, err = command(f"--config-dir={command.directory}", "--config-name=saved", "exp_manager.exp_dir=/new")
    assert (status, out) == (1, "")
    assert err.startswith("error: exp_manager.exp_dir=/new has no effect")


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "0"}, True),
    ],
)
def test_rank_zero(monkeypatch, environment, first):
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_global_rank_zero() is first
