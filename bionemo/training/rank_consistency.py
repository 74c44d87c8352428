# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks have the same versions, configuration, checkpoint and data; decisions common to all ranks."""

import hashlib
import platform
import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_text
from bionemo.common.secret_names import is_secret_name
from bionemo.common.version import __version__
from bionemo.config.schema import RunConfig
from bionemo.data.dataset import Dataset


def max_at_logged_steps(trainer: pl.Trainer, pl_module: Any, value: int) -> int:
    """Return the maximum over all ranks at steps that are logged, when ranks synchronize anyway, and 0 at others.

    With one rank, return the value at every step.
    """
    if trainer.world_size == 1:
        return value
    if trainer.global_step % pl_module.trainer_config.log_every_n_steps:
        return 0
    return int(trainer.strategy.reduce(torch.tensor(value, device=pl_module.device), reduce_op="max"))


class RankConsistencyCheck(pl.Callback):
    """Ends a run whose ranks differ in version, configuration, checkpoint or data, before the model is built.

    Without this check, such ranks would train on different data without an error, or wait for each other forever.
    """

    def __init__(self, cfg: RunConfig, resume_path: Path | None) -> None:
        self._common = {
            "bionemo": __version__,
            "torch": torch.__version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
            **dict(flatten_config(asdict(cfg))),
            "the checkpoint to resume from": str(resume_path),
        }

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare the ranks; process groups and datasets exist now."""
        if trainer.world_size > 1:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            datasets = {f"the {name} data": _summarize(dataset) for name, dataset in sorted(data.datasets.items())}
            check_equal_on_all_ranks(trainer, self._common | datasets)


def check_equal_on_all_ranks(trainer: pl.Trainer, values: Mapping[str, str]) -> None:
    """Check that all ranks have the same values.

    Raises:
        UserError: on all ranks, if values differ; names the first differing key of the lowest rank with a difference.
    """
    strategy, num_ranks = trainer.strategy, trainer.world_size
    reference: Mapping[str, str] = strategy.broadcast(values)
    keys = [key for key in {**reference, **values} if reference.get(key) != values.get(key)]
    differs = torch.tensor([num_ranks - trainer.global_rank if keys else 0, bool(keys)], device=strategy.root_device)
    lowest = num_ranks - int(strategy.reduce(differs[0].clone(), reduce_op="max"))
    others = int(strategy.reduce(differs[1].clone(), reduce_op="sum")) - 1
    if lowest == num_ranks:
        return
    key = keys[0] if keys else ""
    key, value, host = strategy.broadcast((key, values.get(key, "not set"), socket.gethostname()), src=lowest)
    rank = f"rank {lowest} (host {host})" + (f" and {others} more ranks" if others else "")
    if is_secret_name(key):
        difference = f"differs between rank 0 and {rank}"
    else:
        difference = f"is {reference.get(key, 'not set')} on rank 0, {value} on {rank}"
    raise UserError(f"{key} {difference}: all ranks need the same versions, configuration, checkpoint and data")


def flatten_config(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of nested dicts as text; secrets are replaced by their SHA-256."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from flatten_config(value, f"{key}.{name}" if key else str(name))
    else:
        text = str(tree)
        is_secret = is_secret_name(key) or redact_text(text) != text
        yield key, hashlib.sha256(text.encode()).hexdigest() if is_secret else text


def _summarize(dataset: Dataset) -> str:
    """Describe a dataset by its size and a checksum of lengths, order and fingerprint."""
    lengths = np.ascontiguousarray(dataset.lengths)
    records = np.ascontiguousarray(dataset.records)
    checksum = zlib.crc32(repr(dataset.fingerprint).encode(), zlib.crc32(records.data, zlib.crc32(lengths.data)))
    return f"{len(records):,} sequences, {int(lengths.sum(dtype=np.int64)):,} tokens, checksum {checksum:08x}"
