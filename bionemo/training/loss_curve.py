# SPDX-License-Identifier: Apache-2.0
"""Plot of the loss curve in the log directory."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from bionemo.common.errors import UserError
from bionemo.common.figures import PALETTE, new_figure, plot_references, render
from bionemo.common.files import write_atomic

log = logging.getLogger(__name__)
FILE_NAME = "loss_curve.png"
_MAX_POINTS = 2000  # when there are twice as many, every second one is dropped


class LossCurve(pl.Callback):
    """Writes `loss_curve.png` after every validation and at the end; its points are part of checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.references: dict[str, float] = {}  # losses to compare with; set when the data is open
        self._warned = False
        self.train: list[list[float]] = []
        self.validation: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Record the training loss if it was logged."""
        if trainer.global_step % pl_module.trainer_config.log_every_n_steps == 0:
            self.train.append([trainer.global_step, pl_module.logged_metrics["reduced_train_loss"]])
            if len(self.train) > 2 * _MAX_POINTS:
                self.train = self.train[::2]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Record the validation loss and plot."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.validation.append([trainer.global_step, float(loss)])
            self._plot(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Plot unless a validation at this step has done so."""
        if not self.validation or self.validation[-1][0] != trainer.global_step:
            self._plot(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the points so far."""
        return {"train": self.train, "validation": self.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the points of a resumed run."""
        self.train, self.validation = state_dict["train"], state_dict["validation"]

    def _plot(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero or not (self.train or self.validation):
            return
        with pl_module.throughput.paused():
            try:
                with new_figure(3.5, 2.6) as figure:
                    self._draw(figure)
                    write_atomic(self.path, render(figure))
            except UserError as error:
                self._warn(f"there is no {FILE_NAME}: {error}")
            except OSError as error:  # training continues
                self._warn(f"{self.path} cannot be written ({error.strerror or error})")

    def _draw(self, figure: Any) -> None:
        axes = figure.subplots()
        if self.train:
            style = "-" if len(self.train) > 1 else "o"
            axes.plot(*zip(*self.train, strict=True), style, linewidth=0.6, alpha=0.8, label="training")
        if self.validation:
            axes.plot(*zip(*self.validation, strict=True), "o-", color=PALETTE[1], label="validation")
        plot_references(axes, self.references)
        axes.set(xlabel="step", ylabel="loss, nats per target token")
        axes.locator_params(axis="x", integer=True)
        figure.legend(loc="outside upper left", ncols=2)

    def _warn(self, message: str) -> None:
        if not self._warned:
            log.warning("%s", message)
        self._warned = True
