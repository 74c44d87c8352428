# SPDX-License-Identifier: Apache-2.0
"""Lightning data module: opens the splits, makes their data loaders and tracks the training's stream position."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import xxhash
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.micro_batches import MicroBatches
from bionemo.config.schema import DataConfig, ModelConfig, TrainerConfig
from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.data.collate import Collator
from bionemo.data.dataset import Dataset, DatasetFactory
from bionemo.data.files import SplitName
from bionemo.data.loader import StepDataset, StepLoader
from bionemo.data.mixture import MixtureStream, Segment, change_shares
from bionemo.data.packing import pack, pad
from bionemo.data.sampler import DataPosition, GlobalBatchSampler, SampleStream
from bionemo.tokenizers import Vocabulary

log = logging.getLogger(__name__)
_RECORDS, _SOURCES = "training records", "the sources of model.data.mixture"
_MASKS = (  # keys of `model.data` of all families that determine the masks
    "modify_percent", "mask_percent", "perturb_percent", "mask_special_tokens", "masked_lm_prob", "encoder_mask",
    "decoder_mask", "mask_prob", "span_lambda",
)  # fmt: skip


def pads_dynamically(config: DataConfig) -> bool:
    """Return whether a micro-batch is padded to the length of its sequences instead of to a fixed number of tokens."""
    return config.dynamic_padding and not config.packing


class SequenceData(pl.LightningDataModule):
    """Training, validation and test data; each step of a loader consists of packed rows.

    `trainer_config` gives the number of epochs and the timeout of workers, `factory` opens the splits, and
    `micro_batches` divides the rows of each rank in a training step. `position` is the stream position of the next
    training step; the training module sets it after each step.
    """

    def __init__(
        self,
        config: ModelConfig,
        trainer_config: TrainerConfig,
        vocabulary: Vocabulary,
        factory: DatasetFactory,
        micro_batches: MicroBatches,
    ) -> None:
        super().__init__()
        self.config, self.trainer_config, self.vocabulary = config, trainer_config, vocabulary
        self.factory, self.micro_batches = factory, micro_batches
        self.position = DataPosition()
        self.segments: list[Segment] = []  # of a resumed mixture
        self.datasets: dict[SplitName, Dataset] = {}

    def dataset(self, name: SplitName) -> Dataset:
        """Return a split; the first call opens it and logs its notes."""
        if name not in self.datasets:
            self.datasets[name] = self.factory.open(self.config, self.vocabulary, name)
            for note in self.datasets[name].notes:
                log.warning(note)
        return self.datasets[name]

    def reference_losses(self) -> dict[str, float]:
        """Return baseline losses in nats per target token, by name. The splits of `fit` must be open."""
        batches = (batch for steps in self._evaluation_steps("val") for step in steps for batch in step.micro_batches)
        return self.factory.reference_losses(self.datasets["train"], self.datasets["val"], batches)

    def setup(self, stage: str) -> None:
        """Open the splits of a stage, so that errors in the data end the run before the model is built."""
        stages: dict[str, tuple[SplitName, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for name in stages.get(stage, ()):
            self.dataset(name)

    def train_dataloader(self) -> StepLoader:
        """Return a loader that starts at `position`."""
        return self._loader(self.training_steps(), self.config.data.train.num_workers)

    def training_steps(self, micro_batches: MicroBatches | None = None) -> StepDataset:
        """Return the training steps of this rank from `position` on; `micro_batches` replaces those of the run."""
        data = self.config.data
        return self.steps("train", data.shuffle, self._epochs(), micro_batches or self.micro_batches, self.position)

    def val_dataloader(self) -> list[StepLoader]:
        """Return a loader that reads every record once and pads the last step; for a mixture, one for each source.

        Masks do not change between epochs. Records are in the order of the files; packing changes the order within a
        packing window.
        """
        return [self._loader(steps, workers=0) for steps in self._evaluation_steps("val")]

    def test_dataloader(self) -> list[StepLoader]:
        """Return loaders like those of the validation data."""
        return [self._loader(steps, workers=0) for steps in self._evaluation_steps("test")]

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of a mixture, in the order of the loaders for evaluation; [] for a single data set."""
        mixture = next(iter(self.datasets.values())).mixture
        return list(mixture.records) if mixture else []

    def _evaluation_steps(self, name: SplitName) -> list[StepDataset]:
        rows = self.micro_batches.size
        if self.config.micro_batch_size == "auto":  # about as many rows on every device
            rows = min(rows, self.micro_batches.limit(self.config.replica_batch_size).size)
        mixture, micro_batches = self.dataset(name).mixture, MicroBatches(rows, 1)
        parts = mixture.records.values() if mixture else [self.dataset(name).records]
        return [
            self.steps(name, shuffle=False, epochs=1, micro_batches=micro_batches, start=DataPosition(), records=part)
            for part in parts
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the stream position and the settings that determine the stream of samples."""
        return {
            "position": asdict(self.position), "stream": self._stream(), "mixture": self._segments(),
            "rows": self._step_rows(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the stream position. If the stream has changed, continue after as many samples of the same epoch."""
        self.position, old = _read_position(state), state["stream"]
        if self.trainer is not None and not self.trainer.training:  # the training data need not exist
            return
        rows = self._step_rows()
        if rows and state.get("rows") not in (None, rows):
            log.warning(
                "a step has %s rows, but %s before (other devices, micro-batches or model.global_batch_size): set "
                "model.global_batch_size=%s to train as before", rows, state["rows"], state["rows"],
            )  # fmt: skip
        stream = self._stream()
        changed = [key for key, value in stream.items() if key in old and old[key] != value]
        records, epochs = len(self.dataset("train").records), self._epochs()
        if epochs is not None and self.position.window_end > epochs * records:
            changed.append("trainer.max_epochs")
        if changed:
            epoch, used = divmod(self.position.stream_samples, old.get(_RECORDS, records))
            log.warning(
                "%s: different from the checkpoint; training continues after %s samples of epoch %s, in a new order",
                ", ".join(changed), f"{used:,}", f"{epoch + 1:,}",
            )  # fmt: skip
            start = epoch * records + min(used, records)
            self.position = replace(self.position, window_start=start, row=0, window_end=0, stream_samples=start)
        mixture = self.dataset("train").mixture
        if mixture and old.get(_SOURCES) == stream[_SOURCES]:
            used = max(self.position.window_start, self.position.window_end)
            self.segments = change_shares(state["mixture"], mixture.quotas, used, records)
            if state["mixture"][-1][1] != mixture.quotas:
                log.warning(
                    "the weights in model.data.mixture are different from the checkpoint; they apply from epoch %s of "
                    "the mixture on", f"{self.segments[-1][0] // records + 1:,}",
                )  # fmt: skip

    def _segments(self) -> list[Segment]:
        mixture = self.dataset("train").mixture
        return self.segments or ([(0, mixture.quotas)] if mixture else [])

    def _stream(self) -> dict[str, Any]:
        data, dataset, mixture = self.config.data, self.dataset("train"), self.dataset("train").mixture
        return {
            "model.data.train.seed": data.train.seed,
            **{f"model.data.{key}": getattr(data, key) for key in ("shuffle", "packing", "packing_window")},
            "model.seq_length": self.config.seq_length,
            _RECORDS: len(dataset.records),
            **({_SOURCES: {name: len(each) for name, each in mixture.records.items()}} if mixture else {}),
            **dataset.fingerprint,
        }

    def validation_identity(self, limit: float | int) -> str:
        """Return a digest of what determines the metrics of a validation, apart from the model.

        `limit` is `trainer.limit_val_batches`.
        """
        dataset, data = self.dataset("val"), self.config.data
        masks = [getattr(data, key, None) for key in _MASKS]
        known: list[Any] = [self.config.seq_length, data.val.seed, dataset.fingerprint, len(dataset.records), masks]
        if limit != 1.0 or isinstance(limit, int):  # batches, which depend on their size and order
            ranks = self.trainer.world_size if self.trainer else 1
            known += [limit, data.packing, data.packing_window, self.micro_batches.size, ranks]
        content = xxhash.xxh3_128(repr(known).encode())
        content.update(np.ascontiguousarray(dataset.lengths).data)
        return content.hexdigest()

    def steps(
        self, name: SplitName, shuffle: bool, epochs: int | None, micro_batches: MicroBatches, start: DataPosition,
        records: NDArray[np.int64] | None = None,
    ) -> StepDataset:  # fmt: skip
        """Return the steps of this rank in a split, from a stream position on.

        `epochs` None: endless. `records` replaces the records in use of the split; those of a mixture are not weighted
        then.
        """
        strategy = self.trainer.strategy if self.trainer else None
        rank, ranks = getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
        size, count = micro_batches.size, micro_batches.count
        sampler = self._sampler(name, shuffle, epochs, size * ranks * count, records)
        padding = pads_dynamically(self.config.data)
        collate = Collator(self.dataset(name), size, self.vocabulary.pad_id, padding)
        return StepDataset(sampler, collate, start, rank, ranks, count)

    def _sampler(
        self, name: SplitName, shuffle: bool, epochs: int | None, global_batch_size: int,
        records: NDArray[np.int64] | None = None,
    ) -> GlobalBatchSampler:  # fmt: skip
        data, dataset = self.config.data, self.dataset(name)
        seed, mixture = getattr(data, name).seed, dataset.mixture
        stream = SampleStream(dataset.records if records is None else records, seed, shuffle, epochs, dataset.clusters)
        if mixture and records is None:
            sources, segments = mixture.records, self._segments()
            stream = MixtureStream(dataset.records, seed, shuffle, epochs, sources=sources, segments=segments)
        return GlobalBatchSampler(
            stream=stream,
            lengths=dataset.lengths,
            pack=pack if data.packing else pad,
            max_length=self.config.seq_length,
            global_batch_size=global_batch_size,
            packing_window=data.packing_window,
            drop_last=data.drop_last and name == "train",
            token_counts=dataset.token_counts,
        )

    def global_batch_size(self, world_size: int) -> int:
        """Return the number of rows in a training step of all ranks."""
        return self.micro_batches.size * self.micro_batches.count * self.config.data_parallel_size(world_size)

    def _step_rows(self) -> int | None:
        """Return the number of rows in a training step of this run; None outside of a run."""
        if self.trainer is None:
            return None
        ranks: int = getattr(self.trainer.strategy, "data_parallel_size", 1)
        return self.micro_batches.size * self.micro_batches.count * ranks

    def check_steps(self, world_size: int) -> None:
        """Raise a UserError if incomplete steps are omitted and the training data fills no step of all ranks."""
        data, epochs = self.config.data, self._epochs()
        if not data.drop_last or epochs is None:
            return
        size = self.global_batch_size(world_size)
        sampler = self._sampler("train", data.shuffle, epochs, size)
        if next(sampler.batches(DataPosition()), None) is None:
            raise UserError(
                f"model.data.drop_last=True leaves no complete step: {len(sampler.stream.records):,} training "
                f"sequences in {epochs} epoch(s) give {sampler.count_rows():,} rows, but a step needs "
                f"{size:,} ({self.micro_batches.size} in a micro-batch x {self.config.data_parallel_size(world_size)} "
                f"ranks x {self.micro_batches.count} micro-batches): use fewer "
                "rows per step, or set model.data.drop_last=False or model.data.train.use_upsampling=True"
            )

    def _epochs(self) -> int | None:
        return self.trainer_config.epochs if self.config.data.train.use_upsampling else 1

    def _loader(self, steps: StepDataset, workers: int) -> StepLoader:
        return StepLoader(
            steps,
            workers=min(workers, os.cpu_count() or 1),  # the order of the steps does not depend on it
            timeout=duration_in_seconds("trainer.rank_timeout", self.trainer_config.rank_timeout),
            pin_memory=self.config.data.pin_memory,
        )


def _read_position(state: dict[str, Any]) -> DataPosition:
    """Return the stream position of a checkpoint; earlier versions saved the number of the window."""
    position = dict(state["position"])
    if (window := position.pop("window", None)) is not None:
        position["window_start"] = window * state["stream"].get("model.data.packing_window", 0)
        position["stream_samples"] = position["consumed_samples"]
    return DataPosition(**position)
