# SPDX-License-Identifier: Apache-2.0
"""User-visible behaviour of a run: command, console, files, and one line for every error."""

import gc
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import wandb
import yaml
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.distributed_c10d import _world

from bionemo.common.errors import UserError
from bionemo.config.compose import compose_typed
from bionemo.config.directories import log_directory
from bionemo.config.paths import find_source
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData
from bionemo.experiment import nemo
from bionemo.megatron.precision import cpu_has_bf16
from bionemo.training.progress import print_test_result
from tests.conftest import EXAMPLES, ROOT
from tests.support.runs import FAMILIES, config, logged, run, train, write_shards

SECRETS = {"WANDB_API_KEY": "0123456789secretkeyinenvironment01234567"}
PLANTED = "SECRET123"
INSTEAD_OF_FP16 = "bf16-mixed" if cpu_has_bf16() else "32"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards") / "uniref"
    write_shards(directory, files=10, rows=12)
    return directory


@dataclass
class Done:
    status: int
    console: list[str]
    directory: Path


SEED = """
--config-path=conf --config-name=pretrain_small do_training=True model.data.dataset_path={data}
++model.data.dataset.train=x_OP_000..009_CL_ ++model.data.dataset.val=x_OP_000..009_CL_
++model.data.dataset.test=x_OP_000..009_CL_ exp_manager.exp_dir={out} ++exp_manager.create_wandb_logger=True
++exp_manager.wandb_logger_kwargs.offline=True ++exp_manager.wandb_logger_kwargs.name=a_name ++trainer.devices=1
++trainer.num_nodes=1 model.validation.validation_enabled=False model.micro_batch_size=8 ++trainer.max_steps=20
++trainer.val_check_interval=10 model.data.num_workers=0 ++model.tensor_model_parallel_size=1
++trainer.accumulate_grad_batches=1 ++exp_manager.checkpoint_callback_params.always_save_nemo=False
"""  # a command of v1 users; only paths, steps and numbers of devices are changed


def start(overrides: list[str], directory: Path) -> Done:
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "pretrain.py", *overrides], cwd=EXAMPLES / "esm1nv", env=environment | SECRETS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout.splitlines(), directory)


