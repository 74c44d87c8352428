# SPDX-License-Identifier: Apache-2.0
"""Options of v1 that have no effect: an error if the result would differ, else a warning."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from bionemo.common.errors import UserError
from bionemo.config.schema import (
    DownstreamConfig,
    ESM1bConfig,
    ESM1nvConfig,
    ESM2nvConfig,
    GPT3Config,
    MegaMolBARTConfig,
    ModelConfig,
    ProtT5nvConfig,
    RunConfig,
)

log = logging.getLogger(__name__)
_SAVING = "exp_manager.checkpoint_callback_params"
_BY_STEP = "set every_n_train_steps or train_time_interval"
_STEP_TIMING = "seconds per step are always logged"
_NO_UPLOAD = "checkpoints are not uploaded and stay in the directory of the run"
_SCHEDULE = "a resumed run continues with the schedule of its checkpoint"
_BUILT_IN = "the vocabularies are part of the package"
_NO_NGC = "nothing is downloaded from NGC: set model.data.dataset_path, or model.data.preprocessing.source"


def _is_false(value: Any) -> bool:
    return value is False


def _differs_from(*values: Any) -> Callable[[Any], bool]:
    """Return a condition that holds for all values but None and these."""
    return lambda value: value not in (None, *values)


_not_from_ngc = _differs_from("uniref50_2022_05", "uspto_50k_dataset", "v23.06")  # values in `conf/`, from v1
_LOGGERS = ("wandb", "mlflow", "dllogger", "clearml", "neptune")

# key, condition under which its value has no effect, reason or alternative
_Option = tuple[str, Callable[[Any], Any], str]
_OPTIONS: list[_Option] = [
    ("trainer.logger", bool, "set exp_manager.create_tensorboard_logger or another logger's"),
    ("trainer.enable_checkpointing", bool, "exp_manager.create_checkpoint_callback=True enables checkpoints"),
    ("trainer.use_distributed_sampler", bool, "samples are always distributed over the ranks"),
    ("trainer.min_epochs", bool, "set trainer.min_steps"),
    ("trainer.limit_predict_batches", _differs_from(1.0), "predictions are made by `bionemo predict`"),
    ("trainer.sync_batchnorm", bool, "the models have no batch normalization"),
    ("trainer.reload_dataloaders_every_n_epochs", bool, "the files are read once for all epochs"),
    (f"{_SAVING}.every_n_epochs", bool, _BY_STEP),
    (f"{_SAVING}.save_on_train_epoch_end", bool, _BY_STEP),
    (f"{_SAVING}.save_last_n_optim_states", bool, "save_weights_only=True omits the optimizer state"),
    (f"{_SAVING}.filepath", bool, "checkpoints are directories named by filename"),
    (f"{_SAVING}.verbose", bool, "no message is printed for a checkpoint"),
    (f"{_SAVING}.auto_insert_metric_name", _is_false, "names of checkpoints always contain the names of metrics"),
    (f"{_SAVING}.save_last", _is_false, "the last checkpoint is kept for resuming"),
    ("exp_manager.create_preemption_callback", _is_false, "a run always saves a checkpoint after SIGTERM and exits"),
    ("exp_manager.disable_validation_on_resume", _is_false, "a completed validation is not repeated after resuming"),
    ("exp_manager.log_step_timing", _is_false, _STEP_TIMING),
    ("exp_manager.log_delta_step_timing", bool, _STEP_TIMING),
    ("exp_manager.step_timing_kwargs.reduction", _differs_from("mean"), "the mean since the last log is logged"),
    ("exp_manager.log_tflops_per_sec_per_gpu", bool, "`bionemo plan` prints FLOPs per step"),
    ("exp_manager.wandb_logger_kwargs.log_model", bool, _NO_UPLOAD),
    ("exp_manager.mlflow_logger_kwargs.log_model", bool, _NO_UPLOAD),
    ("exp_manager.clearml_logger_kwargs.log_model", bool, _NO_UPLOAD),
    ("exp_manager.wandb_logger_kwargs.checkpoint_name", bool, _NO_UPLOAD),
    ("exp_manager.clearml_logger_kwargs.log_cfg", bool, _NO_UPLOAD),
    ("exp_manager.clearml_logger_kwargs.log_metrics", bool, _NO_UPLOAD),
    ("exp_manager.clearml_logger_kwargs.model_name", bool, _NO_UPLOAD),
    ("exp_manager.resume_past_end", bool, "set a larger trainer.max_steps"),
]  # fmt: skip
_MODEL_OPTIONS: list[_Option] = [
    ("model.optim.sched.last_epoch", _differs_from(-1), _SCHEDULE),
    ("model.dwnstr_task_validation.dataset.optim.sched.last_epoch", _differs_from(-1), _SCHEDULE),
    ("model.data.dataloader_type", _differs_from("single"), "model.data.shuffle determines the order"),
    ("model.data.force_regen_sample_mapping", bool, "the order of samples is never stored"),
    ("model.data.train.sort_fastas", _is_false, "members are always stored next to their cluster"),
    ("model.data.canonicalize_target_smile", _is_false, "validations compare tokens and decode no SMILES"),
    ("model.data.ngc_registry_target", _not_from_ngc, _NO_NGC),
    ("model.data.ngc_registry_version", _not_from_ngc, _NO_NGC),
]
# libraries in files of v1 and ours
_LIBRARIES = {
    ESM1nvConfig: ("sentencepiece", "megatron"), ESM1bConfig: ("huggingface",), ESM2nvConfig: ("huggingface",),
    ProtT5nvConfig: ("sentencepiece",), MegaMolBARTConfig: ("regex",), GPT3Config: ("megatron",),
}  # fmt: skip


def check_supported(cfg: RunConfig) -> None:
    """Raise a UserError, with key and supported value, if an option is set that is not implemented."""
    unsupported = {"model.validation.validation_enabled": False, "exp_manager.ema.enable": False,
                   "trainer.overfit_batches": 0, "trainer.barebones": False}  # fmt: skip
    if keys := [key for key in unsupported if _read(cfg, key)]:
        current = " ".join(f"{key}={_read(cfg, key)}" for key in keys)
        supported = " ".join(f"{key}={unsupported[key]}" for key in keys)
        raise UserError(f"{current}: not implemented; set {supported}")


def warn_ignored_options(cfg: RunConfig | DownstreamConfig) -> None:
    """Log a warning for each option that has no effect."""
    options = list(_OPTIONS)
    if isinstance(cfg.trainer.val_check_interval, int):
        reason = "trainer.val_check_interval counts steps"
        options.append(("trainer.check_val_every_n_epoch", _differs_from(1), reason))
    if isinstance(cfg, RunConfig):
        options += _MODEL_OPTIONS
        by_model = _differs_from(cfg.model.model_parallel_size)
        options.append((f"{_SAVING}.model_parallel_size", by_model, "set model.tensor_model_parallel_size"))
        if cfg.model.tensor_model_parallel_size == 1:
            options.append(("model.sequence_parallel", bool, "it requires tensor_model_parallel_size > 1"))
        options += _tokenizer_options(cfg.model)
    else:
        options.append(("model.finetuning_optim.sched.last_epoch", _differs_from(-1), _SCHEDULE))
        if cfg.model.encoder_frozen:
            reason = "the metrics of a head on a frozen encoder are in the directory of the run"
            options += [(f"exp_manager.create_{name}_logger", bool, reason) for name in _LOGGERS]
    for key, has_no_effect, reason in options:
        if has_no_effect(value := _read(cfg, key)):
            log.warning("%s=%s has no effect: %s", key, value, reason)


def _tokenizer_options(model: ModelConfig) -> Iterator[_Option]:
    """Yield the options of the tokenizer that have no effect; a class of the user may use all of them."""
    if not model._target_.startswith("bionemo."):
        return
    has_mask_id = isinstance(model, ESM2nvConfig | ESM1bConfig)
    conditions: dict[str, Callable[[Any], bool]] = {
        "library": _differs_from(*_LIBRARIES.get(type(model), ())),
        "type": _differs_from("GPT2BPETokenizer" if isinstance(model, GPT3Config) else "BertWordPieceLowerCase"),
        "model": bool,
        "model_name": lambda name: name and not (has_mask_id and name.startswith("facebook/esm")),
        "mask_id": _differs_from(*([32] if has_mask_id else [])),
    }
    if not isinstance(model, GPT3Config):
        conditions |= {"vocab_file": bool, "merge_file": bool}
    if not isinstance(model, ProtT5nvConfig):
        conditions["num_sentinel_tokens"] = _differs_from()
    reason = "model.tokenizer.vocab_file and merge_file define it" if isinstance(model, GPT3Config) else _BUILT_IN
    yield from ((f"model.tokenizer.{key}", has_no_effect, reason) for key, has_no_effect in conditions.items())


def _read(cfg: RunConfig | DownstreamConfig, key: str) -> Any:
    """Return the value of a dotted key; None if this configuration does not have the key."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
