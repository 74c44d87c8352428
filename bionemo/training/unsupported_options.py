# SPDX-License-Identifier: Apache-2.0
"""What a configuration may say that this version does not do: refused, or noted where nothing is lost by it."""

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
    SchedConfig,
    TrainerConfig,
)

log = logging.getLogger(__name__)
# names and versions of data in NVIDIA's registry that `conf/` has, as v1 had
_SHIPPED = (None, "uniref50_2022_05", "uspto_50k_dataset", "v23.06")
_NO_REGISTRY = "nothing is downloaded from NGC: set model.data.dataset_path, or model.data.preprocessing.source"


def refuse_unbuilt(cfg: RunConfig) -> None:
    """End a run that asks for what is not there, before anything is imported, read or written for it.

    Raises:
        UserError: naming the key and the value to give it.
    """
    model, manager = cfg.model, cfg.exp_manager
    asked: dict[str, tuple[Any, Any]] = {  # key: what it is set to, and what it has to be
        "model.validation.validation_enabled": (model.validation.validation_enabled, False),
        "exp_manager.ema.enable": (bool(manager.ema and manager.ema.enable), False),
    }
    refused = {key: values for key, values in asked.items() if values[0] != values[1]}
    if refused:
        given = ", ".join(f"{key}={value}" for key, (value, _) in refused.items())
        needed = " ".join(f"{key}={'null' if value is None else value}" for key, (_, value) in refused.items())
        raise UserError(f"{given}: not built yet; for now run with {needed}")


def note_ineffective(cfg: RunConfig | DownstreamConfig) -> None:
    """Say which keys ask for something that this version does not do, and what to do instead."""
    if isinstance(cfg, RunConfig):
        asked = _of_model(cfg) | _of_schedule("model.optim.sched", cfg.model.optim.sched)
        validation = "model.dwnstr_task_validation.dataset.optim.sched"
        asked |= _of_schedule(validation, cfg.model.dwnstr_task_validation.dataset.optim.sched)
    else:
        asked = _of_schedule("model.finetuning_optim.sched", cfg.model.finetuning_optim.sched)
    for key, (given, reason) in (asked | _of_trainer(cfg.trainer) | _of_manager(cfg.exp_manager)).items():
        if given:
            log.warning("%s has no effect: %s", key, reason)


# Each of these: key -> whether it asks for what is not done, and why it has no effect.
_Asked = dict[str, tuple[bool, str]]


def _of_trainer(trainer: TrainerConfig) -> _Asked:
    by_steps = isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch not in (None, 1)
    return {
        "trainer.logger=True": (trainer.logger, "set exp_manager.create_tensorboard_logger or another logger's"),
        "trainer.enable_checkpointing=True": (
            trainer.enable_checkpointing,
            "checkpoints are written if exp_manager.create_checkpoint_callback=True",
        ),
        "trainer.use_distributed_sampler=True": (
            trainer.use_distributed_sampler,
            "samples are always divided over the ranks",
        ),
        "trainer.min_epochs": (bool(trainer.min_epochs), "set trainer.min_steps"),
        "trainer.check_val_every_n_epoch": (by_steps, "trainer.val_check_interval counts steps"),
        "trainer.limit_predict_batches": (
            trainer.limit_predict_batches is not None and trainer.limit_predict_batches != 1.0,
            "predictions are made by `python -m bionemo.predict`",
        ),
        "trainer.sync_batchnorm=True": (bool(trainer.sync_batchnorm), "no model here has batch normalization"),
        "trainer.reload_dataloaders_every_n_epochs": (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "the files are read once for all epochs",
        ),
    }


