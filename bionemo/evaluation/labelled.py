# SPDX-License-Identifier: Apache-2.0
"""Labelled tasks: heads on the frozen model, on random weights and on one-hot tokens, and fine-tuned models.

Data, heads and hyperparameters are those of `bionemo finetune`; each result is repeated with three seeds.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from bionemo.common.console import notify
from bionemo.common.errors import UserError, signal_name
from bionemo.common.launcher_environment import without_launcher
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.data.files import SPLITS
from bionemo.data.shards.ranges import shard_paths
from bionemo.evaluation.baselines import OneHotModel, with_random_weights
from bionemo.evaluation.html import format_mean
from bionemo.evaluation.tasks import Problems, Result, Suite, Task, TaskResult
from bionemo.finetuning.features import Features, compute_features
from bionemo.finetuning.heads import head_factory
from bionemo.finetuning.labels import Split
from bionemo.finetuning.linear_probe import evaluate, probe_config, train_head
from bionemo.finetuning.task_data import read_splits
from bionemo.inference.batching import BatchLimits
from bionemo.inference.model import TrainedModel
from bionemo.tokenizers import Alphabet, SmilesTokenizer

SEEDS = (1, 2, 3)
FROZEN, RANDOM, ONE_HOT, FINE_TUNED = "frozen", "random-weights", "one-hot", "fine-tuned"
_COSTS = {FROZEN: 1, RANDOM: len(SEEDS), ONE_HOT: 1, FINE_TUNED: 12 * len(SEEDS)}
# Start from the trained head, with a lower learning rate for the encoder (Kumar et al. 2022).
_FINE_TUNING = (
    "model.encoder_frozen=False", "model.encoder_lr_scale=0.3", "model.finetuning_optim.lr=3e-4",
    "trainer.max_epochs=3",
)  # fmt: skip
_SHOWN = {"accuracy": "accuracy (%)", "mse": "MSE", "spearman": "Spearman", "roc_auc": "ROC-AUC (%)"}


@dataclass(frozen=True)
class Dataset:
    """A labelled data set.

    Attributes:
        config: configuration of `bionemo finetune`.
        overrides: changes of it.
        published: published results by model; accuracy in percent, or mean squared error.
    """

    config: str
    overrides: tuple[str, ...] = ()
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelledTask(Task):
    """A data set, and what the head reads."""

    dataset: str
    config_name: str
    overrides: Sequence[str]
    config: DownstreamConfig = field(repr=False)
    input: str
    vocabulary: type

    def run(self, model: TrainedModel, problems: Problems) -> TaskResult:
        """Train with each seed and test, see `Task`."""
        if not isinstance(model.network.vocabulary, self.vocabulary):
            suitable = "ESM1nv, ESM1b, ESM2nv or ProtT5nv" if self.vocabulary is Alphabet else "MegaMolBART"
            raise UserError(
                f"{model.path} is a {type(model.network).__name__}, which cannot read {self.dataset}: use {suitable}"
            )
        details: dict[str, Any] = {"dataset": self.dataset, "input": self.input}
        if self.input == FINE_TUNED:
            seed_metrics = self._fine_tune(model)
        else:
            seed_metrics, notes, details["truncated"] = self._train_heads(model)
            if self.input == FROZEN:  # once for each data set
                notify(*notes)
                problems.messages += notes
        metrics = {name: float(np.mean([each[name] for each in seed_metrics])) for name in seed_metrics[0]}
        return TaskResult(metrics, {**details, "seeds": seed_metrics})

    def _train_heads(self, model: TrainedModel) -> tuple[list[dict[str, float]], list[str], int]:
        """Return the test metrics of each seed, notes about the data, and the number of truncated sequences."""
        data = self.config.model.data
        splits, classes, notes, _ = read_splits(data, "model.data", SPLITS, model.network.vocabulary)
        if self.input == ONE_HOT:
            model = OneHotModel(model)
        seed_metrics: list[dict[str, float]] = []
        with TemporaryDirectory() as directory:
            for seed in SEEDS:
                if not seed_metrics or self.input == RANDOM:
                    encoder = with_random_weights(model, seed) if self.input == RANDOM else model
                    features, truncated = self._features(encoder, splits, Path(directory))
                make_head = head_factory(
                    self.config.model.downstream_task, data.task_type, model.hidden_size, len(classes)
                )
                trained = train_head(
                    make_head, features["train"], features["val"], probe_config(self.config, seed), model.device
                )
                seed_metrics.append(evaluate(trained.head, features["test"]))
        return seed_metrics, notes, truncated

    def _features(
        self, model: TrainedModel, splits: Mapping[str, Split], directory: Path
    ) -> tuple[dict[str, Features], int]:
        data = self.config.model.data
        limits = BatchLimits(sequences=data.emb_batch_size)
        found = {
            name: compute_features(model, split, data.task_type, limits, directory / f"{name}.npy")
            for name, split in splits.items()
        }
        return {name: features for name, (features, _) in found.items()}, sum(cut for _, cut in found.values())

    def _fine_tune(self, model: TrainedModel) -> list[dict[str, float]]:
        """Fine-tune in processes of their own; return the test metrics of each seed."""
        seed_metrics = []
        for seed in SEEDS:
            with TemporaryDirectory() as directory:
                output = Path(directory)
                length = f"model.seq_length={model.network.config.max_position_embeddings}"
                common = [
                    f"model.restore_encoder_path={model.path.absolute()}",
                    f"model.seed={seed}",
                    length,
                    *self.overrides,
                ]
                _finetune(model, self.config_name, output / "head", *common)
                head = f"model.restore_head_path={output / 'head' / 'head.safetensors'}"
                report = _finetune(model, self.config_name, output / "whole", *common, head, *_FINE_TUNING)
            tested = {name.removeprefix("test_"): each for name, each in report.items() if name.startswith("test_")}
            seed_metrics.append({name: math.nan if each is None else float(each) for name, each in tested.items()})
        return seed_metrics


def _finetune(model: TrainedModel, config_name: str, output: Path, *overrides: str) -> dict[str, Any]:
    """Run `bionemo finetune` on the device of the model, and return its report."""
    environment, device = without_launcher(), model.device
    if device.type == "cuda":
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        index = device.index or 0
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    command = [
        sys.executable, "-m", "bionemo.finetune", f"--config-name={config_name}", f"exp_manager.exp_dir={output}",
        f"trainer.accelerator={'gpu' if device.type == 'cuda' else 'cpu'}", "trainer.devices=1",
        f"trainer.precision={model.precision.name}", "exp_manager.create_tensorboard_logger=False", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["without a message"]
        how = f"was ended by {signal_name(-done.returncode)}" if done.returncode < 0 else f"failed: {lines[-1]}"
        raise UserError(f"bionemo finetune --config-name={config_name} {how}")
    found: dict[str, Any] = json.loads((output / "report.json").read_text())
    return found


@dataclass(frozen=True)
class LabelledSuite(Suite):
    """Labelled data sets as `bionemo finetune do_training=False` prepares them, in folders of their names.

    Attributes:
        fine_tuning: also fine-tune the whole model, which takes much longer.
    """

    about: ClassVar[str] = (
        "Metrics of the test split, accuracies and areas in percent: mean and standard deviation of three seeds. A "
        "head is trained on the frozen model, on the same architecture with random weights, and on one-hot tokens."
    )
    fine_tuning: bool = False
    datasets: ClassVar[Mapping[str, Dataset]]
    vocabulary: ClassVar[type]

    def tasks(self) -> list[LabelledTask]:
        """Return a task for each data set and input, see `Suite`."""
        found = [name for name in self.datasets if (self.data / name).is_dir()]
        if not found:
            raise UserError(f"{self.data} has no folder named {', '.join(self.datasets)}: prepare the data")
        tasks = []
        for name in found:
            dataset = self.datasets[name]
            overrides = [*dataset.overrides, f"model.data.dataset_path={(self.data / name).absolute()}"]
            config = load(dataset.config, overrides, schema=DownstreamConfig)
            data = config.model.data
            files = [
                path
                for split in SPLITS
                for path in shard_paths(data.dataset_path, split, getattr(data.dataset, split))
            ]
            model = asdict(config.model)
            for key in ("dataset_path", "preprocessed_data_path", "preprocessing"):
                del model["data"][key]
            settings = {"seeds": SEEDS, "epochs": config.trainer.max_epochs, "model": model}
            size = sum(path.stat().st_size for path in files)
            tasks += [
                LabelledTask(
                    name=f"{name}-{each}",
                    files=files,
                    settings={**settings, "input": each, "fine_tuning": _FINE_TUNING if each == FINE_TUNED else ()},
                    cost=size * _COSTS[each],
                    dataset=name,
                    config_name=dataset.config,
                    overrides=overrides,
                    config=config,
                    input=each,
                    vocabulary=self.vocabulary,
                )
                for each in (FROZEN, RANDOM, ONE_HOT, *([FINE_TUNED] if self.fine_tuning else []))
            ]
        return tasks

    def summarize(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return mean and standard deviation over seeds by data set, input and metric, see `Suite`.

        Published results are further inputs, with a single number.
        """
        summary: dict[str, Any] = {}
        for each in results:
            seeds = {name: [seed_metrics[name] for seed_metrics in each["seeds"]] for name in each["metrics"]}
            summary.setdefault(each["dataset"], {})[each["input"]] = {
                name: [float(np.mean(values)), float(np.std(values, ddof=1))] for name, values in seeds.items()
            }
        for name, inputs in summary.items():
            metric = "accuracy" if "accuracy" in next(iter(inputs.values())) else "mse"
            for model, value in self.datasets[name].published.items():
                inputs[f"{model} (BioNeMo v1)"] = {metric: [value]}
        return summary

    @staticmethod
    def describe(summary: Mapping[str, Any]) -> list[str]:
        """Return a line for each data set, see `Suite`."""
        lines = []
        for dataset, inputs in summary.items():
            metric = next(name for name in _SHOWN if name in next(iter(inputs.values())))
            values = ", ".join(f"{name} {format_mean(found.get(metric))}" for name, found in inputs.items())
            lines.append(f"{dataset}, {_SHOWN[metric]}: {values}")
        return lines


