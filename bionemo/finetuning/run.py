# SPDX-License-Identifier: Apache-2.0
"""The story of a downstream run whose encoder is frozen: read, embed once, train a head, test, report."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bionemo.common.errors import UserError
from bionemo.common.files import create_owned, remove_owned
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.build import head_of, read_splits
from bionemo.finetuning.features import Features, asked, compute
from bionemo.finetuning.output_files import identity_of_run, is_complete
from bionemo.finetuning.results import Outcome, keep, say
from bionemo.inference.batching import Limits, room
from bionemo.inference.identity import of_model
from bionemo.inference.load import load
from bionemo.inference.progress import progress
from bionemo.interop.nemo import make_directories

log = logging.getLogger(__name__)
_KIND = "vectors of a frozen model"
_NAMES = r"(train|val|test)\.npy|\..+\.tmp"


def fine_tune_head(cfg: DownstreamConfig, directory: Path) -> None:
    """Train a head on the vectors of a model that stays as it is.

    Raises:
        UserError: for a model or data that cannot be used, or a directory with another result.
        OSError: when something cannot be written.
    """
    config, data, epochs = cfg.model, cfg.model.data, _epochs(cfg)
    splits, classes = read_splits(data, "model.data", ["train", "val", *(["test"] if cfg.do_testing else [])])
    gpu = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    model = load(
        str(config.restore_encoder_path), "cuda" if gpu else "cpu", str(cfg.trainer.precision), config.seq_length
    )
    run = identity_of_run(
        cfg, of_model(model.path, model.network.config.max_position_embeddings, model.network.vocabulary), splits
    )
    if is_complete(directory, run):
        say(f"{cfg.name}: {directory} holds the result of this command already")
        return
    make_directories(directory)  # not before the data and the model have been seen to fit
    with _features_in(directory) as place:
        limits = Limits(sequences=data.emb_batch_size)
        features: dict[str, Features] = {}
        for name, split in splits.items():
            with progress(f"embedding {name}", len(split.texts), "sequences") as advance:
                features[name], cut = compute(model, split, data.task_type, limits, place / f"{name}.npy", advance)
            if cut:
                log.warning(
                    "%s: %d sequences are longer than the %d tokens that the model reads, and cut",
                    name,
                    cut,
                    room(model.network),
                )
        say(f"{cfg.name}: {', '.join(f'{len(f):,} {name} ({asked(f):,} labels)' for name, f in features.items())}")
        recipe = linear_probe.Recipe(
            epochs, config.micro_batch_size, data.shuffle, config.seed, config.finetuning_optim,
            cfg.trainer.gradient_clip_val,
        )  # fmt: skip
        make = head_of(config.downstream_task, data.task_type, model.hidden_size, len(classes))
        trained = linear_probe.train(make, features["train"], features["val"], recipe, model.device, _say_epoch)
        test = linear_probe.answers_of(trained.head, features["test"]) if "test" in features else None
        outcome = Outcome(model.path, trained.head, trained.best, trained.history, test, run)
        keep(outcome, cfg, directory, classes)


def _epochs(cfg: DownstreamConfig) -> int:
    if not cfg.trainer.max_epochs or cfg.trainer.max_epochs < 1:
        raise UserError(f"trainer.max_epochs={cfg.trainer.max_epochs}: a head is trained for 1 epoch or more")
    return cfg.trainer.max_epochs


def _say_epoch(figures: dict[str, float]) -> None:
    told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "epoch")
    say(f"epoch {figures['epoch']:.0f}  {told}")


@contextmanager
def _features_in(directory: Path) -> Iterator[Path]:
    """A directory for vectors while they are needed.

    Raises:
        UserError: when something else has its name.
        OSError: when it cannot be made.
    """
    place = directory / "features"
    create_owned(place, _KIND)
    try:
        yield place
    finally:
        try:
            remove_owned(place, _KIND, _NAMES)
        except (UserError, OSError) as error:  # the error inside, or the result, counts more
            log.warning("%s is not needed any more and could not be deleted: %s", place, error)
