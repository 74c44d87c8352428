# SPDX-License-Identifier: Apache-2.0
"""Pretrain a model: the story of a run.

python -m bionemo.pretrain --config-name=pretrain_esm2_8M model.data.dataset_path=DIR
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from bionemo.config import run
from bionemo.config.durations import seconds
from bionemo.config.schema import RunConfig
from bionemo.data.files import name_missing_files
from bionemo.errors import UserError
from bionemo.training.limits import note_ineffective, refuse_unbuilt


def main(config_name: str = "pretrain_esm2_8M", config_dir: str | Path | None = None) -> None:
    """Compose the configuration that the command line describes, then do what it asks for."""
    run(carry_out, config_name, config_dir)


def carry_out(cfg: RunConfig) -> None:
    """Prepare data, train, test: whichever is asked for; with none of them, prepare data, as v1 does."""
    refuse_unbuilt(cfg)
    works = cfg.do_training or cfg.do_testing
    if cfg.do_preprocessing or not works:
        prepare_data(cfg)
    if works:
        pretrain(cfg)


def prepare_data(cfg: RunConfig) -> None:
    """Make the shards that the configuration names out of what was downloaded.

    Raises:
        UserError: for data that needs no preparation, and at whatever is wrong with it.
    """
    from bionemo.preparation import prepare

    job = cfg.model.data.preprocessing
    if job is None:
        raise UserError(
            "this kind of data is not prepared: set do_training=True, or choose another data@model.data, such as "
            "uniref50 or zinc15; text is prepared by `python -m bionemo.preprocess --config-name=text`"
        )
    prepare(job)


def pretrain(cfg: RunConfig) -> None:
    """Data, model, trainer; then train from the newest checkpoint or from the beginning."""
    name_missing_files(cfg.model.data)  # before anything heavy is imported
    # Imported here, so that --help and every mistake in the configuration are answered before torch is loaded.
    from bionemo.interop.quiet import our_messages_to_console, quiet_dependencies

    quiet_dependencies()
    from bionemo.data.module import SequenceData
    from bionemo.interop.nemo import checkpoint_directory, log_directory, make_directories, start_experiment
    from bionemo.models.build import model_class
    from bionemo.tokenizers import load_tokenizer
    from bionemo.training import report
    from bionemo.training.agreement import Agreement
    from bionemo.training.checkpointing import Checkpoints
    from bionemo.training.failure import Watch, one_voice
    from bionemo.training.loss_curve import LossCurve
    from bionemo.training.module import TrainingModule
    from bionemo.training.objectives import masked_lm
    from bionemo.training.precision import precision_for_host
    from bionemo.training.progress import TrainingProgress
    from bionemo.training.start import find_start, find_weights
    from bionemo.training.time_limit import TimeLimit
    from bionemo.training.trainer import build_trainer, one_line_mistakes

    quiet_dependencies()
    our_messages_to_console()
    note_ineffective(cfg)
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
            *_downstream_validation(cfg),
            checkpoints,
        ],
    )
    with one_voice(watch, trainer), one_line_mistakes():
        Model = model_class(cfg.model._target_)
        vocabulary = load_tokenizer(Model.tokenizer, cfg.model.tokenizer)
        data = SequenceData(cfg.model, cfg.trainer, vocabulary, Model.samples)
        references |= data.reference_losses()
        weights = find_weights(cfg.restore_from_path, cfg.model.max_position_embeddings) if start is None else None
        module = TrainingModule(
            partial(Model, cfg.model, vocabulary), masked_lm, cfg.model, cfg.trainer, precision, weights
        )

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


def _downstream_validation(cfg: RunConfig) -> list[Any]:
    """A callback, where it is asked for."""
    if not (cfg.do_training and cfg.model.dwnstr_task_validation.enabled):
        return []
    from bionemo.downstream.validation import DownstreamValidation

    return [DownstreamValidation(cfg)]


if __name__ == "__main__":
    main()
