# SPDX-License-Identifier: Apache-2.0
"""Complete training runs, small enough for a test."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from bionemo.checkpoint import Checkpoint, check, load_manifest
from bionemo.checkpoint.json_state import encode
from bionemo.cli.finetune import main as fine_tune
from bionemo.cli.pretrain import main, pretrain
from bionemo.config.compose import load
from bionemo.config.schema import RunConfig
from bionemo.training.health import HealthMonitor
from bionemo.training.loss_curve import LossCurve
from bionemo.training.module import TrainingModule
from tests.conftest import EXAMPLES, ROOT
from tests.support.bpe import TEXTS, write_bpe
from tests.support.molecules import MOLECULES

TINY = [
    "model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.micro_batch_size=4",
    "model.seq_length=64", "model.data.num_workers=0", "trainer.max_steps=8", "trainer.val_check_interval=4",
    "trainer.log_every_n_steps=1", "trainer.precision=32", "trainer.accelerator=cpu",
    "trainer.num_sanity_val_steps=0", "exp_manager.create_wandb_logger=False",
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
    "exp_manager.checkpoint_callback_params.always_save_nemo=False",
]  # fmt: skip
MOCK = [
    "data@model.data=mock", "model.data.mock.num_sequences=300", "model.data.mock.num_validation_sequences=20",
    "model.data.mock.min_length=20", "model.data.mock.max_length=90",
]  # fmt: skip
SPANS = ["model.data.seq_length_dec=32"]


def _kept(name: str, content: str, write: Callable[[Path], object]) -> Path:
    """Return a directory shared by all processes, written by the first that needs it and named after its content."""
    place = Path(tempfile.gettempdir()) / f"bionemo-tests-{os.getuid()}" / f"{name}-{zlib.crc32(content.encode()):08x}"
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        written = Path(tempfile.mkdtemp(dir=place.parent))
        write(written)
        with suppress(OSError):  # another process was faster
            written.rename(place)
        shutil.rmtree(written, ignore_errors=True)
    return place


def _molecules() -> Path:
    """Return a directory with shards of molecules."""
    content = "zinc_id,smiles\n" + "".join(f"{number},{text}\n" for number, text in enumerate(MOLECULES))
    shards = {"train": content, "val": content[: content.index("\n6,") + 1]}

    def write(place: Path) -> None:
        for split, lines in shards.items():
            (place / split).mkdir()
            (place / split / "x000.csv").write_text(lines)

    return _kept("molecules", str(shards), write)


VOCABULARY = _kept("words", "".join(TEXTS), write_bpe)  # 400 tokens; GPT-2's vocabulary would be 100 times slower
TEXT = ["data@model.data=mock_text", "model.data.mock.num_samples=300", "model.data.mock.num_validation_samples=8",
        "trainer.num_nodes=1", "trainer.devices=1", "trainer.max_time=null", "model.global_batch_size=null",
        "model.optim.sched.constant_steps=0", "trainer.accumulate_grad_batches=1",
        f"model.tokenizer.vocab_file={VOCABULARY}/vocab.json",
        f"model.tokenizer.merge_file={VOCABULARY}/merges.txt"]  # fmt: skip
SMILES = ["model.data.dataset.train=x000", "model.data.dataset.val=x000", "trainer.num_nodes=1", "trainer.devices=1",
          "model.optim.lr=0.05", f"model.data.dataset_path={_molecules()}"]  # fmt: skip


class Example(NamedTuple):
    """Pretraining command of a model family."""

    directory: Path  # directory of its example
    name: str  # name of the configuration
    overrides: list[str]  # overrides that make its data tiny


FAMILIES = {
    "esm2nv": Example(EXAMPLES / "esm2nv", "pretrain_esm2_8M", MOCK),
    "esm1nv": Example(EXAMPLES / "esm1nv", "pretrain_small", MOCK),
    "prott5nv": Example(EXAMPLES / "prott5nv", "pretrain_small", MOCK + SPANS),
    "megamolbart": Example(ROOT / "examples" / "molecule" / "megamolbart", "pretrain_xsmall_span_aug", SMILES),
    "gpt3": Example(ROOT / "examples" / "gpt3", "pretrain_gpt3_126m", TEXT),
}
# Further examples: a model that trains like ESM-2, and a labelled task with the data of a test.
TASK = Example(EXAMPLES / "downstream", "downstream_flip_sec_str", [])
MODELS = FAMILIES | {
    "esm1b": Example(EXAMPLES / "esm1b", "pretrain_esm1b_small", MOCK),
    "esmc": Example(EXAMPLES / "esmc", "pretrain_esmc_300M", [*MOCK, "model.ffn_hidden_size=96"]),
}
# Each command forks a server that has imported all modules, which saves the seconds that Python needs to start.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["bionemo.experiment.nemo", "bionemo.training.module", "bionemo.cli.pretrain", __name__])


class Stop(Exception):
    """Interrupts a run in these tests."""


def tiny(*overrides: str, model: str = "esm2nv") -> list[str]:
    """Return the overrides of a tiny run, on mock data unless they name data."""
    if model == "task":
        return ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1", *overrides]
    own = any("model.data" in override and "dataset_path=" in override for override in overrides)
    return [*TINY, *([] if own else MODELS[model].overrides), *overrides]


def config(directory: Path, *overrides: str, model: str = "esm2nv") -> RunConfig:
    family = MODELS[model]
    complete = tiny(f"exp_manager.exp_dir={directory}", *overrides, model=model)
    return load(family.name, complete, family.directory / "conf")


def train(cfg: RunConfig, stop_before_step: int | None = None, plot: bool = False) -> None:
    """Run a training; with `stop_before_step`, it is interrupted before that step.

    Without `plot`, it does not draw the loss curve, which takes as long as its steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not plot:
            patch.setattr(LossCurve, "_plot", lambda *_: None)
        if stop_before_step is not None:
            original = TrainingModule.training_step

            def step(self: TrainingModule, batch: object) -> None:
                if self.trainer.global_step + 1 == stop_before_step:
                    raise Stop
                original(self, batch)

            patch.setattr(TrainingModule, "training_step", step)
            with pytest.raises(Stop):
                pretrain(cfg)
        else:
            pretrain(cfg)


