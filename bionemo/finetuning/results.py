# SPDX-License-Identifier: Apache-2.0
"""Results of a fine-tuning run: head, predictions of the test split, JSON report and plot.

A run never replaces the results of another one.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import save
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.files import without_nan, write_atomic
from bionemo.common.redaction import redact_text, redact_tree
from bionemo.common.version import __version__
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning import metrics
from bionemo.finetuning.heads import Head
from bionemo.finetuning.labels import Split, is_labelled
from bionemo.finetuning.load_head import read_trained_head
from bionemo.finetuning.plots import plot_run
from bionemo.finetuning.task_data import TaskData
from bionemo.inference.fingerprint import digest
from bionemo.megatron.finite import all_finite

_MAX_LABELS = 20  # that a note names
HEAD, PREDICTIONS, REPORT, PLOT, ADAPTER = (  # written in this order
    "head.safetensors", "test_predictions.csv", "report.json", "report.png", "adapter",
)  # fmt: skip
_RUN = "run"  # key of the run's fingerprint in the metadata of the head and in the report
# Settings of the model that cannot change the result, or whose content is part of the fingerprint.
_IGNORED_SETTINGS = ("restore_encoder_path", "restore_head_path", "data")
# Settings in the fingerprint of a run that trains the encoder: it can resume with another optimizer or other devices.
_FINETUNING_SETTINGS = ("seq_length", "encoder_frozen", "freeze_layers", "peft", "downstream_task")


class Results(NamedTuple):
    """Results of a run."""

    encoder: Path  # the model that computes the input of the head
    encoder_weights: str  # checksum of its weights
    head: Head
    best: int  # number of its epoch or validation in the history, from 1; 0 without a history
    history: Sequence[Mapping[str, float]]  # `epoch`, `train_loss` and validation metrics of each epoch or validation
    test: tuple[Tensor, Tensor] | None  # predictions_RC and targets of the test split, see `metrics`
    test_split: Split | None
    max_length: int  # maximum number of tokens of a sequence without begin and end; longer ones are truncated
    fingerprint: str
    details: Mapping[str, Any] = {}  # further entries of the report


def run_fingerprint(
    cfg: DownstreamConfig, model: str, splits: Mapping[str, Split], wild_type: str | None = None
) -> str:
    """Return a digest of everything that determines the results of a run; `model` is the pretrained model's digest."""
    settings = asdict(cfg.model)
    if cfg.model.encoder_frozen:
        trainer = [cfg.trainer.max_epochs, cfg.trainer.gradient_clip_val, str(cfg.trainer.precision)]
        settings = {key: value for key, value in settings.items() if key not in _IGNORED_SETTINGS}
        known = [settings, trainer, cfg.name, wild_type]
    else:
        known = [{key: settings[key] for key in _FINETUNING_SETTINGS}]
    rows = {name: [each.texts, [target.tobytes().hex() for target in each.targets]] for name, each in splits.items()}
    return digest([known, cfg.model.data.task_type, cfg.model.data.shuffle, model, rows])


def describe_data(cfg: DownstreamConfig, data: TaskData) -> dict[str, Any]:
    """Return the entry `data` of the report: file, columns, division, sizes, and notes about what was left out."""
    config = cfg.model.data
    names = ("dataset_path", "sequence_column", "target_column", "mask_column", "task_type")
    known = {name: getattr(config, name) for name in names}
    rows = {name: len(split.texts) for name, split in data.splits.items()}
    return {"data": {**known, **data.division, "rows": rows, "notes": [*data.notes]}}


def check_results(directory: Path, fingerprint: str) -> bool:
    """Return whether the directory holds all results of the run with this fingerprint.

    Raises:
        UserError: if it holds results of another run, or other files with their names.
    """
    found = [name for name in (HEAD, REPORT, PLOT, "report.svg", PREDICTIONS, ADAPTER) if (directory / name).exists()]
    if found and (found[0] != HEAD or read_trained_head(directory / HEAD).run != fingerprint):
        raise UserError(
            f"{directory / found[0]} belongs to another run and would be replaced: choose another "
            "exp_manager.exp_dir, or move it away"
        )
    return found[:3] == [HEAD, REPORT, PLOT]


