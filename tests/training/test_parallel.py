# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks equals training in one process with the same global batch."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from bionemo.checkpoint import Checkpoint
from tests.conftest import EXAMPLES
from tests.support.runs import FAMILIES, config, last_checkpoint, logged, run, run_on_ranks, tiny, train

NAME_OF_LOG = "nemo_log_globalrank-0_localrank-0.txt"
KEYS = ("reduced_train_loss", "grad_norm", "lr", "consumed_samples")
RATE = 4e-4  # the maximum in these runs
LAYOUTS = {
    "TP=2": (2, ["model.tensor_model_parallel_size=2", "trainer.accumulate_grad_batches=2"]),
    "PP=2": (2, ["model.pipeline_model_parallel_size=2", "trainer.accumulate_grad_batches=2"]),
    "TP=2 + SP": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=True",
                      "trainer.accumulate_grad_batches=2"]),
    "DP=2": (2, []),
    "DP=2, sharded": (2, ["model.optim.name=distributed_fused_adam"]),
    "TP=2 x DP=2": (4, ["model.tensor_model_parallel_size=2"]),
    "TP=2 x PP=2 + SP": (4, ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2",
                             "model.sequence_parallel=True", "trainer.accumulate_grad_batches=2"]),
    "PP=2 x DP=2, sharded": (4, ["model.pipeline_model_parallel_size=2", "model.optim.name=distributed_fused_adam"]),
    "accumulation 4": (1, ["model.micro_batch_size=2", "trainer.accumulate_grad_batches=4"]),
    "one micro-batch": (1, ["model.micro_batch_size=8", "trainer.accumulate_grad_batches=1"]),
}  # fmt: skip


def same_run(one: Path, other: Path, steps: int = 8, every: int = 4) -> None:
    """Check losses and norms within 1e-6, weights up to rounding enlarged by Adam, and counters exactly."""
    for key in KEYS:
        found, expected = logged(one, key), logged(other, key)
        assert list(found) == list(expected) == list(range(1, steps + 1))
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6), key
    assert list(logged(one, "val_loss")) == list(range(every, steps + 1, every))
    assert list(logged(one, "val_loss").values()) == pytest.approx(list(logged(other, "val_loss").values()), rel=1e-6)
    found, expected = weights_of(one, steps), weights_of(other, steps)
    assert found.keys() == expected.keys()
    for name in expected:
        # Adam normalizes by the root mean square: if a gradient is rounding noise, so is the sign of the update
        largest = 1e-6 * expected[name].abs().max() + steps * RATE * 1e-3
        assert (found[name] - expected[name]).abs().max() < largest, name


