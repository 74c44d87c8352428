# SPDX-License-Identifier: Apache-2.0
"""Validation on a downstream task while a model trains: what its vectors are worth, at every validation anew.

The model stays as it is, and so do its data, its random numbers and its optimizer: a run with and one without end with
the same weights.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from bionemo.common.errors import UserError
from bionemo.config.schema import RunConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.build import make_head, read_splits
from bionemo.finetuning.features import compute
from bionemo.finetuning.metrics import OF_CLASSES, OF_NUMBERS
from bionemo.inference.batching import Limits
from bionemo.inference.model import TrainedModel

_KEY = "model.dwnstr_task_validation.dataset"
_HEAD: dict[str, Any] = {"width": 32, "sizes": (256, 128), "dropout": 0.25}  # the predecessor's


class DownstreamValidation(pl.Callback):
    """Trains a new head on the frozen model, and tells how well it does on the test split.

    Every rank does the same, and comes to the same figures: nothing has to be sent.

    Args:
        cfg: of the run; `model.dwnstr_task_validation` says what the task is.

    Raises:
        UserError: for data that cannot be used, or a model that is divided by depth.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.config = cfg.model.dwnstr_task_validation.dataset
        if cfg.model.pipeline_model_parallel_size > 1:
            raise UserError(
                "model.dwnstr_task_validation.enabled=True needs the whole depth of the model on a device: set "
                "model.pipeline_model_parallel_size=1, with tensor_model_parallel_size instead"
            )
        self.splits, self.classes = read_splits(self.config, _KEY, ["train", "test"])
        target = self.config.target_column
        self.target = target if isinstance(target, str) else target[0]
        figures = OF_NUMBERS if self.config.task_type == "regression" else OF_CLASSES
        self.gives = ["dwnstr_task_val_loss", *(f"test_{self.target}_{name}" for name in figures)]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Do it, and log what came of it."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        begin = time.perf_counter()
        figures = self._measure(pl_module)
        figures["dwnstr_task_seconds"] = time.perf_counter() - begin
        pl_module.log_dict(figures, logger=False)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def _measure(self, module: Any) -> dict[str, float]:
        config = self.config
        model = TrainedModel(module.model, Path("the model that trains"), module.precision.name)
        limits = Limits(sequences=config.emb_batch_size)
        train, test = (compute(model, self.splits[name], config.task_type, limits)[0] for name in ("train", "test"))
        make = partial(make_head, config.task_type, model.hidden_size, len(self.classes), **_HEAD)
        recipe = linear_probe.Recipe(
            config.num_epochs, config.batch_size, config.shuffle, config.random_seed, config.optim
        )
        trained = linear_probe.train(make, train, None, recipe, model.device)
        figures = linear_probe.evaluate(trained.head, test)
        named = {f"test_{self.target}_{name}": value for name, value in figures.items() if name != "loss"}
        return {"dwnstr_task_val_loss": figures["loss"], **named}