def last_checkpoint(directory: Path) -> Path:
    (path,) = (directory / "checkpoints").glob("*-last")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    check(path)
    saved = Checkpoint(path)
    return {name: saved.read(f"weights/{name}") for name in saved.shapes("weights")}


def fingerprint(directory: Path) -> dict[str, str]:
    """Return checksums of the last checkpoint: weights, optimizer and all other state from which a run resumes.

    The configuration is excluded, because it contains paths and numbers of processes.
    """
    path = last_checkpoint(directory)
    state = dict(Checkpoint(path).state)
    del state["config"]
    return load_manifest(path)["xxh3_128"] | {"state.json": json.dumps(encode(state))}


def logged(directory: Path, key: str) -> dict[int, float]:
    """Return every value of a metric by step; a step that was trained twice must have equal values."""
    values: dict[int, float] = {}
    for file in sorted(directory.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        if key in events.Tags()["scalars"]:
            for event in events.Scalars(key):
                assert values.setdefault(event.step, event.value) == event.value
    return dict(sorted(values.items()))  # files of one second are not ordered by name


class Command:
    """A command line in its own process, which does not draw the loss curve; see FORK.

    Attributes:
        overrides: overrides added to those of a tiny run.
        model: name of the model whose example is run.
        environment: variables added to the current ones; LARGEST_FILE is a number of bytes beyond which the disk seems
            full, PROCESSORS the simulated number of processors. With MEET=1, the ranks of a run wait for each other
            when they have started their health monitors.
    """

    def __init__(self, output: Path, *overrides: str, model: str = "esm2nv", **environment: str) -> None:
        self._output = output
        self.process: ForkServerProcess = FORK.Process(
            target=_main, args=((MODELS | {"task": TASK})[model], tiny(*overrides, model=model), output, environment)
        )
        self.process.start()

    def end(self) -> tuple[int, list[str]]:
        """Wait; return exit status and console lines."""
        self.process.join(180)  # four processes share two cores with another test
        assert self.process.exitcode is not None, "it hangs"
        return self.process.exitcode, self._output.read_text().splitlines()


def _main(family: Example, overrides: list[str], console: Path, environment: dict[str, str]) -> None:
    output = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    if largest := environment.get("LARGEST_FILE"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), resource.RLIM_INFINITY))
    multiprocessing.set_start_method("fork", force=True)  # for the run's own workers, like in a new Python process
    if processors := environment.get("PROCESSORS"):
        os.cpu_count = lambda: int(processors)
    if environment.get("MEET"):
        HealthMonitor.start = _start_and_wait_for_rank_0  # type: ignore[method-assign]
    LossCurve._plot = lambda *_: None  # type: ignore[method-assign]
    os.chdir(family.directory)
    sys.argv = ["pretrain.py", *overrides]
    (fine_tune if family == TASK else main)(family.name, family.directory / "conf")


_start = HealthMonitor.start


def _start_and_wait_for_rank_0(monitor: HealthMonitor, trainer: pl.Trainer) -> None:
    """Start the monitor, and wait until all ranks have done so; on a busy machine some start much later."""
    _start(monitor, trainer)
    while not all(each.beat for each in monitor.ranks.values()):
        time.sleep(0.01)


def run(directory: Path, *overrides: str, model: str = "esm2nv", **environment: str) -> tuple[int, list[str]]:
    """Run a command that writes into a directory; return exit status and console lines."""
    output = directory.with_name(f"{directory.name}.console")
    return Command(output, f"exp_manager.exp_dir={directory}", *overrides, model=model, **environment).end()


def run_on_ranks(
    directory: Path, *overrides: str, ranks: int, model: str = "esm2nv", **first: str
) -> list[tuple[int, list[str]]]:
    """Run a command on several ranks of this host, like a launcher; `first` is the environment of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MEET": "1"}
    commands = [
        Command(
            directory.with_name(f"{directory.name}.console{rank}"),
            f"exp_manager.exp_dir={directory}", f"trainer.devices={ranks}", *overrides,
            model=model, LOCAL_RANK=str(rank), **shared, **({} if rank else first),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return [command.end() for command in commands]


def write_shards(directory: Path, files: int, rows: int, splits: tuple[str, ...] = ("train", "val", "test")) -> None:
    """Write CSV shards of random proteins in the layout of v1's preparation."""
    generator = random.Random(0)
    for split in splits:
        (directory / split).mkdir(parents=True)
        for file in range(files):
            lines = ["record_id,record_name,sequence_length,sequence"]
            for row in range(rows):
                protein = "".join(generator.choices("LAGVSERTIDPKQNFYMHWC", k=generator.randint(20, 100)))
                lines.append(f"{row},{split}_{file}_{row},{len(protein)},{protein}")
            (directory / split / f"x{file:03d}.csv").write_text("\n".join(lines) + "\n")