def weights_of(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all weights in the last checkpoint of a run, for any layout."""
    saved = Checkpoint(last_checkpoint(directory))
    assert saved.manifest["step"] == saved.state["global_step"] == step
    return {name: saved.read(f"weights/{name}") for name in saved.shapes("weights")}


def console_of_rank_0(consoles: list[tuple[int, list[str]]]) -> list[str]:
    """Check that all ranks succeeded and that only rank 0 printed; return its lines."""
    assert [status for status, _ in consoles] == [0] * len(consoles), consoles
    assert all(lines == [] for _, lines in consoles[1:])
    return consoles[0][1]


TWENTY = ("trainer.max_steps=20", "trainer.val_check_interval=10")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Train each model once for 20 steps in one process, with two micro-batches per step."""

    @cache
    def directory(model: str) -> Path:
        path = tmp_path_factory.mktemp(model) / "single"
        train(config(path, *TWENTY, "trainer.accumulate_grad_batches=2", model=model))
        return path

    return directory


ALWAYS: dict[str, set[str]] = {  # always run; the others are marked slow
    "esm1nv": set(),
    "esm2nv": {"TP=2 x PP=2 + SP", "DP=2, sharded", "accumulation 4"},
    "prott5nv": set(),
    "megamolbart": set(),
    "gpt3": {"PP=2"},
}
UNDIVIDED = ("prott5nv", "megamolbart")  # encoder-decoders do not support pipeline parallelism
CASES = [
    pytest.param(layout, model, id=f"{model}-{layout}", marks=[] if layout in ALWAYS[model] else pytest.mark.slow)
    for model in FAMILIES
    for layout in LAYOUTS
    if not (model in UNDIVIDED and "PP" in layout)
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_every_layout_equals_a_single_process(
    tmp_path: Path, single: Callable[[str], Path], layout: str, model: str
) -> None:
    """Also with dropout: its masks depend on the tokens, not on the process or the micro-batch."""
    ranks, overrides = LAYOUTS[layout]
    lines = console_of_rank_0(run_on_ranks(tmp_path / "run", *TWENTY, *overrides, ranks=ranks, model=model))
    same_run(tmp_path / "run", single(model), steps=20, every=10)
    (start,) = [line for line in lines if "from the beginning" in line]
    ((expected,),) = [re.findall(r"[\d,]+ parameters", (single(model) / NAME_OF_LOG).read_text())]
    assert expected in start
    assert sum("val_loss" in line and "checkpoints/" not in line for line in lines) == 2
    assert all((tmp_path / "run" / NAME_OF_LOG.replace("0", str(rank))).exists() for rank in range(ranks))


def test_resuming_with_another_number_of_ranks(tmp_path: Path) -> None:
    stops = ("trainer.max_steps=4", "model.optim.sched.max_steps=8")
    console_of_rank_0(run_on_ranks(tmp_path / "run", *stops, ranks=2))
    train(config(tmp_path / "run", "trainer.accumulate_grad_batches=2"))
    train(config(tmp_path / "whole", "trainer.accumulate_grad_batches=2"))
    same_run(tmp_path / "run", tmp_path / "whole")


def pretrain_esm2(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, "pretrain.py", *arguments], cwd=EXAMPLES / "esm2nv",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=600,
    )  # fmt: skip


TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["local", "torchrun"])
def test_a_sweep_on_several_devices(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Each run starts its processes, or all use those of the launcher; the result is that of a run alone."""
    words = ("trainer.devices=2", "trainer.max_steps=2", "trainer.val_check_interval=2")
    directory = f"exp_manager.explicit_log_dir={tmp_path}/${{model.optim.lr}}"
    wandb = ("exp_manager.create_wandb_logger=True", "exp_manager.wandb_logger_kwargs.offline=True")
    done = pretrain_esm2("-m", *tiny(*words, *wandb, "model.optim.lr=1e-3,2e-3"), directory, launcher=launcher)
    assert done.returncode == 0, done.stdout
    for name in ("1e-3", "2e-3"):  # as written
        assert len(list((tmp_path / name).glob("wandb/offline-run-*/*.wandb"))) == 1
    assert run(tmp_path / "alone", *words, "model.optim.lr=2e-3")[0] == 0
    assert weights_equal(tmp_path / "2e-3", tmp_path / "alone")
    assert not weights_equal(tmp_path / "1e-3", tmp_path / "alone")


def weights_equal(one: Path, other: Path) -> bool:
    first, second = weights_of(one, 2), weights_of(other, 2)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_one_command_starts_all_devices(tmp_path: Path) -> None:
    """Lightning starts the second process with the same arguments; the console output is that of one run."""
    overrides = tiny(f"exp_manager.exp_dir={tmp_path}", "trainer.devices=2")
    done = pretrain_esm2(*overrides)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines
    assert sum(" on 2 x cpu" in line for line in lines) == 1
    assert len([line for line in lines if line.startswith("step ")]) == 8 + 2 + 1
    assert len(lines) == len(set(lines))
    assert not re.search("warning|Warning", done.stdout)


def test_a_user_error_is_printed_once_and_ends_every_rank(tmp_path: Path) -> None:
    consoles = run_on_ranks(tmp_path / "run", "trainer.max_time=soon", ranks=2)
    assert [status for status, _ in consoles] == [1, 1]
    assert [len(lines) for _, lines in consoles] == [1, 0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_weights_of_other_shapes_are_reported_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert run(directory, "trainer.max_steps=1")[0] == 0
    ended_by_one_line(run_on_ranks(directory, "model.hidden_size=64", ranks=2), "belong to another model")


def test_an_error_of_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 cannot save: the other rank does not wait for it, and one line gives the reason."""
    consoles = run_on_ranks(tmp_path / "run", ranks=2, LARGEST_FILE="60000")
    ended_by_one_line(consoles, "could not be written (")
    assert list((tmp_path / "run" / "checkpoints").glob("*")) == []


def ended_by_one_line(consoles: list[tuple[int, list[str]]], expected: str) -> None:
    """Check that only the rank that failed first printed the error."""
    assert [status for status, _ in consoles] == [1, 1]
    (error,) = [line for _, lines in consoles for line in lines if line.startswith("error: ")]
    assert expected in error
    assert consoles[1][1] in ([], [error])
    assert not any("Traceback" in line for line in consoles[0][1])
