# SPDX-License-Identifier: Apache-2.0
"""Evaluation on a downstream task during pretraining: a linear probe at every validation.

It does not change the model, the position in the data, the random number generators or the optimizer, so runs with and
without it end with the same weights.
"""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.config.schema import RunConfig
from bionemo.config.schema.downstream import HeadConfig
from bionemo.finetuning import linear_probe
from bionemo.finetuning.features import compute_features
from bionemo.finetuning.heads import head_factory
from bionemo.finetuning.metrics import METRICS
from bionemo.finetuning.task_data import read_splits
from bionemo.inference.batching import BatchLimits
from bionemo.inference.model import TrainedModel
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer

_KEY = "model.dwnstr_task_validation.dataset"
_HEAD = HeadConfig(cnn_dim=32, hidden_layer_size=[256, 128], dropout=0.25)  # as in v1


class DownstreamValidation(pl.Callback):
    """Trains a new head on the frozen model and logs its metrics on the test split of `model.dwnstr_task_validation`.

    Every rank computes the same values, so nothing has to be communicated.

    Raises:
        UserError: if the data cannot be used, or the model is pipeline parallel.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.config = cfg.model.dwnstr_task_validation.dataset
        if cfg.model.pipeline_model_parallel_size > 1:
            raise UserError(
                "model.dwnstr_task_validation.enabled=True does not support pipeline parallelism: set "
                "model.pipeline_model_parallel_size=1, and tensor_model_parallel_size instead"
            )
        vocabulary = load_tokenizer(load_model_class(cfg.model._target_).tokenizer, cfg.model.tokenizer)
        self.splits, self.classes, notes, _ = read_splits(self.config, _KEY, ["train", "test"], vocabulary)
        notify(*notes)
        target = self.config.target_column
        self.target = target if isinstance(target, str) else "_".join(target)
        names = (f"test_{self.target}_{name}" for name in METRICS[self.config.task_type])
        self.metric_names = ["dwnstr_task_val_loss", *names]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Train the head and log its metrics."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        begin = time.perf_counter()
        values = self._measure(pl_module)
        values["dwnstr_task_seconds"] = time.perf_counter() - begin
        pl_module.log_dict(values, logger=False)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _measure(self, module: Any) -> dict[str, float]:
        config = self.config
        model = TrainedModel(module.model, Path("the model in training"), module.precision.name)
        limits = BatchLimits(sequences=config.emb_batch_size)
        train, test = (
            compute_features(model, self.splits[name], config.task_type, limits)[0] for name in ("train", "test")
        )
        make_head = head_factory(_HEAD, config.task_type, model.hidden_size, len(self.classes))
        settings = linear_probe.ProbeConfig(
            config.num_epochs, config.batch_size, config.shuffle, config.random_seed, config.optim
        )
        trained = linear_probe.train_head(make_head, train, None, settings, model.device)
        values = linear_probe.evaluate(trained.head, test)
        named = {f"test_{self.target}_{name}": value for name, value in values.items() if name != "loss"}
        return {"dwnstr_task_val_loss": values["loss"], **named}
