# SPDX-License-Identifier: Apache-2.0
"""Training run: build trainer, data and model; resume from the newest checkpoint or start; train and test."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import launched_process, restored_variables
from bionemo.common.lock import run_lock
from bionemo.config.directories import checkpoint_directory, log_directory
from bionemo.config.schema import RunConfig
from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.data.data_module import SequenceData
from bionemo.experiment.nemo import closed_logs, directory_errors, make_directories, start_experiment
from bionemo.experiment.run_files import prepare_log_directory
from bionemo.megatron import groups
from bionemo.megatron.gpu import use_gpu
from bionemo.megatron.precision import Precision, resolve_precision
from bionemo.training import progress
from bionemo.training.build_trainer import build_trainer, misconfiguration_as_user_error
from bionemo.training.checkpointing import CheckpointCallback
from bionemo.training.compilation import is_compiled, shared_graphs
from bionemo.training.early_stopping import early_stopping
from bionemo.training.fractions import resolve_fractions
from bionemo.training.health import HealthMonitor, report_first_error
from bionemo.training.loss_curve import LossCurve
from bionemo.training.metrics import check_monitors
from bionemo.training.module import TrainingModule
from bionemo.training.progress import TrainingProgress
from bionemo.training.rank_consistency import RankConsistencyCheck
from bionemo.training.resume import check_resumable, choose_branch, find_resume_checkpoint, new_or_resumed_run_id
from bionemo.training.run_file import RunFile
from bionemo.training.time_limit import TimeLimit


class TrainingSetup(NamedTuple):
    """Data and model of a run."""

    data: SequenceData
    module: TrainingModule


@contextmanager
def _restored_process() -> Iterator[None]:
    """Remove log files, settings and process groups of a run from its process, before the next run of a sweep."""
    launched = launched_process() is not None
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_complete = False
    try:
        with closed_logs(), restored_variables():
            yield
        is_complete = True
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        # NCCL waits for the other ranks, which may not respond after an error
        if dist.is_initialized() and (is_complete or dist.get_world_size() == 1 or dist.get_backend() == "gloo"):
            groups.destroy()
            # Processes of a launcher keep the default group: torchrun's store, which outlives it, has its addresses.
            groups.destroy_all(keep_default=launched)


class TrainingRun:
    """A run in four steps: `open`, `check`, `start` and `fit`. Each one needs the one before.

    Args:
        cfg: configuration of the run.
        build: builds data and model, given the trainer, the precision and the checkpoint to resume from, if any.
        callbacks: additional callbacks.
    """

    def __init__(
        self,
        cfg: RunConfig,
        build: Callable[[pl.Trainer, Precision, Path | None], TrainingSetup],
        callbacks: Sequence[pl.Callback] = (),
    ) -> None:
        self.cfg, self._build = cfg, build
        gpu = use_gpu(cfg.trainer.accelerator)
        self.precision = resolve_precision(cfg.trainer.precision, gpu)
        self.compiled = is_compiled(cfg.model.compile, gpu)
        self.log_dir, self.checkpoint_dir = log_directory(cfg.exp_manager), checkpoint_directory(cfg.exp_manager)
        self.written = [self.log_dir, self.checkpoint_dir] if cfg.do_training else [self.log_dir]
        self._newest = self._list_newest()  # another run may write until we hold the lock
        self.resume_path = find_resume_checkpoint(cfg, self.checkpoint_dir, self.log_dir)
        time_limit = TimeLimit(cfg.exp_manager.max_time_per_run, cfg.trainer.max_time)
        self.loss_curve = LossCurve(self.log_dir)
        self.monitor = HealthMonitor(duration_in_seconds("trainer.rank_timeout", cfg.trainer.rank_timeout))
        self.checkpoints = CheckpointCallback(
            self.checkpoint_dir,
            cfg.exp_manager,
            new_or_resumed_run_id(self.resume_path, self.checkpoint_dir),
            choose_branch(cfg, self.resume_path, self.checkpoint_dir),
            time_limit,
        )
        self.run_file = RunFile(self.log_dir, self.checkpoints.signals)
        self.trainer = build_trainer(
            cfg,
            [
                self.monitor,
                RankConsistencyCheck(cfg, self.resume_path, self.written),
                *([] if cfg.trainer.enable_progress_bar is False else [TrainingProgress()]),
                self.loss_curve,
                self.run_file,
                time_limit,
                *callbacks,
                *early_stopping(cfg.exp_manager),
                self.checkpoints,  # saves the state of all others
            ],
        )

    def _list_newest(self) -> list[Path]:
        return checkpoint.list_complete(self.checkpoint_dir)[:1]

    def open(self, stack: ExitStack) -> None:
        """Handle signals and lock the directories until the stack is closed.

        Raises:
            UserError: if another run holds one of the directories, or they cannot be written.
        """
        if (launcher := self.trainer.strategy.launcher) is not None:
            self.checkpoints.signals.send_to_children = launcher.kill
        stack.enter_context(self.checkpoints.signals)
        stack.enter_context(report_first_error(self.monitor, self.trainer))
        stack.enter_context(misconfiguration_as_user_error())
        if self.compiled:
            stack.enter_context(shared_graphs())
        locked = self.written if self.cfg.exp_manager.create_checkpoint_callback else [self.log_dir]
        for path in dict.fromkeys(locked) if self.trainer.is_global_zero else ():
            with directory_errors(path):
                self.checkpoints.locks.append(stack.enter_context(run_lock(path)))
        if self._list_newest() != self._newest:
            raise UserError(f"another run has just written to {self.checkpoint_dir}: run the command again")

    def check(self) -> None:
        """Build data and model and check that they fit each other and the checkpoint, before the run writes anything.

        Only indexes of the data are written.

        Raises:
            UserError: if the data or the weights cannot be used.
        """
        cfg, trainer = self.cfg, self.trainer
        self.data, self.module = self._build(trainer, self.precision, self.resume_path)
        model = self.module.build_on_meta()  # the whole model, because the process groups do not exist yet
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if self.resume_path is None:
            self.module.check_weights(self.module.initial_weights, model)
        else:
            check_resumable(checkpoint.Checkpoint(self.resume_path), self.module, model)
        if cfg.do_testing:
            self.data.setup("test")
        if cfg.do_training:
            self.data.setup("fit")
            self.data.check_steps(trainer.world_size)
        resolve_fractions(trainer, self.data)
        if cfg.do_training:
            self.loss_curve.references = self.data.reference_losses()
            check_monitors(cfg.exp_manager, model, trainer, self.data.source_names)
            self.checkpoints.check_export(trainer, model)

    def start(self) -> None:
        """Make the directories, start the loggers and save the configuration.

        Raises:
            UserError: if a directory cannot be written, or exp_manager rejects the configuration.
        """
        manager, trainer, run_id = self.cfg.exp_manager, self.trainer, self.checkpoints.run_id
        make_directories(*self.written)
        with directory_errors(self.log_dir), ExitStack() as stack:
            if trainer.is_global_zero:
                log_run_id = run_id if self.cfg.do_training else None
                stack.enter_context(prepare_log_directory(self.log_dir, log_run_id, manager.files_to_copy or ()))
            start_experiment(trainer, manager, self.log_dir, run_id)
            progress.save_config(self.cfg, trainer, self.log_dir)

    def fit(self) -> None:
        """Train and test, as configured."""
        cfg, trainer = self.cfg, self.trainer
        if cfg.do_training:
            progress.print_start(
                cfg, trainer, self.num_parameters, self.precision, self.compiled, self.data, self.resume_path
            )
            references = self.loss_curve.references
            self.run_file.begin(
                cfg, trainer, self.num_parameters, self.precision, self.data, self.resume_path, references
            )
            trainer.fit(self.module, self.data, ckpt_path=self.resume_path)
            validated = int(self.loss_curve.validation[-1][0]) if self.loss_curve.validation else None
            progress.print_result(cfg, trainer, references, self.log_dir, self.resume_path, validated)
        if cfg.do_testing and not self.checkpoints.stop_signal:
            path = None if cfg.do_training else self.resume_path
            trainer.test(self.module, self.data, ckpt_path=path, verbose=False)
            progress.print_test_result(trainer)


@_restored_process()
def train(
    cfg: RunConfig,
    build: Callable[[pl.Trainer, Precision, Path | None], TrainingSetup],
    callbacks: Sequence[pl.Callback] = (),
) -> dict[str, float]:
    """Train and test as configured; return the last metrics of validation and test. Arguments as `TrainingRun`.

    Raises:
        UserError: for every error that the user can fix.
        SystemExit: if a signal ended the run.
    """
    run = TrainingRun(cfg, build, callbacks)
    with ExitStack() as stack:
        run.open(stack)
        run.check()
        run.start()
        run.fit()
    number = run.checkpoints.stop_signal
    if number and run.trainer.is_global_zero:  # rank 0 only: launchers kill all ranks if one fails
        sys.exit(128 + number)  # exit status of a process that was ended by this signal
    return progress.final_metrics(run.trainer)
