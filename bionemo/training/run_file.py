# SPDX-License-Identifier: Apache-2.0
"""`run.json` in the log directory: what a start of a run trains, how far it came and how it ended."""

import json
import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from bionemo.common.cpu import read_cpu_fields
from bionemo.common.errors import signal_name
from bionemo.common.files import without_nan, write_atomic
from bionemo.common.redaction import redact_text
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData, pads_dynamically
from bionemo.megatron.precision import Precision
from bionemo.training.progress import read_step
from bionemo.training.signals import Signals

FILE_NAME = "run.json"
_LONGEST = 200  # letters of an error
log = logging.getLogger(__name__)


class RunFile(pl.Callback):
    """Writes `run.json` at the start, at each validation and at the end.

    The file of an earlier start is in `run_0`, `run_1` and so on, see `experiment/run_files.py`.
    """

    def __init__(self, directory: Path, signals: Signals) -> None:
        self._path, self._signals = directory / FILE_NAME, signals
        self._content: dict[str, Any] = {}

    def begin(
        self, cfg: RunConfig, trainer: pl.Trainer, parameters: int, precision: Precision, data: SequenceData,
        resume_path: Path | None, reference_losses: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Set the facts that are known before the training starts."""
        tokens = data.global_batch_size(trainer.world_size) * cfg.model.seq_length
        self._data = data
        self._content = {
            "name": redact_text(cfg.name),
            "parameters": parameters,
            "precision": precision.name,
            "devices": trainer.world_size,
            "device": torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else "cpu",
            "host": platform.node(),
            "cpu": read_cpu_fields().get("model name", platform.machine()),
            "versions": {"Python": platform.python_version(), "torch": torch.__version__},
            "directory": str(Path.cwd()),  # in which relative paths begin
            "validation": data.validation_identity(cfg.trainer.limit_val_batches),
            "records": {name: len(data.dataset(name).records) for name in ("train", "val")},
            "tokens_per_step": None if pads_dynamically(cfg.model.data) else tokens,
            "max_steps": trainer.max_steps,
            "resumed_from": redact_text(str(resume_path)) if resume_path else None,
            "first_step": read_step(resume_path) if resume_path else 0,
            "reference_losses": dict(reference_losses),
            "begin": time.time(),
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write the facts."""
        self._content["micro_batches"] = asdict(self._data.micro_batches)
        self._write(trainer, None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write step and metrics."""
        if not trainer.sanity_checking:
            self._write(trainer, None)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Write that the training ended, or the signal that ended it."""
        if stage == "fit":
            self._write(trainer, "finished")

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the error that ended the training."""
        self._write(trainer, redact_text(f"{type(exception).__name__}: {exception}")[:_LONGEST])

    def _write(self, trainer: pl.Trainer, end: str | None) -> None:
        if not trainer.is_global_zero or not self._content:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._content |= {"step": trainer.global_step, "metrics": metrics, "updated": time.time(), "ended": end}
        if end and self._signals.received:
            self._content["ended"] = f"stopped by {signal_name(self._signals.received)}"
        try:
            write_atomic(self._path, json.dumps(without_nan(self._content), indent=1) + "\n")
        except OSError as error:  # training continues
            log.warning("%s cannot be written (%s)", self._path, error.strerror or error)
