# SPDX-License-Identifier: Apache-2.0
"""Regression from sequences: fitness of protein variants and solubility of molecules, against simple baselines.

python scripts/benchmark/regression.py variants --model CHECKPOINT --file P62593_variants.fasta --out DIR
python scripts/benchmark/regression.py esol --model CHECKPOINT --file ESOL.csv --out DIR

`variants` splits the variants at random (80/10/10), trains a head on the mutated residues and one on the mean over all
residues, and also scores the test split zero-shot; the baseline is a ridge regression on one-hot residues. `esol`
prepares the file with the public command; the baselines are ridge and random forest on Morgan fingerprints (radius 2,
2,048 bits). Both train a head on the frozen model, then fine-tune the whole model or LoRA adapters starting from that
head. Each run is a public command; finished runs are not repeated.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import RidgeCV

TUNED = ["model.encoder_frozen=False", "trainer.log_every_n_steps=20"]
MUTATED = "head on mutated residues"
WAYS = {
    "head alone": [],
    "whole model": TUNED,
    "LoRA": [*TUNED, "model.peft.enabled=True", "model.peft.lora_tuning.adapter_dim=4"],
}
HEAD = ["trainer.max_epochs=40", "model.finetuning_optim.lr=1e-3"]
ESOL = {
    "head alone": HEAD,
    "whole model": ["trainer.max_epochs=20", "model.finetuning_optim.lr=3e-4", "model.encoder_lr_scale=0.3"],
    "LoRA": ["trainer.max_epochs=20", "model.finetuning_optim.lr=3e-4"],
}
VARIANTS = {  # their vectors hardly differ: an update of the model changes all of them
    MUTATED: [*HEAD, "model.finetuning_optim.name=fused_adam"],
    "head alone": HEAD,
    "whole model": ["trainer.max_epochs=2", "model.finetuning_optim.lr=1e-4", "model.encoder_lr_scale=0.1"],
    "LoRA": ["trainer.max_epochs=2", "model.finetuning_optim.lr=3e-5"],
}
Rows = list[dict[str, str]]


def command(module: str, *words: str) -> None:
    """Run a command without printing its output."""
    subprocess.run([sys.executable, "-m", f"bionemo.{module}", *words], check=True, capture_output=True)


def split_variants(file: Path, directory: Path) -> None:
    """Convert FASTA with `>number|name_MUTATION|score` to the splits of a labelled task, in random order."""
    records = [record.split("\n", 1) for record in file.read_text().split(">")[1:]]
    rows = [
        [head.split("|")[1].rpartition("_")[2], "".join(text.split()), head.split("|")[2]] for head, text in records
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    tenth = len(rows) // 10
    for name, part in {"val": order[:tenth], "test": order[tenth : 2 * tenth], "train": order[2 * tenth :]}.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        with (directory / name / "x000.csv").open("w", newline="") as out:
            csv.writer(out).writerows([["variant", "sequence", "target"], *(rows[number] for number in part)])


def rows_of(directory: Path, name: str) -> Rows:
    """Return the rows of a split."""
    with (directory / name / "x000.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def fine_tuned(name: str, words: list[str], out: Path) -> dict[str, float]:
    """Run a fine-tuning; return its report."""
    report = out / name.replace(" ", "-") / "report.json"
    if not report.exists():
        trained = out / "head-alone" / "head.safetensors"
        more = [f"model.restore_head_path={trained}"] if WAYS.get(name) else []
        command("finetune", *words, *WAYS.get(name, []), *more,
                f"exp_manager.exp_dir={report.parent}", "exp_manager.create_tensorboard_logger=False")  # fmt: skip
    figures: dict[str, float] = json.loads(report.read_text())
    return figures


def tell(name: str, answers: NDArray[np.floating], truth: NDArray[np.floating]) -> None:
    """Print a row of the table."""
    error = np.sqrt(np.mean((answers - truth) ** 2))
    print(f"| {name} | {spearmanr(answers, truth).statistic:.3f} | {error:.3f} |", flush=True)


def variants(model: Path, file: Path, out: Path) -> None:
    """Print the table for protein variants."""
    data = out / "variants"
    split_variants(file, data)
    train, test = rows_of(data, "train"), rows_of(data, "test")
    wild_type = out / "wild_type.fasta"
    residues = zip(*(row["sequence"] for row in train), strict=True)
    wild_type.write_text(">wild type\n" + "".join(Counter(each).most_common(1)[0][0] for each in residues) + "\n")
    letters = sorted(set("".join(row["sequence"] for row in train)))
    longest = max(len(row["sequence"]) for row in train)

    def one_hot(rows: Rows) -> NDArray[np.floating]:
        ids = np.array(
            [[letters.index(letter) for letter in row["sequence"].ljust(longest, letters[0])] for row in rows]
        )
        return np.eye(len(letters))[ids].reshape(len(rows), -1)

    truth, known = (np.array([float(row["target"]) for row in rows]) for rows in (test, train))
    print("| | Spearman | root of the mean squared error |\n|---|---|---|")
    tell("ridge on residues", RidgeCV(np.logspace(-2, 4, 13)).fit(one_hot(train), known).predict(one_hot(test)), truth)
    words = [
        "--config-name=downstream_flip_gb1", "model.data.task_name=gb1", f"model.data.dataset_path={data}",
        f"model.restore_encoder_path={model}", f"model.seq_length={longest + 2}", "model.micro_batch_size=16",
    ]  # fmt: skip
    for name, settings in VARIANTS.items():
        more = [f"model.data.wild_type={wild_type}"] if name == MUTATED else []
        figures = fine_tuned(name, [*words, *settings, *more], out)
        print(f"| {name} | {figures['test_spearman']:.3f} | {figures['test_rmse']:.3f} |", flush=True)
    for method in ("masked-marginal", "wild-type-marginal"):
        scores = out / f"{method}.csv"
        if not scores.exists():
            command("analysis", "variants", f"--model={model}", f"--variants={file}", f"--method={method}",
                    f"--max-length={longest + 2}", f"--output={scores}")  # fmt: skip
        with scores.open(newline="") as table:
            found = {row["variant"]: float(row["zero_shot"]) for row in csv.DictReader(table)}
        answers = np.array([found[row["variant"]] for row in test])
        print(f"| zero-shot, {method} | {spearmanr(answers, truth).statistic:.3f} | |", flush=True)


def esol(model: Path, file: Path, out: Path) -> None:
    """Print the table for molecules."""
    from rdkit import Chem
    from rdkit.Chem import rdFingerprintGenerator

    source = out / "source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "ESOL.csv").write_text(file.read_text().replace("SMILES", "smiles", 1))
    target = "measured log solubility in mols per litre"
    words = ["--config-name=finetune_config", f"model.data.preprocessed_data_path={out}", "model.data.task_name=ESOL",
             f"model.data.target_column='{target}'", f"model.restore_encoder_path={model}"]  # fmt: skip
    command("finetune", *words, "do_training=False", f"model.data.preprocessing.source={source}")
    make = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    bits, truth = {}, {}
    for name in ("train", "test"):
        rows = rows_of(out / "ESOL", name)
        bits[name] = np.stack([make.GetFingerprintAsNumPy(Chem.MolFromSmiles(row["smiles"])) for row in rows])
        truth[name] = np.array([float(row[target]) for row in rows])
    print("| | Spearman | root of the mean squared error |\n|---|---|---|")
    for title, regressor in {
        "ridge on Morgan bits": RidgeCV(np.logspace(-2, 4, 13)),
        "random forest on Morgan bits": RandomForestRegressor(300, random_state=0),
    }.items():
        tell(title, regressor.fit(bits["train"], truth["train"]).predict(bits["test"]), truth["test"])
    for name in WAYS:
        figures = fine_tuned(name, [*words, *ESOL[name]], out)
        print(f"| {name} | {figures['test_spearman']:.3f} | {figures['test_rmse']:.3f} |", flush=True)


def main() -> None:
    """Run the benchmark named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["variants", "esol"])
    for name in ("model", "file", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    {"variants": variants, "esol": esol}[given.task](given.model, given.file, given.out)


if __name__ == "__main__":
    main()
