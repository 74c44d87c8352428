# SPDX-License-Identifier: Apache-2.0
"""Which metrics a run's validations give, and whether those that it is told to follow are among them."""

import logging
from typing import Any

import lightning.pytorch as pl

from bionemo.common.errors import UserError
from bionemo.config.hints import did_you_mean
from bionemo.config.saving import FIELD, WHOLE_NUMBERS
from bionemo.config.schema import ExpManagerConfig

log = logging.getLogger(__name__)
_PARAMS = "exp_manager.checkpoint_callback_params"
_STOPPING = "exp_manager.early_stopping_callback_params"
_BETTER_LOW, _BETTER_HIGH = ("loss", "perplexity", "percent_invalid"), ("accuracy",)


def check_monitors(config: ExpManagerConfig, module: Any, trainer: pl.Trainer) -> None:
    """Check that validations give every metric that ranks checkpoints, stops the run or is part of a name.

    Args:
        config: `exp_manager` of the configuration.
        module: a TrainingModule.
        trainer: with the callbacks of the run, of which some give metrics, too.

    Raises:
        UserError: when they do not; names the key and the metrics that there are.
    """
    saving, stopping = config.checkpoint_callback_params, config.early_stopping_callback_params
    followed: dict[str, tuple[str, str]] = {}  # key: metric and mode
    if config.create_checkpoint_callback and saving.monitor:
        followed[_PARAMS] = saving.monitor, saving.mode or "min"
    if config.create_early_stopping_callback:
        followed[_STOPPING] = (
            (stopping and stopping.monitor) or "val_loss",
            (stopping and stopping.mode) or "min",
        )
    wanted = {f"{key}.monitor={metric}": metric for key, (metric, _) in followed.items()}
    if config.create_checkpoint_callback:
        fields = (name for name, _ in FIELD.findall(saving.filename or ""))
        wanted |= {f"{_PARAMS}.filename: {{{name}}}": name for name in fields if name not in WHOLE_NUMBERS}
    if {*wanted.values()} - {"val_loss"}:  # which all models give: no need to build one
        known = validation_metrics(module, trainer)
        for key, metric in wanted.items():
            if metric not in known:
                names = known if "filename" not in key else [*WHOLE_NUMBERS, *known]
                raise UserError(
                    f"{key}: validations of this model do not give it{did_you_mean(metric, names)}; they give "
                    f"{', '.join(names)}"
                )
    for key, (metric, mode) in followed.items():
        worse = {"max": _BETTER_LOW, "min": _BETTER_HIGH}[mode]
        if metric.endswith(worse):
            best = "highest" if mode == "max" else "lowest"
            log.warning("%s.mode=%s takes the %s %s for the best", key, mode, best, metric)


def validation_metrics(module: Any, trainer: pl.Trainer) -> list[str]:
    """Names of the metrics that validations give."""
    model = module._on_meta()
    own = ["loss", *(["perplexity"] if model.perplexity else []), *model.measures]
    others = [name for callback in trainer.callbacks for name in getattr(callback, "gives", ())]  # type: ignore[attr-defined]
    return [*(f"val_{name}" for name in own), *others]
