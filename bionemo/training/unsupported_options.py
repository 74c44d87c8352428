# SPDX-License-Identifier: Apache-2.0
"""Options without effect beside the values of others."""

import logging
from collections.abc import Callable
from typing import Any

from bionemo.config.schema import DownstreamConfig, GPT3Config, RunConfig

log = logging.getLogger(__name__)


def _differs_from(*values: Any) -> Callable[[Any], bool]:
    """Return a condition that holds for all values but None and these."""
    return lambda value: value not in (None, *values)


_LOGGERS = ("wandb", "mlflow", "dllogger", "clearml", "neptune")

# key, condition under which its value has no effect, reason or alternative
_Option = tuple[str, Callable[[Any], Any], str]


def warn_ignored_options(cfg: RunConfig | DownstreamConfig) -> None:
    """Log a warning for each option that has no effect."""
    options: list[_Option] = []
    if isinstance(cfg.trainer.val_check_interval, int):
        reason = "trainer.val_check_interval counts steps"
        options.append(("trainer.check_val_every_n_epoch", _differs_from(1), reason))
    if isinstance(cfg, RunConfig):
        if cfg.model.tensor_model_parallel_size == 1:
            options.append(("model.sequence_parallel", bool, "it requires tensor_model_parallel_size > 1"))
        if cfg.model._target_.startswith("bionemo.") and not isinstance(cfg.model, GPT3Config):
            reason = "the vocabularies are part of the package"
            options += [(f"model.tokenizer.{key}", bool, reason) for key in ("vocab_file", "merge_file")]
    elif cfg.model.encoder_frozen:
        reason = "the metrics of a head on a frozen encoder are in the directory of the run"
        options += [(f"exp_manager.create_{name}_logger", bool, reason) for name in _LOGGERS]
    for key, has_no_effect, reason in options:
        if has_no_effect(value := _read(cfg, key)):
            log.warning("%s=%s has no effect: %s", key, value, reason)


def _read(cfg: RunConfig | DownstreamConfig, key: str) -> Any:
    """Return the value of a dotted key; None if this configuration does not have the key."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