@pytest.fixture(scope="module")
def seed_run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Run the command with a small model instead of 44 M parameters, the precision of v1, and a secret."""
    out = tmp_path_factory.mktemp("seed")
    small = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.seq_length=128"]
    small.append("trainer.precision=16-mixed")
    secret = [f"++exp_manager.wandb_logger_kwargs.config.api_key={PLANTED}", "trainer.log_every_n_steps=1"]
    return start([*SEED.format(data=shards, out=out).split(), *small, *secret], out)


def test_the_seed_command_runs(seed_run: Done) -> None:
    assert seed_run.status == 0, seed_run.console
    assert sorted(logged(seed_run.directory, "val_loss")) == [10, 20]


@pytest.mark.slow
def test_the_seed_command_runs_at_full_size(shards: Path, tmp_path: Path) -> None:
    done = start(SEED.format(data=shards, out=tmp_path).split(), tmp_path)
    assert done.status == 0, done.console
    assert any("43,612,544 parameters" in line for line in done.console)


def test_files_in_the_run_directory(seed_run: Done) -> None:
    for pattern in (
        "cmd-args.log", "events.out.tfevents.*", "hparams.yaml", "lightning_logs.txt", "nemo_error_log.txt",
        "nemo_log_globalrank-0_localrank-0.txt", "config.yaml", "run.json", "loss_curve.png",
        "checkpoints/*-last", "wandb/offline-run-*/*.wandb",
    ):  # fmt: skip
        assert len(list(seed_run.directory.glob(pattern))) == 1, pattern
    inside = subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode == 0
    git_info = (seed_run.directory / "git-info.log").read_text()
    assert re.fullmatch(r"bionemo [\d.]+\n(commit hash: [0-9a-f]{40}\n( ?[MARD]+ .*\n)*)?", git_info)
    assert ("commit hash" in git_info) == inside
    assert (seed_run.directory / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "x_OP_000..009_CL_" in (seed_run.directory / "cmd-args.log").read_text()
    log = (seed_run.directory / "nemo_log_globalrank-0_localrank-0.txt").read_text()
    assert "from the beginning" in log
    assert f"using {INSTEAD_OF_FP16}" in log  # printed before the file existed


def test_the_resolved_configuration_is_written(seed_run: Done) -> None:
    for name in ("config.yaml", "hparams.yaml"):
        written = yaml.safe_load((seed_run.directory / name).read_text())
        assert written["model"]["micro_batch_size"] == 8
        assert written["model"]["ffn_hidden_size"] == 128
        assert written["exp_manager"]["wandb_logger_kwargs"]["config"] == {"api_key": "***"}
    assert "${" not in (seed_run.directory / "hparams.yaml").read_text()


def test_a_saved_configuration_writes_to_another_directory(seed_run: Done, tmp_path: Path) -> None:
    overrides = [f"exp_manager.exp_dir={tmp_path}"]
    again, _ = compose_typed(find_source("config", seed_run.directory), overrides, RunConfig)
    same, _ = compose_typed(find_source("config", seed_run.directory), [], RunConfig)
    assert log_directory(again.exp_manager) == tmp_path
    assert log_directory(same.exp_manager) == seed_run.directory


def test_the_last_line_names_the_checkpoint_of_this_run(tmp_path: Path) -> None:
    """With `dirpath`, checkpoints are elsewhere, and another run may have written to the log directory."""
    short = ("trainer.max_steps=2", "trainer.val_check_interval=2")
    assert run(tmp_path / "run", *short)[0] == 0
    elsewhere = f"++exp_manager.checkpoint_callback_params.dirpath={tmp_path}/elsewhere"
    status, lines = run(tmp_path / "run", *short, elsewhere, "exp_manager.resume_if_exists=False")
    assert status == 0
    assert f"; the newest checkpoint is {tmp_path}/elsewhere/" in lines[-1]


def test_logged_metrics(seed_run: Done) -> None:
    (events,) = seed_run.directory.glob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload()
    every_step = {
        "reduced_train_loss", "lr", "grad_norm", "tokens_per_second", "consumed_samples", "train_step_timing in s",
        "global_step",
    }  # fmt: skip
    assert every_step | {"val_loss", "val_perplexity"} <= set(scalars.Tags()["scalars"])
    for tag in every_step:
        assert [event.step for event in scalars.Scalars(tag)] == list(range(1, 21)), tag
    assert logged(seed_run.directory, "lr")[20] == pytest.approx(2e-4 * 19 / 500)
    loss, perplexity = logged(seed_run.directory, "val_loss"), logged(seed_run.directory, "val_perplexity")
    assert perplexity[20] == pytest.approx(2.718281828 ** loss[20], rel=1e-5)


def test_no_secret_is_in_any_file(seed_run: Done) -> None:
    files = [path for path in seed_run.directory.rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        content = path.read_bytes()
        assert PLANTED.encode() not in content, path
        assert SECRETS["WANDB_API_KEY"].encode() not in content, path
    assert PLANTED not in "\n".join(seed_run.console)


def test_console_output(seed_run: Done) -> None:
    text = "\n".join(seed_run.console)
    for noise in ("Warning", "WARNING", "warn", "wandb:", "[NeMo", "Megatron", "rank_zero", "GPU available"):
        assert noise not in text, text
    assert len(seed_run.console) <= 20 + 2 + 4 + 2  # steps, validations, lines before and after them
    note = f"note: trainer.precision=16-mixed needs a GPU: using {INSTEAD_OF_FP16}"
    assert seed_run.console.count(note) == 1
    hint = "note: the run ends during the warm-up, at a low learning rate (trainer.max_steps=20, "
    assert sum(line.startswith(f"{hint}model.optim.sched.warmup_steps=500)") for line in seed_run.console) == 1
    assert "residue frequencies alone" in seed_run.console[-2]
    [newest] = (seed_run.directory / "checkpoints").glob("*-last")
    assert seed_run.console[-1] == (
        f"logs, checkpoints and the loss curve are in {seed_run.directory}; the newest checkpoint is "
        f"checkpoints/{newest.name}"
    )


def test_a_schedule_without_decay_is_noted(tmp_path: Path) -> None:
    keys = ("model.optim.sched.name=CosineAnnealing", "model.optim.sched.warmup_steps=2", "trainer.max_steps=4")
    for constant, is_noted in ((1, False), (2, True)):
        _, lines = run(tmp_path / str(constant), *keys, f"model.optim.sched.constant_steps={constant}")
        assert any("leave no decay in 4 steps" in line for line in lines) == is_noted, lines


HEADER = "record_id,record_name,sequence_length,sequence\n"
ROW = "0,a,8,MKTAYIAK\n"


def broken(shards: Path, content: bytes | None) -> list[str]:
    if content is not None:
        (shards / "train").mkdir(parents=True)
        (shards / "train" / "x000.csv").write_bytes(content)
        (shards / "val").mkdir()
        (shards / "val" / "x000.csv").write_text(HEADER + ROW)
    return [f"model.data.dataset_path={shards}", "++model.data.dataset.train=x000", "++model.data.dataset.val=x000"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "x000.csv"),
        (b"", "x000.csv"),
        (HEADER.encode(), "x000.csv"),
        ((HEADER + ROW + "1,b,8,MK\n2,c\n" + ROW).encode(), "x000.csv:4: 2 columns"),
        ((HEADER + ROW + "1,b").encode(), "x000.csv:3: the file ends inside"),
        (HEADER.encode() + ROW.encode() + b"1,b,8,MK\xff\xfeTAYIA\n", "x000.csv"),
    ],
    ids=["missing", "empty", "header-only", "few columns", "truncated", "not utf-8"],
)
def test_invalid_data_is_one_line_and_creates_no_directory(
    tmp_path: Path, content: bytes | None, expected: str
) -> None:
    status, lines = run(tmp_path / "run", *broken(tmp_path / "shards", content), model="esm1nv")
    assert (status, len(lines)) == (1, 1), lines
    assert lines[0].startswith("error: ")
    assert expected in lines[0], lines
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.data.mask_percent=0.9", "is 1.1, expected 1"),
        ("model.global_batch_size=7", "model.global_batch_size is 7, not a multiple of 4: the"),
        ("trainer.accelerator=gpu", "this machine has no GPU; use auto or cpu"),
        ("trainer.devices=[0]", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
        ("+model.tensor_model_parallel_size=2 trainer.devices=3", "trainer.num_nodes=3 is not divisible by"),
        ("model.tensor_model_parallel_size=2 trainer.devices=auto trainer.accelerator=auto", "num_nodes=1 is not div"),
        ("model.global_batch_size=5 trainer.devices=auto trainer.accelerator=auto", "5, not a multiple of 4"),
        ("model.activations_checkpoint_granularity=full", "full needs a method, uniform or block"),
        ("+trainer.deterministic=True trainer.benchmark=True", "chooses algorithms by timing"),
        ("+exp_manager.ema.enable=True", "exp_manager.ema.enable is True, which is not supported: set it to False"),
        ("model.data.max_seq_length=32", "model.data.max_seq_length is 32, but model.seq_length="),
        ("+exp_manager.create_clearml_logger=True", "the package clearml cannot be imported"),
        ("+trainer.barebones=True", "trainer.barebones is True, which is not supported: set it to False"),
        ("+trainer.overfit_batches=2", "trainer.overfit_batches is 2, which is not supported: set it to 0"),
        ("exp_manager.exp_dir=/proc/nowhere", "/proc/nowhere cannot be written"),
        ("exp_manager.exp_dir=/dev/null/x", "/dev/null/x cannot be written"),
        ("+trainer.limit_train_batches=0.5", "limit_train_batches is 0.5, expected a number of batches"),
        ("+model.rampup_batch_size=[8,8,100]", "model.rampup_batch_size is [8, 8, 100], which is not supported"),
        ("trainer.max_time=soon", "max_time"),
        ("model.optim.sched.name=NoamAnnealing", "model.optim.sched.d_model is not set"),
    ],
    ids=lambda value: value.split("=")[0],
)
def test_mistakes_are_one_line(tmp_path: Path, override: str, expected: str) -> None:
    status, lines = run(tmp_path / "run", *override.replace("+", "++").split())
    errors = [line for line in lines if line.startswith("error: ")]
    assert status == 1, lines
    assert errors == lines[-1:], lines
    assert expected in errors[0]
    late = ("clearml",)  # detected when Lightning or NeMo starts
    if not any(key in override for key in late):
        assert not (tmp_path / "run").exists()


def test_shipped_configurations_for_several_gpus_compose() -> None:
    done = subprocess.run(
        [sys.executable, "pretrain.py", "--config-name=pretrain_esm2_3B", "--cfg", "job"],
        cwd=EXAMPLES / "esm2nv", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "tensor_model_parallel_size: 2" in done.stdout


def test_keys_without_effect_are_noted_once(tmp_path: Path) -> None:
    params = "++exp_manager.checkpoint_callback_params"
    overrides = (f"{params}.every_n_epochs=1", f"{params}.save_last=False", "model.data.dataloader_type=cyclic")
    status, lines = run(tmp_path / "run", *overrides, "trainer.max_steps=1")
    assert status == 0
    (noted,) = [line for line in lines if "keys of v1 without effect" in line]
    assert all(key in noted for key in ("params.every_n_epochs", "params.save_last", "model.data.dataloader_type"))


def test_unknown_letters_are_counted_and_noted_once(tmp_path: Path) -> None:
    text = HEADER + "0,a,9,MKTAY?IAK\n1,b,9,MK*TAYIA*\n" + ROW
    overrides = broken(tmp_path / "shards", text.encode())
    status, lines = run(tmp_path / "run", *overrides, "trainer.max_steps=3", model="esm1nv")
    assert status == 0, lines
    (note,) = [line for line in lines if "letters unknown to the model" in line]
    assert note.startswith("note: train data: ") and "'*' 1" in note and "'?' 1" in note


def test_crlf_and_quotes_change_nothing(tmp_path: Path) -> None:
    plain = HEADER + ROW + "1,b,10,GSHMLEDPVA\n"
    variants = {"plain": plain, "crlf": plain.replace("\n", "\r\n"), "quoted": plain.replace("MKTAYIAK", '"MKTAYIAK"')}
    for name, text in variants.items():
        overrides = broken(tmp_path / f"shards-{name}", text.encode())
        train(config(tmp_path / name, *overrides, "trainer.max_steps=3", model="esm1nv"))
    losses = [logged(tmp_path / name, "reduced_train_loss") for name in variants]
    assert losses[0] == losses[1] == losses[2]


def test_a_validation_set_smaller_than_a_batch_is_evaluated_completely(tmp_path: Path) -> None:
    """With and without padding rows the same few sequences have the same loss."""
    overrides = ("model.data.mock.num_validation_sequences=3", "trainer.max_steps=2", "trainer.val_check_interval=1")
    train(config(tmp_path / "one", *overrides, "model.micro_batch_size=1"))
    train(config(tmp_path / "wide", *overrides, "model.micro_batch_size=1", "trainer.limit_val_batches=50"))
    assert logged(tmp_path / "one", "val_loss") == logged(tmp_path / "wide", "val_loss")
    train(config(tmp_path / "large", "model.micro_batch_size=64", *overrides))
    assert list(logged(tmp_path / "large", "val_loss")) == [1, 2]


def test_the_test_set_is_evaluated_if_configured(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "do_testing=True", "trainer.max_steps=2")
    loss = logged(tmp_path, "test_loss")[2]
    assert lines[-1].startswith(f"test loss {loss:.4f}, test perplexity ")
    _, again = run(tmp_path, "do_training=False", "do_testing=True", "trainer.max_steps=2")
    assert again[-1] == lines[-1]
    _, none = run(
        tmp_path, "do_training=False", "do_testing=True", "trainer.max_steps=2", "trainer.limit_test_batches=0"
    )
    assert not any("test loss" in line for line in none)


def test_testing_needs_no_training_data(tmp_path: Path) -> None:
    shards, keys = tmp_path / "shards", ("train", "val", "test")
    for name in keys:
        (shards / name).mkdir(parents=True)
        (shards / name / "x000.csv").write_text(HEADER + ROW * 8)
    overrides = (f"model.data.dataset_path={shards}", "model.data.data_impl=csv_fields_mmap", "trainer.max_steps=2",
                 *(f"model.data.dataset.{name}=x000" for name in keys))  # fmt: skip
    status, lines = run(tmp_path / "run", *overrides, "do_testing=True", model="esm1nv")
    assert status == 0, lines
    for name in keys[:2]:
        (shards / name / "x000.csv").unlink()
    status, again = run(tmp_path / "run", *overrides, "do_training=False", "do_testing=True", model="esm1nv")
    assert (status, again[-1]) == (0, lines[-1]), again


def test_output_without_progress(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "++trainer.enable_progress_bar=False", "trainer.max_steps=2")
    assert status == 0 and not any(line.startswith("step 1 of 2  loss") for line in lines)
    assert len(logged(tmp_path, "reduced_train_loss")) == 2


def test_the_test_result_of_a_model_without_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of a labelled task, for example, is not a cross-entropy of tokens."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.callback_metrics["test_loss"] = torch.tensor(0.25)
    print_test_result(trainer)
    assert capsys.readouterr().err.splitlines()[-1] == "test loss 0.2500"


def test_without_training_the_test_set_is_not_evaluated(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"do_testing=True without do_training: there is no checkpoint in .* to test"):
        train(config(tmp_path, "do_training=False", "do_testing=True"))


def test_an_error_in_the_test_data_ends_the_run_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SequenceData.dataset

    def dataset(self: SequenceData, name: Any) -> Any:
        if name == "test":
            raise UserError("x000.csv is damaged")
        return original(self, name)

    monkeypatch.setattr(SequenceData, "dataset", dataset)
    with pytest.raises(UserError, match=r"x000\.csv is damaged"):
        train(config(tmp_path / "run", "do_testing=True"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("launcher", [False, True], ids=["local", "launcher"])
def test_several_runs_in_one_process(tmp_path: Path, launcher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves neither threads nor open files, and later ones do not write into its logs."""
    process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if launcher:
        for name, value in (process | {"MASTER_PORT": str(find_free_network_port())}).items():
            monkeypatch.setenv(name, value)
    counts, logs = [], {}
    for number in range(3):
        train(config(tmp_path / str(number), "trainer.max_steps=1"))
        assert dist.is_initialized() == launcher
        assert len(_world.pg_map) == launcher
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
        logs |= {path: path.read_text() for path in (tmp_path / str(number)).glob("*.txt")}
    assert np.ptp(counts[1:], axis=0).max() < 10  # a group has more threads
    assert len(logs) >= 9
    assert {path: path.read_text() for path in logs} == logs
    assert logging.getLogger("nemo_logger").handlers.count(nemo._NO_OUTPUT) == 1
    assert bool({"LOCAL_RANK", "MASTER_PORT"} & os.environ.keys()) == launcher
    if launcher:
        dist.destroy_process_group()