def _of_manager(manager: ExpManagerConfig) -> _Asked:
    saving, timing = manager.checkpoint_callback_params, manager.step_timing_kwargs
    by_step = "set every_n_train_steps or train_time_interval"
    params = "exp_manager.checkpoint_callback_params."
    return {
        f"{params}every_n_epochs": (bool(saving.every_n_epochs), by_step),
        f"{params}save_on_train_epoch_end": (bool(saving.save_on_train_epoch_end), by_step),
        f"{params}save_last_n_optim_states": (
            bool(saving.save_last_n_optim_states),
            "every checkpoint holds the optimizer, unless save_weights_only",
        ),
        f"{params}filepath": (bool(saving.filepath), "checkpoints are directories named by filename"),
        f"{params}verbose=True": (bool(saving.verbose), "checkpoints are not announced"),
        f"{params}auto_insert_metric_name=False": (
            saving.auto_insert_metric_name is False,
            "names of checkpoints always contain the names of metrics",
        ),
        f"{params}save_last=False": (saving.save_last is False, "the last one is always kept: a run goes on from it"),
        "exp_manager.create_preemption_callback=False": (
            manager.create_preemption_callback is False,
            "a run that gets SIGTERM always saves a checkpoint and ends",
        ),
        "exp_manager.disable_validation_on_resume=False": (
            manager.disable_validation_on_resume is False,
            "a validation that was done is not repeated after a resume",
        ),
        "exp_manager.log_step_timing=False": (manager.log_step_timing is False, "seconds per step are always logged"),
        "exp_manager.step_timing_kwargs.reduction": (
            timing is not None and timing.reduction not in (None, "mean"),
            "seconds per step are the mean since the last logged step",
        ),
        "exp_manager.log_delta_step_timing=True": (
            bool(manager.log_delta_step_timing),
            "seconds per step are logged instead",
        ),
        "exp_manager.log_tflops_per_sec_per_gpu=True": (
            bool(manager.log_tflops_per_sec_per_gpu),
            "tokens per second are logged; `python -m bionemo.plan` tells FLOPs per step",
        ),
        "exp_manager.resume_past_end=True": (bool(manager.resume_past_end), "set a larger trainer.max_steps"),
    }


def _of_schedule(key: str, sched: SchedConfig) -> _Asked:
    given = sched.last_epoch not in (None, -1)
    return {f"{key}.last_epoch": (given, "a resumed run goes on with the schedule of its checkpoint")}


def _of_model(cfg: RunConfig) -> _Asked:
    model, data, tokenizer = cfg.model, cfg.model.data, cfg.model.tokenizer
    proteins = data if isinstance(data, ProteinDataConfig) else None
    own_alphabet = "the alphabets are part of the package"
    ways = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    return {
        "model.data.dataloader_type": (data.dataloader_type != "single", "the order follows from model.data.shuffle"),
        "model.data.force_regen_sample_mapping": (
            proteins is not None and proteins.force_regen_sample_mapping,
            "the order is never stored",
        ),
        "model.sequence_parallel": (
            model.sequence_parallel and model.tensor_model_parallel_size == 1,
            "it divides the sequence over tensor ranks, of which there is one",
        ),
        "model.data.train.sort_fastas=False": (
            proteins is not None and proteins.train.sort_fastas is False,
            "members are always put beside their cluster",
        ),
        "model.data.canonicalize_target_smile=False": (
            isinstance(data, MoleculeDataConfig) and not data.canonicalize_target_smile,
            "a validation compares tokens and decodes no SMILES",
        ),
        "model.data.ngc_registry_target": (data.ngc_registry_target not in _SHIPPED, _NO_REGISTRY),
        "model.data.ngc_registry_version": (data.ngc_registry_version not in _SHIPPED, _NO_REGISTRY),
        "model.tokenizer.model": (bool(tokenizer.model), own_alphabet),
        "model.tokenizer.model_name": (
            not (tokenizer.model_name or "facebook/esm").startswith("facebook/esm"),
            own_alphabet,
        ),
        "model.tokenizer.vocab_file": (
            bool(tokenizer.vocab_file) and not isinstance(model, GPT3Config),
            own_alphabet,
        ),
        "exp_manager.checkpoint_callback_params.model_parallel_size": (
            cfg.exp_manager.checkpoint_callback_params.model_parallel_size not in (None, ways),
            "set model.tensor_model_parallel_size",
        ),
    }
