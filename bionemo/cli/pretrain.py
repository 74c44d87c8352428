# SPDX-License-Identifier: Apache-2.0
"""Prepare data, pretrain and test a model.

bionemo pretrain --config-name=pretrain_esm2_8M model.data.dataset_path=DIR
"""

from functools import partial
from pathlib import Path
from typing import Any

from bionemo.cli.command import run
from bionemo.cli.start_model import add_architecture
from bionemo.common.errors import UserError
from bionemo.common.limits import check_address_space
from bionemo.config.schema import RunConfig


def main(config_name: str = "pretrain_esm2_8M", config_dir: str | Path | None = None) -> None:
    """Run `bionemo pretrain`."""
    run(prepare_and_train, config_name, config_dir, complete=add_architecture)


def prepare_and_train(cfg: RunConfig) -> dict[str, float]:
    """Prepare data, train and test, as configured; return the last metrics of validation and test.

    Without training and testing, the data is prepared, as in v1.
    """
    train_or_test = cfg.do_training or cfg.do_testing
    if cfg.do_preprocessing or not train_or_test:
        prepare_data(cfg)
    return pretrain(cfg) if train_or_test else {}


def prepare_data(cfg: RunConfig) -> None:
    """Write the shards that `model.data` names.

    Raises:
        UserError: if the data needs no preparation, or its preparation fails.
    """
    from bionemo.preparation import prepare

    job = cfg.model.data.preprocessing
    if job is None:
        raise UserError(
            "this data needs no preparation: set do_training=True, or choose another data@model.data, such as "
            "uniref50 or zinc15; to prepare text, run `bionemo preprocess --config-name=text`"
        )
    prepare(job)


def pretrain(cfg: RunConfig) -> dict[str, float]:
    """Build data and model, then train and test; return the last metrics of validation and test."""
    # Imported here, so that --help does not wait for it, and missing files are reported before torch is imported.
    from bionemo.config.micro_batches import divide_batch
    from bionemo.data.files import check_files_exist

    if cfg.do_training:
        check_files_exist(cfg.model.data, ["train", "val"])
    if cfg.do_testing:
        check_files_exist(cfg.model.data, ["test"])
    from bionemo.experiment.console_logging import log_to_console, silence_dependencies

    check_address_space()
    silence_dependencies()
    from bionemo.experiment.quick_imports import quick_imports

    with quick_imports():
        from bionemo.data.data_module import SequenceData
        from bionemo.megatron.gpu import use_gpu
        from bionemo.megatron.precision import Precision
        from bionemo.models.language_model import load_model_class
        from bionemo.tokenizers import load_tokenizer
        from bionemo.training.module import TrainingModule
        from bionemo.training.resume import open_initial_weights
        from bionemo.training.train import TrainingSetup, train
        from bionemo.training.unsupported_options import warn_ignored_options
    silence_dependencies()
    log_to_console()
    warn_ignored_options(cfg)

    def build(trainer: Any, precision: Precision, resume_path: Path | None) -> TrainingSetup:
        model_class = load_model_class(cfg.model._target_)
        vocabulary = load_tokenizer(model_class.tokenizer, cfg.model.tokenizer)
        gpu = use_gpu(cfg.trainer.accelerator)
        micro_batches = divide_batch(cfg.model, cfg.trainer, trainer.world_size, gpu)
        data = SequenceData(cfg.model, cfg.trainer, vocabulary, model_class.dataset, micro_batches)
        weights = None
        if resume_path is None:
            weights = open_initial_weights(cfg.restore_from_path, cfg.model.max_position_embeddings)
        build_model = partial(model_class, cfg.model, vocabulary)
        module = TrainingModule(build_model, cfg.model, cfg.trainer, precision, weights)
        return TrainingSetup(data, module)

    callbacks: list[Any] = []
    if cfg.do_training and cfg.model.dwnstr_task_validation.enabled:
        from bionemo.finetuning.validation import DownstreamValidation

        callbacks.append(DownstreamValidation(cfg))
    return train(cfg, build, callbacks)
