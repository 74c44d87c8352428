# SPDX-License-Identifier: Apache-2.0
"""Labelled files and short fine-tuning runs."""

from pathlib import Path

import numpy as np
import torch

from bionemo.cli.finetune import prepare_and_fine_tune
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig, OptimConfig, SchedConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.features import Features
from bionemo.finetuning.labels import IGNORED

ADAM = OptimConfig(
    name="adam", lr=1e-2, weight_decay=0.0, betas=[0.9, 0.999], eps=1e-8,
    sched=SchedConfig(name="WarmupAnnealing", warmup_steps=2, min_lr=1e-4),
)  # fmt: skip
RECIPE = linear_probe.ProbeConfig(epochs=8, batch_size=16, shuffle=True, seed=1, optim=ADAM)
CPU = torch.device("cpu")


def tokens(count: int, seed: int) -> Features:
    """Return tokens whose class depends on the token and its neighbour; a fifth of the labels is ignored."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, count)
    vectors = rng.standard_normal((int(lengths.sum()), 8)).astype(np.float32)
    ends = lengths.cumsum() - 1
    following = np.append(vectors[1:, 1], 0.0)
    following[ends] = 0.0
    targets = (vectors[:, 0] + following > 0).astype(np.int64) + (vectors[:, 0] > 1)
    targets[rng.random(len(targets)) < 0.2] = IGNORED
    return Features(vectors, targets, lengths)


def written(directory: Path) -> Path:
    """Write helices at A, strands at V and loops elsewhere; some residues are unresolved."""
    rng = np.random.default_rng(0)
    for split, count in {"train": 60, "val": 12, "test": 12}.items():
        (directory / split).mkdir(parents=True)
        rows = ["id,sequence,3state,resolved"]
        for number in range(count):
            text = "".join(rng.choice(list("AVGKL"), rng.integers(5, 40)))
            labels = text.translate(str.maketrans("AVGKL", "HECCC"))
            rows.append(f"{split}{number},{text},{labels},{'0' + '1' * (len(text) - 1)}")
        (directory / split / "x000.csv").write_text("\n".join(rows) + "\n")
    return directory


def overrides(model: Path, data: Path, directory: Path) -> list[str]:
    return [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", "trainer.accelerator=cpu",
            f"exp_manager.exp_dir={directory}", "model.micro_batch_size=8", "trainer.max_epochs=4",
            "model.finetuning_optim.lr=0.01"]  # fmt: skip


def run(*given: str) -> None:
    prepare_and_fine_tune(load("downstream_flip_sec_str", given, schema=DownstreamConfig))
