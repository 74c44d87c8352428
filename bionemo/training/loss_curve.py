# SPDX-License-Identifier: Apache-2.0
"""The loss curve as a picture beside the logs."""

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

log = logging.getLogger(__name__)
_POINTS = 2000  # a picture shows no more; older points are thinned


class LossCurve(pl.Callback):
    """Draws `loss_curve.png` after every validation and at the end; continues over resumes."""

    def __init__(self, directory: Path, references: dict[str, float]) -> None:
        self.path, self.references = directory / "loss_curve.png", references
        self._told = False  # that it cannot be written
        self.train: list[list[float]] = []
        self.validation: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Note the training loss whenever it was logged."""
        if trainer.global_step % pl_module.trainer_config.log_every_n_steps == 0:
            self.train.append([trainer.global_step, pl_module.report["reduced_train_loss"]])
            if len(self.train) > 2 * _POINTS:
                self.train = self.train[::2]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Note the validation loss and draw."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.validation.append([trainer.global_step, float(loss)])
            self._draw(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Draw the end, unless a validation has."""
        if not self.validation or self.validation[-1][0] != trainer.global_step:
            self._draw(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The points so far."""
        return {"train": self.train, "validation": self.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on drawing where the last run stopped."""
        self.train, self.validation = state_dict["train"], state_dict["validation"]

    def _draw(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero or not self.train:
            return
        with pl_module.throughput.paused():
            from matplotlib.figure import Figure  # without pyplot: no display, no global state

            figure = Figure(figsize=(7, 4), layout="constrained")
            axes = figure.subplots()
            axes.plot(*zip(*self.train, strict=True), color="tab:blue", linewidth=0.8, alpha=0.7, label="training")
            if self.validation:
                axes.plot(*zip(*self.validation, strict=True), "o-", color="tab:red", markersize=3, label="validation")
            for label, value in self.references.items():
                axes.axhline(value, color="gray", linestyle=":", linewidth=1)
                axes.annotate(
                    label, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
                )
            axes.set(xlabel="step", ylabel="loss")
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
            unfinished = self.path.with_name(f".{os.getpid()}.{self.path.name}")
            try:
                figure.savefig(unfinished, dpi=120)
                os.replace(unfinished, self.path)
            except OSError as error:  # no reason to end a run
                if not self._told:
                    log.warning("%s cannot be drawn (%s)", self.path, error.strerror or error)
                self._told = True
                unfinished.unlink(missing_ok=True)
