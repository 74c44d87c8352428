# SPDX-License-Identifier: Apache-2.0
"""The data of a run: opens the splits, deals steps to ranks and workers, remembers how far training is."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import IterableDataset, get_worker_info

from bionemo.common.errors import UserError
from bionemo.config.durations import seconds
from bionemo.config.schema import DataConfig, ModelConfig, TrainerConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator, Parts, assemble, disassemble
from bionemo.data.dataset import KindOfSamples, Samples
from bionemo.data.files import SplitName
from bionemo.data.loader import StepLoader, with_failures
from bionemo.data.packing import pack, pad
from bionemo.data.sampler import Position, SampleOrder, StepSampler
from bionemo.tokenizers import Vocabulary

_AT_ONCE = 1 << 16  # tokens built in one go: enough to outweigh calls, few enough to stay in the cache
log = logging.getLogger(__name__)

# A worker must not collect what it has inherited: gloo, for one, would join threads that are not there, and hang.
os.register_at_fork(after_in_child=gc.freeze)


@dataclass(frozen=True)
class TrainStep:
    """What one rank computes in one step, and where the data stands after it."""

    micro_batches: list[PackedBatch]
    after: Position

    def to(self, device: torch.device | str) -> TrainStep:
        """Move to a device."""
        return replace(self, micro_batches=[batch.to(device) for batch in self.micro_batches])

    def pin_memory(self) -> TrainStep:
        """Put into page-locked memory."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel from a worker as a few bytes: torch would open a file for every tensor, which takes longer."""
        return _unpack, ([disassemble(batch) for batch in self.micro_batches], self.after)


def _unpack(parts: list[Parts], after: Position) -> TrainStep:
    return TrainStep([assemble(part) for part in parts], after)


