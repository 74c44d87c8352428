# SPDX-License-Identifier: Apache-2.0
"""The story of a run, whatever is trained: trainer, data, model; then train from the newest checkpoint or afresh."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.common.lock import RunLock, run_lock
from bionemo.config.durations import seconds
from bionemo.config.schema import RunConfig
from bionemo.data.data_module import SequenceData
from bionemo.interop.nemo import checkpoint_directory, log_directory, make_directories, start_experiment, writing
from bionemo.interop.run_files import started_logs
from bionemo.megatron.precision import Precision, precision_for_host
from bionemo.training import report
from bionemo.training.build_trainer import build_trainer, one_line_mistakes
from bionemo.training.checkpointing import Checkpoints
from bionemo.training.loss_curve import LossCurve
from bionemo.training.metrics import check_monitors
from bionemo.training.module import TrainingModule
from bionemo.training.progress import TrainingProgress
from bionemo.training.rank_consistency import Agreement
from bionemo.training.report_first_error import Watch, one_voice
from bionemo.training.resume import find_start, identity_of_run
from bionemo.training.time_limit import TimeLimit


class Work(NamedTuple):
    """What is trained on what."""

    data: SequenceData
    module: TrainingModule


def train(
    cfg: RunConfig, make: Callable[[pl.Trainer, Precision, Path | None], Work], callbacks: Sequence[pl.Callback] = ()
) -> None:
    """Train and test, as the configuration says.

    Args:
        cfg: of the run.
        make: gives data and model, once the number of processes is known; told the precision, too, and the checkpoint
            to go on from, if any.
        callbacks: more than those of every run.

    Raises:
        UserError: for all that a user can mend.
        SystemExit: when a signal has ended the run.
    """
    precision = precision_for_host(cfg.trainer.precision)
    directory = log_directory(cfg.exp_manager)
    saved = checkpoint_directory(cfg.exp_manager, directory)
    newest = checkpoint.complete(saved, directory)[:1]
    start = find_start(cfg, saved, directory)

    run = identity_of_run(start, saved, directory)
    checkpoints = Checkpoints(saved, cfg.exp_manager, run)
    watch = Watch(seconds("trainer.rank_timeout", cfg.trainer.rank_timeout))
    references: dict[str, float] = {}  # known when the data is
    trainer = build_trainer(
        cfg,
        [
            watch,
            Agreement(cfg, start),
            TrainingProgress(),
            LossCurve(directory, references),
            TimeLimit(cfg.exp_manager.max_time_per_run),
            *callbacks,
            checkpoints,
        ],
    )
    written = [directory, saved] if cfg.do_training else [directory]
    locked = written if cfg.exp_manager.create_checkpoint_callback else [directory]
    if (launcher := trainer.strategy.launcher) is not None:
        checkpoints.signals.send = launcher.kill
    with (
        checkpoints.signals,
        one_voice(watch, trainer),
        one_line_mistakes(),
        _locked(trainer, locked) as checkpoints.locks,
    ):
        if checkpoint.complete(saved, directory)[:1] != newest:
            raise UserError(f"another run has just written to {saved}: run the command again")
        data, module = make(trainer, precision, start)
        module.check_start(start)
        references |= data.reference_losses()
        if cfg.do_training:
            data.check_steps(trainer.world_size)
            check_monitors(cfg.exp_manager, module, trainer)

        make_directories(*written)  # nothing but the locks is written before here
        copies, writes = cfg.exp_manager.files_to_copy or (), run if cfg.do_training else None
        logs = started_logs(directory, writes, copies) if trainer.is_global_zero else nullcontext()
        with writing(directory), logs:
            start_experiment(trainer, cfg.exp_manager, directory)
            report.save_config(cfg, trainer, directory)

        if cfg.do_training:
            report.announce(cfg, trainer, module.num_parameters(), precision.name, start)
            trainer.fit(module, data, ckpt_path=start)
            report.conclude(trainer, module, references, directory)
        if cfg.do_testing and not checkpoints.leaving:
            trainer.test(module, data, ckpt_path=None if cfg.do_training else start, verbose=False)
            report.conclude_test(trainer)
    if checkpoints.leaving and trainer.is_global_zero:  # the first rank alone: launchers end all when one has failed
        sys.exit(128 + checkpoints.leaving)  # as a process that a signal has ended: the run is not complete


@contextmanager
def _locked(trainer: pl.Trainer, directories: Sequence[Path]) -> Iterator[list[RunLock]]:
    """Hold the locks of directories, on rank 0.

    Raises:
        UserError: when another run holds one, or a directory cannot be written.
    """
    with ExitStack() as stack:
        locks = []
        for path in dict.fromkeys(directories) if trainer.is_global_zero else ():
            with writing(path):
                locks.append(stack.enter_context(run_lock(path)))
        yield locks
