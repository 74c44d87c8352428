# SPDX-License-Identifier: Apache-2.0
"""Pretrain a model: the story of a run.

python -m bionemo.pretrain --config-name=pretrain_esm2_8M model.data.dataset_path=DIR
"""

from functools import partial
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config import run
from bionemo.config.schema import RunConfig
from bionemo.data.files import name_missing_files
from bionemo.training.unsupported_options import note_ineffective, refuse_unbuilt


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
    """Data and model of a run; `training/run.py` does the rest."""
    name_missing_files(cfg.model.data)  # before anything heavy is imported
    # Imported here, so that --help and every mistake in the configuration are answered before torch is loaded.
    from bionemo.interop.quiet import our_messages_to_console, quiet_dependencies

    quiet_dependencies()
    from bionemo.data.data_module import SequenceData
    from bionemo.megatron.precision import Precision
    from bionemo.models.build import model_class
    from bionemo.tokenizers import load_tokenizer
    from bionemo.training.module import TrainingModule
    from bionemo.training.objectives import masked_lm
    from bionemo.training.resume import find_weights
    from bionemo.training.train import Work, train

    quiet_dependencies()
    our_messages_to_console()
    note_ineffective(cfg)

    def make(trainer: Any, precision: Precision, start: Path | None) -> Work:
        Model = model_class(cfg.model._target_)
        vocabulary = load_tokenizer(Model.tokenizer, cfg.model.tokenizer)
        data = SequenceData(cfg.model, cfg.trainer, vocabulary, Model.samples)
        weights = find_weights(cfg.restore_from_path, cfg.model.max_position_embeddings) if start is None else None
        build = partial(Model, cfg.model, vocabulary)
        return Work(data, TrainingModule(build, masked_lm, cfg.model, cfg.trainer, precision, weights))

    train(cfg, make, _downstream_validation(cfg))


def _downstream_validation(cfg: RunConfig) -> list[Any]:
    """A callback, where it is asked for."""
    if not (cfg.do_training and cfg.model.dwnstr_task_validation.enabled):
        return []
    from bionemo.finetuning.validation import DownstreamValidation

    return [DownstreamValidation(cfg)]
