# SPDX-License-Identifier: Apache-2.0
"""Options of v1 that have no effect: an error if the result would differ, else a warning."""

import logging
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.schema import (
    DownstreamConfig,
    ExpManagerConfig,
    GPT3Config,
    MoleculeDataConfig,
    ProteinDataConfig,
    RunConfig,
    TrainerConfig,
)

log = logging.getLogger(__name__)
# values of ngc_registry_target and ngc_registry_version in `conf/`, from v1
_NGC_DEFAULTS = (None, "uniref50_2022_05", "uspto_50k_dataset", "v23.06")
_NO_NGC = "nothing is downloaded from NGC: set model.data.dataset_path, or model.data.preprocessing.source"
_Options = dict[str, tuple[Any, str]]  # key: whether it is set to an ignored value, and the reason or the alternative


def check_supported(cfg: RunConfig) -> None:
    """Check for options that are not implemented.

    Raises:
        UserError: if one is set; names the key and a supported value.
    """
    unsupported = {
        "model.validation.validation_enabled": cfg.model.validation.validation_enabled,
        "exp_manager.ema.enable": bool(cfg.exp_manager.ema and cfg.exp_manager.ema.enable),
    }
    if keys := [key for key, is_set in unsupported.items() if is_set]:
        current, supported = (" ".join(f"{key}={value}" for key in keys) for value in (True, False))
        raise UserError(f"{current}: not implemented; set {supported}")


def warn_ignored_options(cfg: RunConfig | DownstreamConfig) -> None:
    """Log a warning for each option that has no effect."""
    options = _trainer_options(cfg.trainer) | _exp_manager_options(cfg.exp_manager)
    if isinstance(cfg, RunConfig):
        options = _model_options(cfg) | options
        schedules = {
            "model.optim.sched": cfg.model.optim.sched,
            "model.dwnstr_task_validation.dataset.optim.sched": cfg.model.dwnstr_task_validation.dataset.optim.sched,
        }
    else:
        schedules = {"model.finetuning_optim.sched": cfg.model.finetuning_optim.sched}
    for key, schedule in schedules.items():
        is_set = schedule.last_epoch not in (None, -1)
        options[f"{key}.last_epoch"] = is_set, "a resumed run continues with the schedule of its checkpoint"
    for key, (is_set, reason) in options.items():
        if is_set:
            log.warning("%s has no effect: %s", key, reason)


def _trainer_options(trainer: TrainerConfig) -> _Options:
    counts_steps = isinstance(trainer.val_check_interval, int)
    return {
        "trainer.logger=True": (trainer.logger, "set exp_manager.create_tensorboard_logger or another logger's"),
        "trainer.enable_checkpointing=True": (
            trainer.enable_checkpointing,
            "checkpoints are written if exp_manager.create_checkpoint_callback=True",
        ),
        "trainer.use_distributed_sampler=True": (
            trainer.use_distributed_sampler,
            "samples are always distributed over the ranks",
        ),
        "trainer.min_epochs": (trainer.min_epochs, "set trainer.min_steps"),
        "trainer.check_val_every_n_epoch": (
            counts_steps and trainer.check_val_every_n_epoch not in (None, 1),
            "trainer.val_check_interval counts steps",
        ),
        "trainer.limit_predict_batches": (
            trainer.limit_predict_batches not in (None, 1.0),
            "predictions are made by `python -m bionemo.predict`",
        ),
        "trainer.sync_batchnorm=True": (trainer.sync_batchnorm, "the models have no batch normalization"),
        "trainer.reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            "the files are read once for all epochs",
        ),
    }


def _exp_manager_options(manager: ExpManagerConfig) -> _Options:
    saving, timing = manager.checkpoint_callback_params, manager.step_timing_kwargs
    by_step = "set every_n_train_steps or train_time_interval"
    params = "exp_manager.checkpoint_callback_params."
    return {
        f"{params}every_n_epochs": (saving.every_n_epochs, by_step),
        f"{params}save_on_train_epoch_end": (saving.save_on_train_epoch_end, by_step),
        f"{params}save_last_n_optim_states": (
            saving.save_last_n_optim_states,
            "every checkpoint contains the optimizer state, unless save_weights_only=True",
        ),
        f"{params}filepath": (saving.filepath, "checkpoints are directories named by filename"),
        f"{params}verbose=True": (saving.verbose, "no message is printed for a checkpoint"),
        f"{params}auto_insert_metric_name=False": (
            saving.auto_insert_metric_name is False,
            "names of checkpoints always contain the names of metrics",
        ),
        f"{params}save_last=False": (saving.save_last is False, "the last checkpoint is kept for resuming"),
        "exp_manager.create_preemption_callback=False": (
            manager.create_preemption_callback is False,
            "a run that receives SIGTERM always saves a checkpoint and exits",
        ),
        "exp_manager.disable_validation_on_resume=False": (
            manager.disable_validation_on_resume is False,
            "a completed validation is not repeated after resuming",
        ),
        "exp_manager.log_step_timing=False": (manager.log_step_timing is False, "seconds per step are always logged"),
        "exp_manager.step_timing_kwargs.reduction": (
            timing is not None and timing.reduction not in (None, "mean"),
            "seconds per step are the mean since the last logged step",
        ),
        "exp_manager.log_delta_step_timing=True": (
            manager.log_delta_step_timing,
            "seconds per step are logged instead",
        ),
        "exp_manager.log_tflops_per_sec_per_gpu=True": (
            manager.log_tflops_per_sec_per_gpu,
            "tokens per second are logged; `python -m bionemo.plan` prints FLOPs per step",
        ),
        "exp_manager.resume_past_end=True": (manager.resume_past_end, "set a larger trainer.max_steps"),
    }


def _model_options(cfg: RunConfig) -> _Options:
    model, data, tokenizer = cfg.model, cfg.model.data, cfg.model.tokenizer
    proteins = data if isinstance(data, ProteinDataConfig) else None
    built_in = "the vocabularies are part of the package"
    model_parallel_size = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    return {
        "model.data.dataloader_type": (data.dataloader_type != "single", "model.data.shuffle determines the order"),
        "model.data.force_regen_sample_mapping": (
            proteins is not None and proteins.force_regen_sample_mapping,
            "the order of samples is never stored",
        ),
        "model.sequence_parallel": (
            model.sequence_parallel and model.tensor_model_parallel_size == 1,
            "it requires tensor_model_parallel_size > 1",
        ),
        "model.data.train.sort_fastas=False": (
            proteins is not None and proteins.train.sort_fastas is False,
            "members are always stored next to their cluster",
        ),
        "model.data.canonicalize_target_smile=False": (
            isinstance(data, MoleculeDataConfig) and not data.canonicalize_target_smile,
            "validations compare tokens and decode no SMILES",
        ),
        "model.data.ngc_registry_target": (data.ngc_registry_target not in _NGC_DEFAULTS, _NO_NGC),
        "model.data.ngc_registry_version": (data.ngc_registry_version not in _NGC_DEFAULTS, _NO_NGC),
        "model.tokenizer.model": (tokenizer.model, built_in),
        "model.tokenizer.model_name": (
            not (tokenizer.model_name or "facebook/esm").startswith("facebook/esm"),
            built_in,
        ),
        "model.tokenizer.vocab_file": (tokenizer.vocab_file and not isinstance(model, GPT3Config), built_in),
        "exp_manager.checkpoint_callback_params.model_parallel_size": (
            cfg.exp_manager.checkpoint_callback_params.model_parallel_size not in (None, model_parallel_size),
            "set model.tensor_model_parallel_size",
        ),
    }
