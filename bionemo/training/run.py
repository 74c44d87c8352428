# SPDX-License-Identifier: Apache-2.0
"""The story of a run, whatever is trained: trainer, data, model; then train from the newest checkpoint or afresh."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl

from bionemo.config.durations import seconds
from bionemo.config.schema import RunConfig
from bionemo.data.module import SequenceData
from bionemo.interop.nemo import checkpoint_directory, log_directory, make_directories, start_experiment
from bionemo.training import report
from bionemo.training.agreement import Agreement
from bionemo.training.checkpointing import Checkpoints
from bionemo.training.failure import Watch, one_voice
from bionemo.training.loss_curve import LossCurve
from bionemo.training.module import TrainingModule
from bionemo.training.precision import Precision, precision_for_host
from bionemo.training.progress import TrainingProgress
from bionemo.training.start import find_start
from bionemo.training.time_limit import TimeLimit
from bionemo.training.trainer import build_trainer, one_line_mistakes


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
    start = find_start(cfg, saved, directory)

    checkpoints = Checkpoints(saved, cfg.exp_manager)
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
    if (launcher := trainer.strategy.launcher) is not None:
        checkpoints.signals.send = launcher.kill
    with checkpoints.signals, one_voice(watch, trainer), one_line_mistakes():
        data, module = make(trainer, precision, start)
        module.check_start(start)
        references |= data.reference_losses()

        make_directories(directory, saved)  # nothing is written before here
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