@dataclass(frozen=True)
class Steps(IterableDataset):
    """The steps of one rank, from a position on.

    Workers take turns, and the loader collects them in turns: the order is that of a single process. Each plans every
    window again, which costs a fifth of building all its batches. Several steps are built at a time, for speed alone:
    no draw depends on what a record is built with.
    """

    sampler: StepSampler
    collate: Collator
    start: Position
    rank: int
    ranks: int
    micro_batches: int

    def __iter__(self) -> Iterator[TrainStep]:
        """Yield this worker's steps of this rank."""
        return with_failures(self._steps())

    def _steps(self) -> Iterator[TrainStep]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        size = self.collate.rows
        first = [(index * self.ranks + self.rank) * size for index in range(self.micro_batches)]
        at_once = max(1, _AT_ONCE // (self.micro_batches * size * sum(filter(None, self.collate.samples.row))))
        turns = islice(self.sampler.steps(self.start), worker, None, workers)
        while steps := list(islice(turns, at_once)):
            batches = iter(self.collate.build([step.rows[row : row + size] for step in steps for row in first]))
            for step in steps:
                yield TrainStep(list(islice(batches, self.micro_batches)), step.after)

    def __hash__(self) -> int:
        return id(self)


def compact(config: DataConfig) -> bool:
    """Whether a micro-batch is so many sequences, with as many tokens as they have, instead of so many tokens."""
    return config.dynamic_padding and not config.packing


class SequenceData(pl.LightningDataModule):
    """Train, validation and test samples as packed steps.

    Args:
        config: of the model.
        trainer_config: says how many micro-batches make a step, and for how long.
        vocabulary: of the model.
        kind: of the samples.
    """

    def __init__(
        self, config: ModelConfig, trainer_config: TrainerConfig, vocabulary: Vocabulary, kind: KindOfSamples
    ) -> None:
        super().__init__()
        self.config, self.trainer_config, self.vocabulary, self.kind = config, trainer_config, vocabulary, kind
        self.position = Position()
        self.open_samples: dict[SplitName, Samples] = {}

    def samples(self, name: SplitName) -> Samples:
        """Open a split on first use, and say once what there is to say about it."""
        if name not in self.open_samples:
            self.open_samples[name] = self.kind.open(self.config, self.vocabulary, name)
            for notice in self.open_samples[name].notices:
                log.warning(notice)
        return self.open_samples[name]

    def reference_losses(self) -> dict[str, float]:
        """Losses to hold a run's own against, in nats per asked token."""
        train, val = self.samples("train"), self.samples("val")
        steps = self.steps("val", shuffle=False, epochs=1, micro_batches=1, start=Position())
        batches = (batch for step in steps for batch in step.micro_batches)
        return self.kind.reference_losses(train, val, batches)

    def setup(self, stage: str) -> None:
        """Open what the stage needs before anything is built, so that bad data ends the run early."""
        for name in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ()):
            self.samples(name)  # type: ignore[arg-type]

    def train_dataloader(self) -> StepLoader:
        """Endless, or as many epochs as the trainer is told."""
        data = self.config.data
        return self._loader(
            "train", data.shuffle, self._epochs(), self._micro_batches(), self.position, data.train.num_workers
        )

    def val_dataloader(self) -> StepLoader:
        """Every sequence once, in order, the last step filled up; masks are the same at every validation."""
        return self._loader("val", False, 1, 1, Position(), 0)

    def test_dataloader(self) -> StepLoader:
        """As validation."""
        return self._loader("test", False, 1, 1, Position(), 0)

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, and in which stream of samples: Lightning saves it with the checkpoint."""
        module = self.trainer.lightning_module if self.trainer else None
        return {"position": asdict(getattr(module, "position", self.position)), "stream": self._stream()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the last step that was trained on.

        When the stream is another one, a row in the middle of a window means nothing in it: the next window begins.
        """
        self.position = Position(**state["position"])
        if changed := [key for key, value in self._stream().items() if state["stream"].get(key) != value]:
            log.warning("%s: not as in the checkpoint; going on with the next window of samples", ", ".join(changed))
            self.position = replace(self.position, window=self.position.window + 1, row=0)
        if self.trainer is not None:
            module: Any = self.trainer.lightning_module
            module.position = self.position

    def _stream(self) -> dict[str, Any]:
        """All that decides which samples a position stands for."""
        data = self.config.data
        keys = ("shuffle", "packing", "packing_window")
        return {
            "model.data.train.seed": data.train.seed,
            **{f"model.data.{key}": getattr(data, key) for key in keys},
            "model.seq_length": self.config.seq_length,
            **self.samples("train").identity,
        }

    def steps(self, name: SplitName, shuffle: bool, epochs: int | None, micro_batches: int, start: Position) -> Steps:
        """The steps of a split for this rank."""
        data, samples = self.config.data, self.samples(name)
        rank, ranks = self._rank_and_size()
        sampler = self._sampler(name, shuffle, epochs, self.config.micro_batch_size * ranks * micro_batches)
        collate = Collator(samples, self.config.micro_batch_size, self.vocabulary.pad_id, compact(data))
        return Steps(sampler, collate, start, rank, ranks, micro_batches)

    def _sampler(self, name: SplitName, shuffle: bool, epochs: int | None, rows_per_step: int) -> StepSampler:
        data, samples = self.config.data, self.samples(name)
        return StepSampler(
            order=SampleOrder(samples.records, getattr(data, name).seed, shuffle, epochs, samples.clusters),
            lengths=samples.lengths,
            plan=pack if data.packing else pad,
            capacity=self.config.seq_length,
            rows_per_step=rows_per_step,
            window=data.packing_window,
            drop_last=data.drop_last and name == "train",
            counted=samples.counted,
        )

    def check_steps(self, world_size: int) -> None:
        """See that the training data is enough for a step of all processes.

        Raises:
            UserError: incomplete steps are left out, and no step is complete.
        """
        data = self.config.data
        epochs = self._epochs()
        if not data.drop_last or epochs is None:
            return
        ranks = world_size // (self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size)
        rows = self.config.micro_batch_size * ranks * self._micro_batches()
        sampler = self._sampler("train", data.shuffle, epochs, rows)
        if next(sampler.steps(Position()), None) is None:
            batch, accumulate = self.config.micro_batch_size, self._micro_batches()
            raise UserError(
                f"model.data.drop_last=True leaves no step: {len(sampler.order.records):,} training sequences, read "
                f"{epochs} time(s), fill {sampler.count_rows():,} rows, but a step has {rows:,} ("
                f"model.micro_batch_size={batch} x {ranks} ranks x {accumulate} micro-batches): lower "
                "model.micro_batch_size, or set model.data.drop_last=False or model.data.train.use_upsampling=True"
            )

    def _epochs(self) -> int | None:
        """How often training goes through its data; None: as often as it needs."""
        return self.trainer_config.max_epochs if self.config.data.train.use_upsampling else 1

    def _micro_batches(self) -> int:
        """Micro-batches of a training step on each rank."""
        return self.trainer_config.accumulate_grad_batches or 1

    def _loader(
        self, name: SplitName, shuffle: bool, epochs: int | None, micro_batches: int, start: Position, workers: int
    ) -> StepLoader:
        workers = min(workers, os.cpu_count() or 1)  # more would only take turns; the stream stays the same
        return StepLoader(
            self.steps(name, shuffle, epochs, micro_batches, start),
            workers=workers,
            patience=seconds("trainer.rank_timeout", self.trainer_config.rank_timeout),
            pin_memory=self.config.data.pin_memory,
        )

    def _rank_and_size(self) -> tuple[int, int]:
        strategy = self.trainer.strategy if self.trainer else None
        return getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
