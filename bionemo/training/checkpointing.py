# SPDX-License-Identifier: Apache-2.0
"""Checkpoint callback: when checkpoints are written, how they are named, and which are kept.

No state beside the checkpoint directory is needed: a run resumes from the newest complete checkpoint, and the best
ones are found by the metric in their manifests. Nothing is deleted before its successor is on disk.
"""

import json
import logging
import math
import os
import re
import signal
import time
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from bionemo import checkpoint
from bionemo.checkpoint import WEIGHTS, MergedLoRA, TensorsInMemory, TensorSource
from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.lock import RunLock
from bionemo.config.check import METRIC_FIELD
from bionemo.config.schema import ExpManagerConfig
from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.formats.convert import export_nemo, open_model
from bionemo.formats.nemo_models import find_nemo_model
from bionemo.formats.shape_check import check_shapes
from bionemo.models.language_model import MissingHead
from bionemo.models.trainable import Trainable
from bionemo.training.patches import end_run, ignore_sigterm_after_training, stop_training, validate_first
from bionemo.training.rank_consistency import max_at_logged_steps
from bionemo.training.signals import Signals
from bionemo.training.time_limit import TimeLimit

log = logging.getLogger(__name__)
_BATCHES_PER_CHECK = 10  # validation batches between checks for a signal, which several ranks make together
_TIME_LIMIT = signal.NSIG  # instead of the number of a signal


