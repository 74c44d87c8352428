# SPDX-License-Identifier: Apache-2.0
"""Check that the monitored metrics exist."""

import logging

import lightning.pytorch as pl

from bionemo.common.errors import UserError
from bionemo.config.check import INTEGER_METRICS, METRIC_FIELD
from bionemo.config.hints import did_you_mean
from bionemo.config.schema import ExpManagerConfig
from bionemo.models.trainable import Trainable

log = logging.getLogger(__name__)
_CHECKPOINTS = "exp_manager.checkpoint_callback_params"
_EARLY_STOPPING = "exp_manager.early_stopping_callback_params"
_WRONG_SUFFIXES = {"max": ("loss", "perplexity", "percent_invalid"), "min": ("accuracy",)}


def check_monitors(config: ExpManagerConfig, model: Trainable, trainer: pl.Trainer, sources: list[str]) -> None:
    """Check that validations compute every metric that ranks checkpoints, stops the run or is part of a file name.

    Args:
        config: `exp_manager` of the configuration.
        model: the model.
        trainer: trainer with all callbacks; those that log metrics list them in `metric_names`.
        sources: names of the sources of a mixture.

    Raises:
        UserError: if a metric is unknown; names the key and the known metrics.
    """
    saving, stopping = config.checkpoint_callback_params, config.early_stopping_callback_params
    monitored: dict[str, tuple[str, str]] = {}  # key: metric and mode
    if config.create_checkpoint_callback and saving.monitor:
        monitored[_CHECKPOINTS] = saving.monitor, saving.mode or "min"
    if config.create_early_stopping_callback:
        monitored[_EARLY_STOPPING] = (
            (stopping and stopping.monitor) or "val_loss",
            (stopping and stopping.mode) or "min",
        )
    required = {f"{key}.monitor={metric}": metric for key, (metric, _) in monitored.items()}
    if config.create_checkpoint_callback:
        fields = (name for name, _ in METRIC_FIELD.findall(saving.filename or ""))
        required |= {f"{_CHECKPOINTS}.filename: {{{name}}}": name for name in fields if name not in INTEGER_METRICS}
    if {*required.values()} - {"val_loss"}:  # all models have val_loss; otherwise the model must be built
        known = [*_list_validation_metrics(model, trainer), *(f"val_loss/{source}" for source in sources)]
        for key, metric in required.items():
            if metric not in known:
                names = known if "filename" not in key else [*INTEGER_METRICS, *known]
                raise UserError(
                    f"{key}: validations do not compute this metric{did_you_mean(metric, names)}; they compute "
                    f"{', '.join(names)}"
                )
    for key, (metric, mode) in monitored.items():
        if metric.endswith(_WRONG_SUFFIXES[mode]):
            extreme = "highest" if mode == "max" else "lowest"
            log.warning("%s.mode=%s: the %s %s is considered the best", key, mode, extreme, metric)


def _list_validation_metrics(model: Trainable, trainer: pl.Trainer) -> list[str]:
    names = ["loss", *["perplexity"] * model.has_perplexity, *model.metric_names]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    others = [name for callback in callbacks for name in getattr(callback, "metric_names", ())]
    return [f"val_{name}" for name in names] + others
