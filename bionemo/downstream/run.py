# SPDX-License-Identifier: Apache-2.0
"""The story of a downstream run whose encoder is frozen: read, embed once, train a head, test, report."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import nn

from bionemo.config.schema import DownstreamConfig
from bionemo.config.schema.downstream import DownstreamDataConfig, HeadConfig
from bionemo.data.shards.ranges import shard_paths
from bionemo.downstream import frozen, report
from bionemo.downstream.features import Features, asked, compute
from bionemo.downstream.heads import SequenceHead, TokenHead
from bionemo.downstream.task import Columns, Example, Kind, classes_of, encode, read
from bionemo.errors import UserError
from bionemo.inference.model import TrainedModel
from bionemo.inference.open import load
from bionemo.inference.tokens import Limits, room

log = logging.getLogger(__name__)
SplitName = Literal["train", "val", "test"]


def columns_of(data: DownstreamDataConfig) -> Columns:
    """Where the task stands in its files.

    Raises:
        UserError: when there are several targets.
    """
    target, mask = _single("target_column", data.target_column), _single("mask_column", data.mask_column)
    if target is None:
        raise UserError("model.data.target_column names no column: give the one that holds the target")
    return Columns(data.task_type, data.sequence_column, target, mask)


def _single(key: str, given: str | list[str] | None) -> str | None:
    names = [given] if isinstance(given, str) else given or []
    if len(names) > 1:
        raise UserError(f"model.data.{key}={names}: one target at a time: start a run for each")
    return names[0] if names else None


def files_of(data: DownstreamDataConfig, name: SplitName) -> list[Path]:
    """Files of a split.

    Raises:
        UserError: naming what is missing.
    """
    return shard_paths(Path(data.dataset_path), name, getattr(data.dataset, name), ".csv")


def fine_tune_head(cfg: DownstreamConfig, directory: Path) -> None:
    """Train a head on the vectors of a model that stays as it is.

    Raises:
        UserError: for a model or data that cannot be used.
    """
    config, data = cfg.model, cfg.model.data
    if config.restore_encoder_path is None:
        raise UserError("missing value: give model.restore_encoder_path=..., the pretrained model")
    columns = columns_of(data)
    names: list[SplitName] = ["train", "val", *(["test"] if cfg.do_testing else [])]  # type: ignore[list-item]
    examples = {name: read(files_of(data, name), columns) for name in names}
    classes = _classes(data, columns, examples["train"])
    splits = {name: encode(each, columns, classes) for name, each in examples.items()}
    gpu = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    model = load(config.restore_encoder_path, "cuda" if gpu else "cpu", str(cfg.trainer.precision))
    with _features_in(directory) as place:
        limits = Limits(sequences=data.emb_batch_size)
        features: dict[str, Features] = {}
        for name, split in splits.items():
            with _progress(f"embedding {name}", len(split.texts)) as advance:
                features[name], cut = compute(model, split, columns.kind, limits, place / f"{name}.npy", advance)
            if cut:
                log.warning(
                    "%s: %d sequences are longer than the %d tokens that the model reads, and cut",
                    name,
                    cut,
                    room(model.network),
                )
        say(f"{cfg.name}: {', '.join(f'{len(f):,} {name} ({asked(f):,} labels)' for name, f in features.items())}")
        recipe = frozen.Recipe(
            _epochs(cfg), config.micro_batch_size, data.shuffle, config.seed, config.finetuning_optim,
            cfg.trainer.gradient_clip_val,
        )  # fmt: skip
        make = partial(make_head, config.downstream_task, columns.kind, model.hidden_size, len(classes))
        trained = frozen.train(make, features["train"], features["val"], recipe, model.device, _say_epoch)
        _finish(cfg, directory, model, trained, features, classes)


def make_head(config: HeadConfig, kind: Kind, hidden_size: int, classes: int) -> nn.Module:
    """A new head for a task."""
    if kind == "token-level-classification":
        return TokenHead(hidden_size, classes, config.cnn_dim, config.dropout)
    sizes = config.hidden_layer_size
    widths = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return SequenceHead(hidden_size, max(classes, 1), widths, config.dropout)


def _classes(data: DownstreamDataConfig, columns: Columns, train: list[Example]) -> tuple[str, ...]:
    if columns.kind == "regression":
        return ()
    return classes_of(train, columns, data.target_sizes[0] if data.target_sizes else None)


def _epochs(cfg: DownstreamConfig) -> int:
    if not cfg.trainer.max_epochs or cfg.trainer.max_epochs < 1:
        raise UserError(f"trainer.max_epochs={cfg.trainer.max_epochs}: a head is trained for 1 epoch or more")
    return cfg.trainer.max_epochs


def _finish(
    cfg: DownstreamConfig, directory: Path, model: TrainedModel, trained: frozen.Trained,
    features: dict[str, Features], classes: tuple[str, ...],
) -> None:  # fmt: skip
    """Keep the head, test it, and report."""
    best = trained.history[trained.best - 1]
    figures = {"name": cfg.name, "encoder": str(model.path), "epoch": trained.best}
    figures |= {name: value for name, value in best.items() if name.startswith("val_")}
    answers = targets = None
    if "test" in features:
        answers, targets = frozen.answers_of(trained.head, features["test"])
        figures |= {f"test_{name}": value for name, value in frozen.evaluate(trained.head, features["test"]).items()}
    told = {"classes": list(classes), "task_type": cfg.model.data.task_type, "encoder": str(model.path)}
    unfinished = directory / f".head.{os.getpid()}"
    save_file(trained.head.state_dict(), unfinished, {"task": json.dumps(told)})
    os.replace(unfinished, directory / "head.safetensors")
    report.write(directory, figures, trained.history, answers, targets, classes)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name.startswith("test_"))
    say(f"best epoch {trained.best}{': ' + shown if shown else ''}")
    say(f"head, report and picture are in {directory}")


def _say_epoch(figures: dict[str, float]) -> None:
    told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "epoch")
    say(f"epoch {figures['epoch']:.0f}  {told}")


@contextmanager
def _features_in(directory: Path) -> Iterator[Path]:
    """A place for vectors while they are needed."""
    place = directory / "features"
    try:
        place.mkdir(parents=True, exist_ok=True)
        yield place
    except OSError as error:
        raise UserError(
            f"{error.filename or place} cannot be written ({error.strerror}): choose another exp_dir"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def say(line: str) -> None:
    """Tell the user."""
    print(line, flush=True)