def write_results(
    results: Results, cfg: DownstreamConfig, directory: Path, classes: tuple[str, ...], wild_type: str | None = None
) -> None:
    """Write `head.safetensors`, `test_predictions.csv`, `report.json`, `report.svg` and `report.png`; print a summary.

    Raises:
        OSError: if a file cannot be written; each file is complete or unchanged.
    """
    history, per_residue = results.history, cfg.model.data.task_type.startswith("token-level")
    report: dict[str, Any] = {
        "name": cfg.name, "encoder": str(results.encoder), "encoder_weights": results.encoder_weights,
        _RUN: results.fingerprint, "bionemo": __version__, "settings": asdict(cfg), "max_tokens": results.max_length,
        **results.details,
    }  # fmt: skip
    if results.best:
        best = history[results.best - 1]
        report["epoch"] = best["epoch"]
        report |= {name: value for name, value in best.items() if name.startswith("val_")}
    test_metrics: dict[str, float] = {}
    if not all_finite(results.head.parameters()):
        raise UserError("the weights of the head are not finite: lower the learning rate (optim.lr)")
    if results.test:
        found = metrics.compute_metrics(*results.test, scale=results.head.loss_scale)
        test_metrics = {f"test_{name}": value for name, value in found.items()}
        if metrics.is_class(results.test[1]):
            report["confusion"] = metrics.confusion_matrix(*results.test)
            if len(only := results.test[1].unique()) == 1:
                name = f"all labels of the test split are {classes[int(only)]!r}"
                print_line(f"note: {name}: balanced accuracy and area under the ROC curve are not defined")
        elif classes:
            report["test_targets"] = dict(zip(classes, metrics.target_metrics(*results.test), strict=True))
            if lacking := [name for name, values in report["test_targets"].items() if not values]:
                shown = f"{', '.join(lacking[:_MAX_LABELS])}{', ...' if lacking[_MAX_LABELS:] else ''}"
                what = "numbers" if results.test[1].is_floating_point() else "positive rows"
                print_line(f"note: the test split has no {what} of {len(lacking):,} outputs, left out: {shown}")
    task = {
        "classes": list(classes), "task_type": cfg.model.data.task_type, "wild_type": wild_type,
        "encoder": redact_text(str(results.encoder.absolute())), "encoder_weights": results.encoder_weights,
        _RUN: results.fingerprint, "bionemo": __version__, "max_tokens": results.max_length,
        "settings": redact_tree(asdict(cfg.model)),
    }  # fmt: skip
    # A single metadata entry: safetensors writes several in random order, and the file must be reproducible.
    write_atomic(directory / HEAD, save(results.head.state_dict(), {"task": json.dumps(task)}))
    if results.test and results.test_split:
        table = _predictions(results.test, results.test_split, results.max_length, classes, per_residue)
        write_atomic(directory / PREDICTIONS, table)
    report = redact_tree(report | test_metrics)
    text = json.dumps(without_nan({**report, "classes": list(classes), "epochs": list(history)}), indent=1)
    write_atomic(directory / REPORT, text + "\n")
    tested = f", {PREDICTIONS}" if results.test else ""
    names = f"{HEAD}{tested}, {REPORT} and {PLOT}"
    data = cfg.model.data
    target = data.target_column if isinstance(data.target_column, str) else ", ".join(data.target_column)
    unit = "nats"
    if "regression" in data.task_type:
        unit = "variances of the targets" if classes else "squared units of the target"
    try:
        plots = plot_run(
            history, results.test, classes, report.get("confusion"), report.get("test_targets"), target, unit,
            "residues" if per_residue else "sequences",
        )  # fmt: skip
        for suffix, plot in plots.items():
            write_atomic((directory / PLOT).with_suffix(suffix), plot)
    except UserError as error:
        names = f"{HEAD}{tested} and {REPORT} (there is no {PLOT}: {error})"
    summary = ", ".join(f"{name} {value:.4g}" for name, value in test_metrics.items())
    epoch = f"best epoch {report['epoch']:.4g}" if results.best else ""
    print_line(": ".join(filter(None, [epoch, summary])))
    print_line(f"{names} are in {directory}")


def _predictions(
    test: tuple[Tensor, Tensor], split: Split, max_length: int, classes: Sequence[str], per_residue: bool
) -> str:
    """Return a table: file and line, sequence or residue, label and prediction, and the probability of each class.

    Several labels or targets have columns of their own.
    """
    from pandas import DataFrame

    values_RC, targets = test[0].float().cpu(), test[1].cpu()
    positions = [
        np.flatnonzero(is_labelled(each[:max_length])) if per_residue else np.zeros(1, np.int64)
        for each in split.targets
    ]
    frame = DataFrame({
        "row": np.repeat(split.locations, [len(each) for each in positions]),
        **({"residue": np.concatenate(positions) + 1} if per_residue else {"sequence": split.texts}),
    })  # fmt: skip
    if metrics.is_class(targets):
        names = np.array(classes)
        frame["label"], frame["prediction"] = names[targets], names[values_RC.argmax(1)]
        columns = {"probability": values_RC.softmax(1)}
    else:
        labels_RC, is_number = targets.reshape(values_RC.shape), targets.is_floating_point()
        columns = {"label": labels_RC.float().where(is_labelled(labels_RC), math.nan)}
        columns |= {"prediction": values_RC} if is_number else {"probability": values_RC.sigmoid()}
    for name, values in columns.items():
        frame[[f"{name}_{each}" for each in classes] or [name]] = values
    return frame.to_csv(index=False, float_format="%.7g")


def print_line(line: str) -> None:
    """Print a redacted line for the user."""
    print(redact_text(line), flush=True)