class CheckpointCallback(pl.Callback):
    """Saves after validations, at step and time intervals, at the end, and after a signal.

    A save writes `NAME-last`. If the monitored metric is among the best `save_top_k`, the same files are also linked
    as `NAME`. At the end, or at every save, the weights are exported as a .nemo file. Checkpoints of other runs in
    the directory are neither deleted nor replaced: if a name is in use, `-v1` is appended.

    Args:
        directory: checkpoint directory.
        config: `exp_manager` of the configuration.
        run_id: ID of the run; see `new_or_resumed_run_id`.
        branch: branch of the run; see `choose_branch`.
        time_limit: time limit of the run, which also ends it during a validation.

    Attributes:
        locks: locks of the directories that the run writes, on rank 0.
        signals: signals received by this process.
    """

    def __init__(
        self,
        directory: Path,
        config: ExpManagerConfig,
        run_id: str = "",
        branch: checkpoint.Branch = checkpoint.MAIN_BRANCH,
        time_limit: TimeLimit | None = None,
    ) -> None:
        self.directory, self.config = directory, config.checkpoint_callback_params
        self.run_id, self.branch, self.time_limit = run_id, branch, time_limit
        self.locks: list[RunLock] = []
        self._enabled = config.create_checkpoint_callback
        key = "exp_manager.checkpoint_callback_params.train_time_interval"
        interval = self.config.train_time_interval
        self._interval = duration_in_seconds(key, interval) if interval else None
        self._saved_at, self._saved_step, self._validated_step = time.monotonic(), -1, -1
        self._validates = False  # whether the run has validations
        self._validation_due = False  # whether the validation after this step is still to be made
        self._is_complete = False  # whether the last checkpoint and the .nemo file of this start are written
        self._validation = ""  # identity of the validations of this start
        self._last: Path | None = None  # checkpoint that this process saved last
        self._archive: Path | None = directory / f"{self.config.prefix or config.name}{self.config.postfix or '.nemo'}"
        self.signals = Signals()

    def check_export(self, trainer: pl.Trainer, model: Trainable) -> None:
        """Raise a UserError if the .nemo file that the run will write has other weight names or shapes than the model.

        `model` is the whole model.
        """
        key = "always_save_nemo" if self.config.always_save_nemo else "save_nemo_on_train_end"
        config = asdict(model.config)
        if not (self._is_enabled(trainer) and getattr(self.config, key)) or (names := find_nemo_model(config)) is None:
            return
        if any(isinstance(module, MissingHead) for module in model.modules()):
            log.warning("no .nemo file is written, because the model has no language-model head: use the checkpoint")
            self._archive = None
            return
        source = TensorsInMemory(self.directory, dict(model.named_parameters()))
        weights: TensorSource = MergedLoRA(source) if "task" in model.identity else source
        try:
            expected = names.weights(names.with_vocab_size(config, model.vocabulary.vocab_size))
            check_shapes({name: weight.shape for name, weight in expected.items()}, weights.shapes(WEIGHTS))
        except UserError as error:
            raise UserError(
                f"no .nemo file of {names.our_class} can be written: {error}; correct its attribute nemo if it is "
                f"yours, or set exp_manager.checkpoint_callback_params.{key}=False"
            ) from error

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Remove unfinished checkpoints of an interrupted run."""
        pl_module.list_checkpoints = self._list_own
        if stage == "fit":
            self._validation = self._identify_validation(trainer)
        if stage == "fit" and trainer.is_global_zero:
            checkpoint.remove_unfinished(self.directory)
            best = (path for path in self._list_own() if not path.name.endswith("-last"))
            if others := [path for path in best if self._has_other_validation(path)]:
                log.warning(
                    "%s checkpoint%s of other validations (data, masks, limit_val_batches, monitor or mode): kept, "
                    "but not compared with new ones; the first is %s", len(others), "s" * (len(others) > 1), others[0],
                )  # fmt: skip

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, state: dict[str, Any]) -> None:
        """Begin with the validation that a signal or a time limit prevented or interrupted."""
        if state.get("validation_due"):
            validate_first(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace Lightning's SIGTERM handler, which stops within a step."""
        self._validates = trainer.enable_validation  # not when a time limit has ended the run
        self.signals.listen(signal.SIGTERM, signal.SIGUSR1)

    @property
    def stop_signal(self) -> int:
        """Number of the signal that ends the run; 0: none."""
        return self.signals.received

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Save at step and time intervals, and after a signal."""
        if self._is_enabled(trainer) and not self.signals.has_steps_to_save:
            self.signals.has_steps_to_save = True
            self.signals.listen(signal.SIGHUP)
        step, interval = trainer.global_step, self.config.every_n_train_steps or 0  # 0: never, as in Lightning
        due = interval > 0 and step % interval == 0
        if self._interval is not None and not due:
            due = bool(max_at_logged_steps(trainer, pl_module, time.monotonic() - self._saved_at >= self._interval))
        self._validation_due = self._validates and step % (trainer.val_check_batch or step) == 0
        if due and not self._validation_due:  # otherwise it is saved after the validation, with the metric
            self.save(trainer, pl_module)
        if number := max_at_logged_steps(trainer, pl_module, self.stop_signal):
            self.signals.received = number
            log.warning("received %s: saving step %d and exiting", signal.Signals(number).name, step)
            self.save(trainer, pl_module)
            stop_training(trainer)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Save and end the run after a signal or at the time limit; the resumed run starts with the validation."""
        if not self.signals.has_steps_to_save or trainer.sanity_checking or batch_idx % _BATCHES_PER_CHECK:
            return
        reason = self.stop_signal or (_TIME_LIMIT if self.time_limit and self.time_limit.is_reached() else 0)
        if trainer.world_size > 1:
            reason = int(trainer.strategy.reduce(torch.tensor(reason, device=pl_module.device), reduce_op="max"))
        if not reason:
            return
        if reason == _TIME_LIMIT:
            why = f"{self.time_limit} is reached"
        else:
            self.signals.received = reason
            why = f"received {signal.Signals(reason).name}"
        log.warning("%s in the validation: saving step %d and exiting", why, trainer.global_step)
        self._validation_due = True
        self.save(trainer, pl_module)
        strategy: Any = trainer.strategy
        strategy.checkpoint_writer.wait()
        trainer.should_stop = True  # the data have not ended
        end_run()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save with the new value of the monitored metric."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated_step, self._validation_due = trainer.global_step, False
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save the last step unless it is saved, and export the weights."""
        self._is_complete = True
        self.save(trainer, pl_module)
        if not self._is_enabled(trainer):
            pl_module.check_finite()
        if self.stop_signal:  # a second SIGTERM would change the exit status
            ignore_sigterm_after_training(trainer)
        if not self._is_enabled(trainer) or self.stop_signal:
            return
        strategy: Any = trainer.strategy
        strategy.checkpoint_writer.wait()
        if trainer.is_global_zero and self.config.save_nemo_on_train_end and not self.config.always_save_nemo:
            self._export()
        trainer.strategy.barrier("exported")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the last save of a run that was killed after its last step; Lightning calls no other hook then."""
        if self._is_complete or not self._is_enabled(trainer) or not trainer.is_global_zero:
            return
        if last := [path for path in self._list_own() if path.name.endswith("-last")][:1]:
            self._link_and_prune(last[0], last[0].name.removesuffix("-last"))
            if self.config.save_nemo_on_train_end and not self.config.always_save_nemo:
                self._export()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what a signal interrupts."""
        self.signals.phase = "in the test: no test result"

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the process at the next signal, because all writes are complete."""
        self.signals.has_steps_to_save = False
        self.signals.phase = "after the last save"

    def save(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write `-last` unless this step is saved; then link it if it is one of the best, and delete older ones."""
        if not self._is_enabled(trainer) or trainer.global_step == self._saved_step:
            return
        for lock in self.locks:
            lock.check()
        with pl_module.throughput.paused():
            name = trainer.strategy.broadcast(self._unused_name(self._format_name(trainer, pl_module)))
            last = self.directory / f"{name}-last"
            pl_module.checkpoint_metadata = self._build_metadata(trainer)
            trainer.save_checkpoint(last, self.config.save_weights_only or False)
            self._last = last
            strategy: Any = trainer.strategy
            strategy.checkpoint_writer.after_save(partial(self._link_and_prune, last, name))
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step

    def _is_enabled(self, trainer: pl.Trainer) -> bool:
        return self._enabled and not getattr(trainer, "fast_dev_run", False)

    def _format_name(self, trainer: pl.Trainer, pl_module: Any) -> str:
        """Fill v1's pattern, such as `megatron_bert--{val_loss:.2f}-{step}-{consumed_samples}`, with `key=value`."""
        values: dict[str, Any] = {key: float(value) for key, value in trainer.callback_metrics.items()}
        values |= {
            "step": trainer.global_step,
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "consumed_samples": trainer.datamodule.position.consumed_samples,  # type: ignore[attr-defined]
        }

        def fill(match: re.Match[str]) -> str:
            key, spec = match[1], match[2] or ""
            return f"{key}={format(values[key], spec)}" if key in values else f"{key}=none"

        return METRIC_FIELD.sub(fill, self.config.filename or "{step}")

    def _unused_name(self, name: str) -> str:
        """Return the name, with `-v1` or a higher number if files that are not of this run have the name."""
        for number in count():
            candidate = f"{name}-v{number}" if number else name
            paths = [self.directory / candidate, self.directory / f"{candidate}-last"]
            used = [path for path in paths if os.path.lexists(path)]
            if all(checkpoint.is_checkpoint(path) and checkpoint.read_run_id(path) == self.run_id for path in used):
                return candidate
        raise AssertionError

    def _build_metadata(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the run and, if this step has been validated, the monitored metric."""
        written_by: dict[str, Any] = {"validation_due": True} if self._validation_due else {}
        written_by |= {"run": self.run_id, "branch": list(self.branch) if self.branch.number else None}
        value = trainer.callback_metrics.get(self.config.monitor or "")
        if value is None or self._validated_step != trainer.global_step:
            return written_by
        return written_by | {"metrics": {self.config.monitor: float(value)}, "validation": self._validation}

    def _link_and_prune(self, last: Path, name: str) -> None:
        """Link the new checkpoint if it is one of the best; delete older `-last` and those no longer the best."""
        best_path = last.with_name(name)
        metrics = {
            best_path if path == last else path: self._read_metric(path)
            for path in self._list_own()
            if path == last or not (path.name.endswith("-last") or self._has_other_validation(path))
        }
        top_k = self.config.save_top_k
        best = self._sort_by_metric(metrics)[: None if top_k == -1 else top_k]
        if best_path in best and checkpoint.load_manifest(best_path) != checkpoint.load_manifest(last):
            checkpoint.link(last, best_path)
        for path in self._list_own():
            if path != last and path not in best and (path in metrics or path.name.endswith("-last")):
                try:
                    checkpoint.remove(path)
                except OSError as error:  # the new checkpoint is complete
                    log.warning("checkpoint %s cannot be deleted (%s)", path, error.strerror or error)
        if self.config.always_save_nemo:
            self._export()

    def _export(self) -> None:
        """Write the .nemo file from the newest or the best checkpoint, if the model has a `.nemo` format."""
        if self._archive is None:
            return
        best = self.find_best() if self.config.save_best_model else None
        path = best or self._last or self._list_own()[0]
        config = checkpoint.Checkpoint(path).config
        if find_nemo_model(config) is None:
            log.warning(
                "no .nemo file is written, because models of the class %s have no .nemo format: use the checkpoint",
                config.get("_target_"),
            )
            self._archive = None
        else:
            export_nemo(open_model(path), _own_archive(self._archive, self.run_id))

    def find_best(self) -> Path | None:
        """Return the checkpoint with the best monitored metric, if any checkpoint has one."""
        return next(iter(self._sort_by_metric({path: self._read_metric(path) for path in self._list_own()})), None)

    def find_newest(self) -> Path | None:
        """Return the newest checkpoint of this run, if there is one."""
        return next(iter(self._list_own()), None)

    def _read_metric(self, path: Path) -> float | None:
        value = checkpoint.load_manifest(path).get("metrics", {}).get(self.config.monitor or "")
        if self._has_other_validation(path):
            return None
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def _identify_validation(self, trainer: Any) -> str:
        limit = trainer.limit_val_batches
        monitored = f"{self.config.monitor} {self.config.mode}"
        return f"{trainer.datamodule.validation_identity(limit)} {monitored}"

    def _has_other_validation(self, path: Path) -> bool:
        """Return whether the metric of a checkpoint is not comparable."""
        return checkpoint.load_manifest(path).get("validation", self._validation) != self._validation

    def _sort_by_metric(self, metrics: dict[Path, float | None]) -> list[Path]:
        """Return the paths that have a metric, the best first."""
        known = {path: value for path, value in metrics.items() if value is not None}
        return sorted(known, key=lambda path: known[path], reverse=self.config.mode == "max")

    def _list_own(self) -> list[Path]:
        """Return the checkpoints of this run, newest first."""
        return [
            path for path in checkpoint.list_complete(self.directory) if checkpoint.read_run_id(path) == self.run_id
        ]


def _own_archive(path: Path, run_id: str) -> Path:
    """Return a path that no other run or program uses, and record next to it which run writes it.

    `-v1` or a higher number is inserted before the suffix if needed.

    Raises:
        OSError: if the record cannot be written.
    """
    for number in count():
        candidate = path.with_name(f"{path.stem}-v{number}{path.suffix}") if number else path
        record = candidate.with_name(f".{candidate.name}.run")
        if not os.path.lexists(candidate) or _read_record(record) == run_id:
            write_atomic(record, json.dumps({"run": run_id}))
            return candidate
    raise AssertionError


def _read_record(record: Path) -> str:
    try:
        match json.loads(record.read_text()):
            case {"run": str(run_id)}:
                return run_id
    except (OSError, ValueError, RecursionError):
        pass
    return ""
