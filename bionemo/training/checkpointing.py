# SPDX-License-Identifier: Apache-2.0
"""When checkpoints are written, how they are named, and which are kept.

The directory is the whole state: the newest complete checkpoint is where a run goes on, and the best ones are found by
the value in their manifests. Something is deleted only after its successor is safely on disk.
"""

import logging
import math
import os
import re
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from bionemo import checkpoint
from bionemo.common.lock import RunLock
from bionemo.config.durations import seconds
from bionemo.config.saving import FIELD
from bionemo.config.schema import ExpManagerConfig
from bionemo.interop.convert import export
from bionemo.training.archive import own_archive
from bionemo.training.rank_consistency import any_rank
from bionemo.training.signals import Signals

log = logging.getLogger(__name__)


class Checkpoints(pl.Callback):
    """Saves after every validation, every so many steps or minutes, at the end, and when told to leave.

    A save writes `NAME-last`. When the monitored value is among the best `save_top_k`, the same files also get the
    name `NAME`, without being written twice. At the end, or at every save, the weights are exported as a .nemo file.
    Checkpoints of other runs in the directory are neither deleted nor replaced: where a name is taken, `-v1` is added.

    Args:
        directory: of the checkpoints.
        config: `exp_manager` of the configuration.
        run: identity of the run; see `identity_of_run`.

    Attributes:
        locks: of the directories that the run writes, on rank 0.
        leaving: number of the signal that ends the run.
    """

    def __init__(self, directory: Path, config: ExpManagerConfig, run: str = "") -> None:
        self.directory, self.config, self.run = directory, config.checkpoint_callback_params, run
        self.locks: list[RunLock] = []
        self._enabled = config.create_checkpoint_callback
        key = "exp_manager.checkpoint_callback_params.train_time_interval"
        interval = self.config.train_time_interval
        self._interval = seconds(key, interval) if interval else None
        self._saved_at, self._saved_step, self._validated_step = time.monotonic(), -1, -1
        self._archive = directory / f"{self.config.prefix or config.name}{self.config.postfix or '.nemo'}"
        self.signals = Signals()
        self.signals.listen(signal.SIGUSR1)  # one that comes before the first step is heeded after it

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Clear what an interrupted save left."""
        vars(pl_module)["saved"] = self._saved
        if stage == "fit" and trainer.is_global_zero:
            checkpoint.clean(self.directory)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen for the notice to leave, in the place of Lightning's handler, which stops inside a step."""
        self.signals.listen(signal.SIGTERM, signal.SIGUSR1)

    @property
    def leaving(self) -> int:
        """Number of the signal that ends the run; 0: none."""
        return self.signals.number

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Save when a step or time interval is over, or a signal has come."""
        if self._saves(trainer) and not self.signals.saving:
            self.signals.saving = True
            self.signals.listen(signal.SIGHUP)
        step, every = trainer.global_step, self.config.every_n_train_steps or 0  # 0: not by steps, as in Lightning
        due = every > 0 and step % every == 0
        if self._interval is not None and not due:
            due = bool(any_rank(trainer, pl_module, time.monotonic() - self._saved_at >= self._interval))
        validates = trainer.enable_validation and step % (trainer.val_check_batch or step) == 0
        if due and not validates:  # else the validation that follows saves, with its result
            self.save(trainer, pl_module)
        if number := any_rank(trainer, pl_module, self.leaving):
            self.signals.number = number
            log.warning("received %s: saving step %d and leaving", signal.Signals(self.leaving).name, step)
            self.save(trainer, pl_module)
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # Lightning would validate once more

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save with the fresh value of the monitored metric."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated_step = trainer.global_step
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save the last step if no rule has, and export what was trained."""
        self.save(trainer, pl_module)
        if not self._saves(trainer):
            pl_module.refuse_not_finite()
        if self.leaving:  # a launcher may end all ranks when the first has left, and then report another status
            trainer._signal_connector._original_handlers[signal.SIGTERM] = signal.SIG_IGN  # which Lightning restores
        if not self._saves(trainer) or self.leaving:
            return
        strategy: Any = trainer.strategy
        strategy.saver.wait()
        if trainer.is_global_zero and self.config.save_nemo_on_train_end and not self.config.always_save_nemo:
            self._export()
        trainer.strategy.barrier("exported")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing is left to save: the last write is complete."""
        self.signals.saving = False

    def save(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write `-last`, name it a best one if it is, then prune."""
        if not self._saves(trainer) or trainer.global_step == self._saved_step:
            return
        for lock in self.locks:
            lock.check()
        with pl_module.throughput.paused():
            name = trainer.strategy.broadcast(self._free(self._name(trainer, pl_module)))
            last = self.directory / f"{name}-last"
            weights_only = self.config.save_weights_only or False
            pl_module.record = self._record(trainer)
            trainer.save_checkpoint(last, weights_only, storage_options=partial(self._prune, last, name))
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step

    def _saves(self, trainer: pl.Trainer) -> bool:
        return self._enabled and not getattr(trainer, "fast_dev_run", False)

    def _name(self, trainer: pl.Trainer, pl_module: Any) -> str:
        """Fill v1's pattern, e.g. `megatron_bert--{val_loss:.2f}-{step}-{consumed_samples}`, as `key=value`."""
        values: dict[str, Any] = {key: float(value) for key, value in trainer.callback_metrics.items()}
        values |= {
            "step": trainer.global_step,
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "consumed_samples": pl_module.position.consumed_samples,
        }

        def fill(match: re.Match[str]) -> str:
            key, form = match[1], match[2] or ""
            return f"{key}={format(values[key], form)}" if key in values else f"{key}=none"

        return FIELD.sub(fill, self.config.filename or "{step}")

    def _free(self, name: str) -> str:
        """The name, with `-v1` or a higher number behind it when other runs' checkpoints, or other files, have it."""
        for number in count():
            free = f"{name}-v{number}" if number else name
            if all(self._is_ours_or_none(self.directory / each) for each in (free, f"{free}-last")):
                return free
        raise AssertionError

    def _is_ours_or_none(self, path: Path) -> bool:
        return not os.path.lexists(path) or (checkpoint.is_checkpoint(path) and checkpoint.run_of(path) == self.run)

    def _record(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What the manifest says for pruning: the run, and the monitored value if this step has been validated."""
        value = trainer.callback_metrics.get(self.config.monitor or "")
        if value is None or self._validated_step != trainer.global_step:
            return {"run": self.run}
        return {"run": self.run, "metrics": {self.config.monitor: float(value)}}

    def _prune(self, last: Path, name: str) -> None:
        """Name the new checkpoint a best one if it is; delete older last ones and those no longer among the best."""
        keep = self.config.save_top_k
        values = {path.with_name(name) if path == last else path: self._value(path) for path in self._saved()
                  if path == last or not path.name.endswith("-last")}  # fmt: skip
        order = self._ranked(values)
        best = order if keep == -1 else order[:keep]
        if last.with_name(name) in best:
            checkpoint.link(last, last.with_name(name))
        for path in self._saved():
            if path != last and path not in best:
                checkpoint.remove(path)
        if self.config.always_save_nemo:
            self._export()

    def _export(self) -> None:
        """Write the .nemo file from the newest checkpoint, or from the best."""
        best = self.best() if self.config.save_best_model else None
        export(best or self._saved()[0], own_archive(self._archive, self.run))

    def best(self) -> Path | None:
        """The checkpoint with the best value of the monitored metric, if one has any."""
        return next(iter(self._ranked({path: self._value(path) for path in self._saved()})), None)

    def _value(self, path: Path) -> float | None:
        value = checkpoint.manifest_of(path).get("metrics", {}).get(self.config.monitor or "")
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def _ranked(self, values: dict[Path, float | None]) -> list[Path]:
        """Those that have a finite value, the best first."""
        known = {path: value for path, value in values.items() if value is not None}
        return sorted(known, key=lambda path: known[path], reverse=self.config.mode == "max")

    def _saved(self) -> list[Path]:
        """Checkpoints that this run has written, newest first."""
        return [path for path in checkpoint.complete(self.directory) if checkpoint.run_of(path) == self.run]
