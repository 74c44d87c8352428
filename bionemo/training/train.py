# SPDX-License-Identifier: Apache-2.0
"""Training run: build trainer, data and model; resume from the newest checkpoint or start; train and test."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import launched_process, restored_variables
from bionemo.common.lock import RunLock, run_lock
from bionemo.config.directories import checkpoint_directory, log_directory
from bionemo.config.schema import RunConfig
from bionemo.config.schema.ranges import duration_in_seconds
from bionemo.data.data_module import SequenceData
from bionemo.interop.nemo import (
    closed_logs,
    directory_errors,
    make_directories,
    start_experiment,
)
from bionemo.interop.run_files import prepare_log_directory
from bionemo.megatron import groups
from bionemo.megatron.gpu import use_gpu
from bionemo.megatron.precision import Precision, resolve_precision
from bionemo.training import progress
from bionemo.training.backends import select_backends
from bionemo.training.build_trainer import build_trainer, misconfiguration_as_user_error
from bionemo.training.checkpointing import CheckpointCallback
from bionemo.training.compilation import is_compiled, shared_graphs
from bionemo.training.early_stopping import early_stopping
from bionemo.training.fractions import resolve_fractions
from bionemo.training.health.monitor import HealthMonitor, report_first_error
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


@_restored_process()
def train(
    cfg: RunConfig,
    build: Callable[[pl.Trainer, Precision, Path | None], TrainingSetup],
    callbacks: Sequence[pl.Callback] = (),
) -> dict[str, float]:
    """Train and test as configured; return the last metrics of validation and test.

    Args:
        cfg: configuration of the run.
        build: builds data and model, given the trainer, the precision and the checkpoint to resume from, if any.
        callbacks: additional callbacks.

    Raises:
        UserError: for every error that the user can fix.
        SystemExit: if a signal ended the run.
    """
    gpu = use_gpu(cfg.trainer.accelerator)
    precision, compiled = resolve_precision(cfg.trainer.precision, gpu), is_compiled(cfg.model.compile, gpu)
    log_dir, checkpoint_dir = log_directory(cfg.exp_manager), checkpoint_directory(cfg.exp_manager)
    newest = checkpoint.list_complete(checkpoint_dir)[:1]  # another run may write until we hold the lock
    resume_path = find_resume_checkpoint(cfg, checkpoint_dir, log_dir)

    time_limit = TimeLimit(cfg.exp_manager.max_time_per_run, cfg.trainer.max_time)
    checkpoints = CheckpointCallback(
        checkpoint_dir,
        cfg.exp_manager,
        new_or_resumed_run_id(resume_path, checkpoint_dir),
        choose_branch(cfg, resume_path, checkpoint_dir),
        time_limit,
    )
    monitor = HealthMonitor(duration_in_seconds("trainer.rank_timeout", cfg.trainer.rank_timeout))
    written = [log_dir, checkpoint_dir] if cfg.do_training else [log_dir]
    reference_losses: dict[str, float] = {}  # filled when the data is open
    trainer = build_trainer(
        cfg,
        [
            monitor,
            RankConsistencyCheck(cfg, resume_path, written),
            *([] if cfg.trainer.enable_progress_bar is False else [TrainingProgress()]),
            LossCurve(log_dir, reference_losses),
            run_file := RunFile(log_dir, checkpoints.signals),
            time_limit,
            *callbacks,
            *early_stopping(cfg.exp_manager),
            checkpoints,  # saves the state of all others
        ],
    )
    locked = written if cfg.exp_manager.create_checkpoint_callback else [log_dir]
    if (launcher := trainer.strategy.launcher) is not None:
        checkpoints.signals.send_to_children = launcher.kill
    with (
        checkpoints.signals,
        report_first_error(monitor, trainer),
        misconfiguration_as_user_error(),
        shared_graphs() if compiled else nullcontext(),
        _lock_directories(trainer, locked) as checkpoints.locks,
    ):
        if checkpoint.list_complete(checkpoint_dir)[:1] != newest:
            raise UserError(f"another run has just written to {checkpoint_dir}: run the command again")
        data, module = build(trainer, precision, resume_path)
        model = module.build_on_meta()  # the whole model, because the process groups do not exist yet
        if resume_path is None:
            module.check_weights(module.initial_weights, model)
        else:
            check_resumable(checkpoint.Checkpoint(resume_path), module, model)
        _open_data(cfg, trainer, data)  # an error in the data ends the run before directories are made
        if cfg.do_training:
            reference_losses |= data.reference_losses()
            check_monitors(cfg.exp_manager, model, trainer)
            checkpoints.check_export(trainer, model)

        make_directories(*written)  # before this only locks and indexes of the data are written
        files, log_run_id = cfg.exp_manager.files_to_copy or (), checkpoints.run_id if cfg.do_training else None
        logs = prepare_log_directory(log_dir, log_run_id, files) if trainer.is_global_zero else nullcontext()
        with directory_errors(log_dir), logs:
            start_experiment(trainer, cfg.exp_manager, log_dir, checkpoints.run_id)
            progress.save_config(cfg, trainer, log_dir, data.micro_batches)

        backends = select_backends(cfg, precision, trainer.strategy.root_device)
        if cfg.do_training:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            progress.print_start(cfg, trainer, parameters, precision, backends, compiled, data, resume_path)
            run_file.begin(cfg, trainer, parameters, precision, data, resume_path)
            trainer.fit(module, data, ckpt_path=resume_path)
            progress.print_result(cfg, trainer, reference_losses, log_dir, resume_path)
        if cfg.do_testing and not checkpoints.stop_signal:
            trainer.test(module, data, ckpt_path=None if cfg.do_training else resume_path, verbose=False)
            progress.print_test_result(trainer)
    if checkpoints.stop_signal and trainer.is_global_zero:  # rank 0 only: launchers kill all ranks if one fails
        sys.exit(128 + checkpoints.stop_signal)  # exit status of a process that was ended by this signal
    return progress.final_metrics(trainer)


def _open_data(cfg: RunConfig, trainer: pl.Trainer, data: SequenceData) -> None:
    """Open the splits that a run needs."""
    if cfg.do_testing:
        data.setup("test")
    if cfg.do_training:
        data.setup("fit")
        data.check_steps(trainer.world_size)
    resolve_fractions(trainer, data)


@contextmanager
def _lock_directories(trainer: pl.Trainer, directories: Sequence[Path]) -> Iterator[list[RunLock]]:
    """Hold the locks of directories on rank 0.

    Raises:
        UserError: if another run holds one of them, or a directory cannot be written.
    """
    with ExitStack() as stack:
        locks = []
        for path in dict.fromkeys(directories) if trainer.is_global_zero else ():
            with directory_errors(path):
                locks.append(stack.enter_context(run_lock(path)))
        yield locks
