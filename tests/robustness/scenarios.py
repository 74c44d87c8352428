# SPDX-License-Identifier: Apache-2.0
"""Short commands on small data, their expected files, and comparisons of their results."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bionemo.checkpoint import list_complete, load_manifest
from tests.support.runs import TINY

LETTERS = "LAGVSERTIDPKQNFYMHWC"
MODEL = [*TINY, "data@model.data=fasta", "model.num_layers=1", "model.seq_length=32", "trainer.max_steps=2",
         "trainer.val_check_interval=1", "name=small"]  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A command."""

    command: list[str]  # its module and arguments; HERE stands for its data directory, in which it runs
    prepare: Callable[[Path], object]  # function that writes its data into a directory
    # function that returns the result in a directory, comparable with ==; None if missing or incomplete
    result: Callable[[Path], object]

    def arguments(self, directory: Path) -> list[str]:
        """Return the command with HERE replaced by a directory."""
        return [word.replace("HERE", str(directory)) for word in self.command]


def proteins(count: int, seed: int) -> list[str]:
    """Return random proteins of 5 to 30 residues."""
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(5, 30))) for _ in range(count)]


def write_fasta(path: Path, count: int, seed: int) -> None:
    path.write_text("".join(f">{path.stem}{n}\n{text}\n" for n, text in enumerate(proteins(count, seed))))


def write_data(directory: Path) -> None:
    """Write proteins for training, and a user file that no command may modify."""
    write_fasta(directory / "train.fasta", 60, 0)
    write_fasta(directory / "val.fasta", 8, 1)
    write_keepsake(directory)


def write_keepsake(directory: Path) -> None:
    for place in (directory, directory / "out"):
        place.mkdir(exist_ok=True)
        (place / "notes.txt").write_text("mine")


def kept(directory: Path) -> bool:
    """Return whether the user's files are unchanged."""
    places = directory, directory / "out"
    return all((place / "notes.txt").is_file() and (place / "notes.txt").read_text() == "mine" for place in places)


def trained(directory: Path) -> object:
    """Return the step and tensor checksums of the newest complete checkpoint."""
    for path in list_complete(directory / "out" / "checkpoints"):
        manifest = load_manifest(path)
        return manifest["step"], {k: v for k, v in manifest["xxh3_128"].items() if k.startswith("tensors")}
    return None


def predicted(directory: Path) -> object:
    path = directory / "out" / "x.npz"
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name: arrays[name].tobytes() for name in arrays.files}


def prepared(directory: Path) -> object:
    out = directory / "out" / "shards"
    if not (out / "manifest.json").exists():
        return None
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("x*.csv"))}


def tuned(directory: Path) -> object:
    path = directory / "out" / "head.safetensors"
    report = directory / "out" / "report.json"
    return (path.read_bytes(), sorted(json.loads(report.read_text()))) if path.exists() and report.exists() else None


def write_task(directory: Path) -> None:
    """Write sequences labelled with their fraction of leucine."""
    for split, count, seed in (("train", 30, 0), ("val", 8, 1), ("test", 8, 2)):
        (directory / "task" / split).mkdir(parents=True)
        rows = [f"{n},{text},{text.count('L') / len(text):.3f}" for n, text in enumerate(proteins(count, seed))]
        (directory / "task" / split / "x000.csv").write_text("\n".join(["id,sequence,target", *rows]) + "\n")
    write_keepsake(directory)


def scenarios(model: Path) -> Mapping[str, Scenario]:
    """Return the commands; `model` is a checkpoint that two of them read."""
    return {
        "pretrain": Scenario(
            ["bionemo.pretrain", "--config-name=pretrain_esm2_8M", *MODEL, "model.data.dataset_path=.",
             "model.data.dataset.train=HERE/train.fasta", "model.data.dataset.val=HERE/val.fasta",
             "exp_manager.exp_dir=out"],
            write_data, trained,
        ),
        "predict": Scenario(
            ["bionemo.predict", f"model.downstream_task.restore_from_path={model}",
             "model.data.dataset_path=train.fasta", "model.downstream_task.outputs=[embeddings,hiddens]",
             "model.data.output_fname=out/x.npz", "trainer.accelerator=cpu"],
            write_data, predicted,
        ),
        "preprocess": Scenario(
            ["bionemo.preprocess", "source=train.fasta", "output=out/shards", "val_size=0.1", "test_size=0.1",
             "num_csv_files=2"],
            write_data, prepared,
        ),
        "finetune": Scenario(
            ["bionemo.finetune", "--config-name=downstream_flip_aav", f"model.restore_encoder_path={model}",
             "model.data.preprocessed_data_path=.", "model.data.task_name=task", "model.data.target_column=[target]",
             "exp_manager.exp_dir=out", "trainer.max_epochs=2", "trainer.accelerator=cpu",
             "exp_manager.create_wandb_logger=False"],
            write_task, tuned,
        ),
    }  # fmt: skip
