# SPDX-License-Identifier: Apache-2.0
"""Early stopping that a resumed run remembers."""

import logging
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from bionemo.config.schema.exp_manager import EarlyStoppingParams, ExpManagerConfig

log = logging.getLogger(__name__)
# of NeMo's exp_manager
_DEFAULTS: dict[str, Any] = {"monitor": "val_loss", "mode": "min", "min_delta": 0.001, "patience": 10, "verbose": True}


def early_stopping(config: ExpManagerConfig) -> "list[EarlyStopping]":
    """Return the callback that `exp_manager` configures, if any."""
    return [EarlyStopping(config.early_stopping_callback_params)] if config.create_early_stopping_callback else []


class EarlyStopping(pl.callbacks.EarlyStopping):
    """Lightning's callback, which keeps the settings of this start and the reason why the run stopped.

    Lightning restores `patience` from the checkpoint and continues a run that has stopped. A run that is started again
    with the same settings stops before its first step; with other settings it continues.

    Attributes:
        reason: why the run stopped; None if it did not.
    """

    def __init__(self, params: EarlyStoppingParams | None = None) -> None:
        given = asdict(params) if params else {}
        self._settings: dict[str, Any] = _DEFAULTS | {key: value for key, value in given.items() if value is not None}
        super().__init__(**self._settings)
        self.reason: str | None = None

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        should_stop, reason = super()._evaluate_stopping_criteria(current)
        self.reason = reason.removesuffix(" Signaling Trainer to stop.") if should_stop and reason else None
        return should_stop, reason

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop if the run has stopped before."""
        if self.reason:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log why the run stopped."""
        if self.reason:
            log.warning(
                "stopped early at step %s: %s To continue, change exp_manager.early_stopping_callback_params.*",
                f"{trainer.global_step:,}", self.reason,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state with the settings and the reason."""
        return super().state_dict() | {"settings": self._settings, "reason": self.reason}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counters; the reason only if the settings are the same."""
        patience = self.patience
        super().load_state_dict(state_dict)
        self.patience = patience
        self.reason = state_dict.get("reason") if state_dict.get("settings") == self._settings else None