@pytest.mark.parametrize("error", [None, SystemExit(143), UserError("a mistake")])
def test_an_error_of_wandb_does_not_replace_the_result(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def finish(exit_code: int) -> None:
        assert exit_code == (error is not None)
        raise TimeoutError("no answer")

    monkeypatch.setattr(wandb, "finish", finish)
    with nullcontext() if error is None else pytest.raises(type(error)), nemo.closed_logs():
        monkeypatch.setattr(wandb, "run", object())
        if error is not None:
            raise error
    assert "cannot be finished (no answer)" in caplog.text


def test_a_run_of_epochs(tmp_path: Path) -> None:
    """Sixty sequences once, at most two per step; no note about a missing max_steps."""
    overrides = ("trainer.max_epochs=1", "trainer.max_steps=-1", "model.optim.sched.max_steps=100")
    _, lines = run(tmp_path, *overrides, "trainer.val_check_interval=1.0", "model.data.mock.num_sequences=60")
    steps = list(logged(tmp_path, "reduced_train_loss"))
    assert steps == list(range(1, len(steps) + 1))
    assert logged(tmp_path, "consumed_samples")[len(steps)] == 60
    assert list(logged(tmp_path, "val_loss")) == [len(steps)]
    assert any(line.startswith(f"step {len(steps)}, validation loss") for line in lines)
    assert not any("of -1" in line or " left" in line for line in lines)


@pytest.mark.parametrize("model", FAMILIES)
def test_the_loss_falls(tmp_path: Path, model: str) -> None:
    """In twenty steps it falls from the log of the vocabulary size most of the way to the unigram entropy."""
    overrides = [
        "trainer.max_steps=20",
        "trainer.val_check_interval=20",
        "model.optim.lr=0.02",
        "model.seq_length=128",
    ]
    overrides += ["model.optim.sched.warmup_steps=5", "model.optim.sched.min_lr=1e-3", "model.micro_batch_size=8"]
    overrides += {  # one schedule has a warm-up ratio, one a rate multiplier
        "prott5nv": ["model.data.seq_length_dec=64", "model.optim.sched.warmup_ratio=null"],
        "megamolbart": ["model.optim.lr=0.3"],
    }.get(model, [])
    train(config(tmp_path, *overrides, model=model))
    losses = logged(tmp_path, "reduced_train_loss")
    start, reached = {"prott5nv": (4.6, 3.0), "megamolbart": (5.9, 4.0), "gpt3": (5.7, 5.0)}.get(model, (3.3, 3.0))
    assert losses[1] > start
    assert losses[20] < losses[10] < losses[1] - 0.3
    assert logged(tmp_path, "val_loss")[20] < reached