# Published in the documentation of BioNeMo Framework v1.
_FLIP_MODELS = ("ESM1nv", "ProtT5nv", "ESM2 650M", "one-hot")


def _flip(config: str, *published: float) -> Dataset:
    return Dataset(f"downstream_flip_{config}", (), dict(zip(_FLIP_MODELS, published, strict=False)))


@dataclass(frozen=True)
class Flip(LabelledSuite):
    """FLIP (Dallago et al. 2021), with the splits of BioNeMo v1."""

    name: ClassVar[str] = "flip"
    vocabulary: ClassVar[type] = Alphabet
    datasets: ClassVar[Mapping[str, Dataset]] = {
        "secondary_structure": _flip("sec_str", 77.3, 79.3, 85.5, 64.3),
        "scl": _flip("scl", 72.0, 76.4, 79.1, 38.6),
        "conservation": _flip("conservation", 24.9, 25.6, 32.9, 20.2),
        "meltome": _flip("meltome", 82.85, 77.39, 53.38, 128.21),
        "gb1": _flip("gb1", 1.58, 1.60, 1.67, 2.56),
        "aav": _flip("aav"),
        "bind": _flip("bind"),
        "sav": _flip("sav"),
    }


def _moleculenet(name: str, column: str, svm: float, forest: float) -> Dataset:
    overrides = (f"model.data.task_name={name}", f"model.data.target_column={column}")
    return Dataset("finetune_config", overrides, {"MegaMolBART, SVM": svm, "MegaMolBART, random forest": forest})


@dataclass(frozen=True)
class MoleculeNet(LabelledSuite):
    """Measured properties of molecules (Wu et al. 2018)."""

    name: ClassVar[str] = "moleculenet"
    vocabulary: ClassVar[type] = SmilesTokenizer
    datasets: ClassVar[Mapping[str, Dataset]] = {
        "ESOL": _moleculenet("ESOL", "measured log solubility in mols per litre", 0.474, 0.862),
        "FreeSolv": _moleculenet("FreeSolv", "expt", 1.991, 4.832),
        "Lipophilicity": _moleculenet("Lipophilicity", "exp", 0.491, 0.811),
    }
