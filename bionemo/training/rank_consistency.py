# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks have the same directories, versions, configuration, checkpoint and data; common decisions."""

import hashlib
import platform
import socket
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist

from bionemo.common.errors import UserError
from bionemo.common.redaction import is_secret_name, known_secrets, redact_text
from bionemo.common.version import __version__
from bionemo.config.schema import RunConfig
from bionemo.data.dataset import Dataset

_VISIBLE_SECONDS = 10.0  # within which a network file system shows a new file to all hosts


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
    """Ends a run whose ranks differ in directories, version, configuration, checkpoint or data, before the first step.

    Without this check, such ranks would train on different data without an error, wait for each other forever, or
    fail at the first checkpoint.
    """

    def __init__(self, cfg: RunConfig, resume_path: Path | None, directories: Sequence[Path]) -> None:
        self._directories = directories
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
            check_shared(trainer, self._directories)
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            datasets = {f"the {name} data": _summarize(dataset) for name, dataset in sorted(data.datasets.items())}
            check_equal_on_all_ranks(trainer, self._common | datasets)


def check_shared(trainer: pl.Trainer, directories: Sequence[Path]) -> None:
    """Check that every rank sees the files that rank 0 writes to the directories of the run, which exist on all hosts.

    Raises:
        UserError: on all ranks, if a rank does not see a new file of rank 0.
        OSError: on rank 0, if it cannot write.
    """
    for directory in directories:
        path: Path = directory / f".shared-test-{uuid.uuid4().hex}"
        if trainer.is_global_zero:
            path.touch()
        path = trainer.strategy.broadcast(path)  # after rank 0 has written it
        ranks = _all_gather((socket.gethostname(), _appears(path)))
        if trainer.is_global_zero:
            path.unlink(missing_ok=True)
        for rank, (host, appears) in enumerate(ranks):
            if not appears:
                raise UserError(
                    f"exp_manager.exp_dir: {directory} is not the same directory on host {ranks[0][0]} (rank 0) and "
                    f"host {host} (rank {rank}): choose a directory on a file system that all machines share"
                )


def _appears(path: Path) -> bool:
    until = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def check_equal_on_all_ranks(trainer: pl.Trainer, values: Mapping[str, str]) -> None:
    """Check that all ranks have the same values.

    Raises:
        UserError: on all ranks, if values differ; names the first differing key of the lowest rank with a difference.
    """
    reference: Mapping[str, str] = trainer.strategy.broadcast(values)
    different = [key for key in {**reference, **values} if reference.get(key) != values.get(key)][:1]
    found = [(key, values.get(key, "not set"), socket.gethostname()) for key in different]
    ranks = [(rank, *each[0]) for rank, each in enumerate(_all_gather(found)) if each]
    if not ranks:
        return
    lowest, key, value, host = ranks[0]
    rank = f"rank {lowest} (host {host})" + (f" and {len(ranks) - 1} more ranks" if len(ranks) > 1 else "")
    difference = f"is {reference.get(key, 'not set')} on rank 0, {value} on {rank}"
    if is_secret_name(key):
        difference = f"differs between rank 0 and {rank}"
    raise UserError(f"{key} {difference}: all ranks need the same versions, configuration, checkpoint and data")


def _all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def flatten_config(tree: Any, key: str = "", secrets: Sequence[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of nested dicts as text; secrets are replaced by their SHA-256."""
    secrets = known_secrets() if secrets is None else secrets
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from flatten_config(value, f"{key}.{name}" if key else str(name), secrets)
    else:
        text = str(tree)
        is_secret = is_secret_name(key) or redact_text(text, secrets) != text
        yield key, hashlib.sha256(text.encode()).hexdigest() if is_secret else text


def _summarize(dataset: Dataset) -> str:
    """Describe a dataset by its size and a checksum of lengths, order and fingerprint."""
    lengths = np.ascontiguousarray(dataset.lengths)
    records = np.ascontiguousarray(dataset.records)
    checksum = zlib.crc32(repr(dataset.fingerprint).encode(), zlib.crc32(records.data, zlib.crc32(lengths.data)))
    return f"{len(records):,} sequences, {int(lengths.sum(dtype=np.int64)):,} tokens, checksum {checksum:08x}"
