# SPDX-License-Identifier: Apache-2.0
"""Convert keys of `trainer` that are fractions to numbers of batches; Lightning cannot, as the data has no length."""

import math
from dataclasses import replace

import lightning.pytorch as pl

from bionemo.data.data_module import SequenceData
from bionemo.data.loader import StepDataset, StepLoader


def resolve_fractions(trainer: pl.Trainer, data: SequenceData) -> None:
    """Replace fractions in a trainer for the splits that are open. A split is counted only if its key is a fraction.

    `trainer.limit_val_batches` and `limit_test_batches` are rounded down, to at least one batch. For a mixture, they
    are fractions of its largest source and apply to each source.
    `trainer.val_check_interval` is a fraction of `check_val_every_n_epoch` epochs, rounded down; a fraction that
    covers the whole run means its end.
    """
    config, replicas = data.trainer_config, data.config.data_parallel_size(trainer.world_size)
    for key, split, make_loaders in (
        ("limit_val_batches", "val", data.val_dataloader),
        ("limit_test_batches", "test", data.test_dataloader),
    ):
        limit = getattr(trainer, key)
        if isinstance(limit, float) and limit < 1 and split in data.datasets:
            batches = math.ceil(max(_count_batches(loader, replicas) for loader in make_loaders()))
            setattr(trainer, key, max(1, int(batches * limit)) if limit else 0)
    if not isinstance(trainer.val_check_interval, float) or "train" not in data.datasets:
        return
    epochs = trainer.val_check_interval * (config.check_val_every_n_epoch or 1)
    if epochs == (config.epochs if data.config.data.train.use_upsampling else 1):
        trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, 1  # all steps are one epoch of Lightning
        return
    interval = max(1, int(_count_batches(data.train_dataloader(), replicas) * epochs))
    trainer.val_check_interval = min(interval, config.max_steps) if config.max_steps > 0 else interval
    trainer.check_val_every_n_epoch = None  # count steps


def _count_batches(loader: StepLoader, replicas: int) -> float:
    """Return the number of batches of all replicas in one epoch; the last one may be a part of a batch."""
    steps: StepDataset = loader.dataset  # type: ignore[assignment]
    sampler = replace(steps.sampler, stream=replace(steps.sampler.stream, epochs=1))
    return sampler.count_rows() / (steps.collate.micro_batch_size * steps.num_micro_batches * replicas)
