# SPDX-License-Identifier: Apache-2.0
"""Measure the benefit of pretraining for secondary structure: pretrained model, random weights, and one-hot input.

python scripts/benchmark/downstream.py --pretrained RUN/checkpoints/X --random RUN0/checkpoints/Y --data FLIP --out DIR

Each table cell is a run of the public command; finished runs are not repeated. Full and LoRA fine-tuning start from
the head of the run with the frozen encoder. Prints test accuracy in percent: mean, minimum and maximum over the seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.features import Features
from bionemo.finetuning.heads import make_head
from bionemo.finetuning.task_data import read_splits

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
TASK = ["model.micro_batch_size=8", "model.data.task_name=secondary_structure"]
COMMON = ["--config-name=downstream_flip_sec_str", "exp_manager.create_tensorboard_logger=False",
          "model.seq_length=1024"]  # no sequence is truncated, whatever the maximum length in pretraining  # fmt: skip
TUNED = ["model.encoder_frozen=False", "trainer.log_every_n_steps=50"]
WAYS = {
    "frozen": ["trainer.max_epochs=30", "model.finetuning_optim.lr=1e-3"],
    "unfrozen": [*TUNED, "trainer.max_epochs=3", "model.finetuning_optim.lr=3e-4", "model.encoder_lr_scale=0.3"],
    "LoRA": [*TUNED, "trainer.max_epochs=3", "model.finetuning_optim.lr=3e-4", "model.peft.enabled=True",
             "model.peft.lora_tuning.adapter_dim=4"],
}  # fmt: skip


def run(encoder: Path, name: str, way: str, seed: int, data: Path, out: Path) -> dict[str, float]:
    """Run the command, with the head of an earlier frozen run if given; return its report."""
    directory = out / f"{seed}-{way}-{name}"
    report = directory / "report.json"
    if not report.exists():
        words = [*COMMON, *TASK, *WAYS[way], f"model.restore_encoder_path={encoder}", f"model.seed={seed}",
                 f"model.data.preprocessed_data_path={data}", f"exp_manager.exp_dir={directory}"]  # fmt: skip
        if way != "frozen":
            words.append(f"model.restore_head_path={out / f'{seed}-frozen-{name}' / 'head.safetensors'}")
        subprocess.run([sys.executable, "-m", "bionemo.finetune", *words], check=True, capture_output=True)
    figures: dict[str, float] = json.loads(report.read_text())
    return figures


def one_hot(seed: int, data: Path) -> float:
    """Train the same head on one-hot vectors, scaled to the norm that a layer norm would give them."""
    words = [*TASK, *WAYS["frozen"], f"model.data.preprocessed_data_path={data}"]
    cfg = load("downstream_flip_sec_str", words, schema=DownstreamConfig)
    splits, classes = read_splits(cfg.model.data, "model.data", ["train", "val", "test"])

    vectors = np.eye(len(LETTERS), dtype=np.float32) * np.float32(len(LETTERS) ** 0.5)

    def features(name: str) -> Features:
        texts = splits[name].texts
        ids = [LETTERS.find(letter) % len(LETTERS) for letter in "".join(texts)]
        lengths = np.array([len(text) for text in texts], np.int64)
        return Features(vectors[ids], np.concatenate(splits[name].targets), lengths)

    recipe = linear_probe.ProbeConfig(
        cfg.trainer.max_epochs or 1, cfg.model.micro_batch_size, True, seed, cfg.model.finetuning_optim,
        cfg.trainer.gradient_clip_val,
    )  # fmt: skip
    head = partial(
        make_head, "token-level-classification", len(LETTERS), len(classes), width=32, sizes=(), dropout=0.25
    )
    trained = linear_probe.train_head(head, features("train"), features("val"), recipe, torch.device("cpu"))
    return linear_probe.evaluate(trained.head, features("test"))["accuracy"]


def told(values: list[float]) -> str:
    """Format mean and range."""
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pretrained", "random", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    given = parser.parse_args()
    encoders = {"pretrained": given.pretrained, "random": given.random}
    found = {}
    for ways in (["frozen"], [way for way in WAYS if way != "frozen"]):  # the other runs start from these heads
        jobs = [(seed, way, name) for seed in range(given.seeds) for way in ways for name in encoders]
        with ThreadPoolExecutor(given.at_once) as pool:
            results = pool.map(lambda job: run(encoders[job[2]], job[2], job[1], job[0], given.data, given.out), jobs)
            found |= dict(zip(jobs, results, strict=True))
    print("| | pretrained | random weights | learns, with head |\n|---|---|---|---|")
    for way in WAYS:
        cells = [told([found[seed, way, name]["test_accuracy"] for seed in range(given.seeds)]) for name in encoders]
        figures = found[0, way, "pretrained"]
        share = ""
        if "parameters" in figures:
            whole, learn, head = (figures[f"parameters{end}"] for end in ("", "_that_learn", "_of_the_head"))
            share = f"{(learn - head) / (whole - head):.2%} of the model, {learn / whole:.2%}"
        print(f"| {way} | {' | '.join(cells)} | {share} |")
    letters = [one_hot(seed, given.data) for seed in range(given.seeds)]
    print(f"| one-hot | {told(letters)} | | |")


if __name__ == "__main__":
    main()
