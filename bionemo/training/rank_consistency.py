# SPDX-License-Identifier: Apache-2.0
"""What all ranks must have in common from the start, and do at the same step."""

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
from bionemo.data.dataset import Samples


def any_rank(trainer: pl.Trainer, pl_module: Any, value: int) -> int:
    """Give all ranks the highest value of any, at steps whose figures are logged, when ranks wait anyway.

    At the other steps of several ranks the answer is 0: nothing is decided.
    """
    if trainer.world_size == 1:
        return value
    if trainer.global_step % pl_module.trainer_config.log_every_n_steps:
        return 0
    return int(trainer.strategy.reduce(torch.tensor(value, device=pl_module.device), reduce_op="max"))


class Agreement(pl.Callback):
    """Ends a run whose ranks differ in version, configuration, checkpoint or data, before the model is built.

    Such ranks train on without an error, each on something else, or wait for each other for ever.
    """

    def __init__(self, cfg: RunConfig, start: Path | None) -> None:
        self._common = {
            "bionemo": __version__,
            "torch": torch.__version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
            **dict(flat(asdict(cfg))),
            "the checkpoint to go on from": str(start),
        }

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare; the process groups are there, and so is the data."""
        if trainer.world_size > 1:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            held = {f"the {name} data": of_data(samples) for name, samples in data.open_samples.items()}
            same_everywhere(trainer, self._common | held)


def same_everywhere(trainer: pl.Trainer, facts: Mapping[str, str]) -> None:
    """See that all ranks hold the same values; those of rank 0 travel to all, and so does the first difference.

    Raises:
        UserError: on all ranks, naming the first key that differs on the lowest rank where one does.
    """
    strategy, me, ranks = trainer.strategy, trainer.global_rank, trainer.world_size
    first: Mapping[str, str] = strategy.broadcast(facts)
    different = [key for key in {**first, **facts} if first.get(key) != facts.get(key)]
    here = torch.tensor([ranks - me if different else 0, bool(different)], device=strategy.root_device)
    lowest = ranks - int(strategy.reduce(here[0].clone(), reduce_op="max"))
    others = int(strategy.reduce(here[1].clone(), reduce_op="sum")) - 1
    if lowest == ranks:
        return
    key = different[0] if different else ""
    key, value, host = strategy.broadcast((key, facts.get(key, "not set"), socket.gethostname()), src=lowest)
    there = f"rank {lowest} (host {host})" + (f" and {others} more ranks" if others else "")
    said = (
        f"differs between rank 0 and {there}"
        if _is_hidden(key)
        else f"is {first.get(key, 'not set')} on rank 0, {value} on {there}"
    )
    raise UserError(f"{key} {said}: all ranks need the same versions, configuration, checkpoint and data")


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Give the leaves of nested dicts under dotted keys, as text; of secrets, what cannot be read."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    else:
        text = str(tree)
        hidden = _is_hidden(key) or redact_text(text) != text
        yield key, hashlib.sha256(text.encode()).hexdigest() if hidden else text


def of_data(samples: Samples) -> str:
    """What tells data of the same name apart: how much there is, and in which order."""
    lengths = np.ascontiguousarray(samples.lengths)
    taken = np.ascontiguousarray(samples.records)
    checksum = zlib.crc32(repr(samples.identity).encode(), zlib.crc32(taken.data, zlib.crc32(lengths.data)))
    return f"{len(taken):,} sequences, {int(lengths.sum(dtype=np.int64)):,} tokens, checksum {checksum:08x}"


def _is_hidden(key: str) -> bool:
    return is_secret_name(key)
