# SPDX-License-Identifier: Apache-2.0
"""In which phase of a run the main thread is, in words that follow `it was last seen`."""

from typing import Any

import lightning.pytorch as pl


class Phases(pl.Callback):
    """Notes each phase when it begins.

    Attributes:
        doing: the phase.
    """

    def __init__(self) -> None:
        self.doing = "before the start"

    def enter(self, phase: str) -> None:
        """Note a phase that is no step or batch of many."""
        self.doing = phase

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """The process groups and the data are there."""
        self.enter("building the model")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """The model is there; the training state and the first batch are read."""
        self.enter("preparing the first step")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The batch is there."""
        self.doing = f"in step {trainer.global_step + 1}"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """What follows: other callbacks, then reading the next batch."""
        self.doing = f"after step {trainer.global_step}"

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Before its first batch."""
        self.enter(f"in validation after step {trainer.global_step}")

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int, *_: Any) -> None:
        """Each batch is a movement: a validation may be long."""
        self.doing = f"in validation after step {trainer.global_step}, batch {index + 1}"

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Other callbacks follow."""
        self.enter(f"after validation at step {trainer.global_step}")

    def on_test_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int, *_: Any) -> None:
        """As validation."""
        self.doing = f"in the test, batch {index + 1}"

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        """The state is collected; writing it follows."""
        self.enter(f"saving step {trainer.global_step}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Other callbacks follow."""
        self.enter("after the last step")
