# SPDX-License-Identifier: Apache-2.0
"""The story of a downstream run in which the model itself learns: as pretraining, with a task instead of words."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from bionemo import checkpoint
from bionemo.common.errors import UserError
from bionemo.config.check import check
from bionemo.config.schema import DownstreamConfig, LocalConfig, ModelConfig, RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.data_module import SequenceData
from bionemo.finetuning.build import head_of, read_splits
from bionemo.finetuning.dataset import LabelledData, targets_of
from bionemo.finetuning.heads import Head
from bionemo.finetuning.load_head import read_trained_head
from bionemo.finetuning.model import FineTuned, Tuning, objective
from bionemo.finetuning.output_files import identity_of_run, is_complete
from bionemo.finetuning.results import Outcome, keep
from bionemo.inference.identity import of_model
from bionemo.inference.load import model_config, saved_model, vocabulary_of
from bionemo.interop.convert import Model
from bionemo.megatron.precision import Precision
from bionemo.megatron.sharded_state_dict import load_weights
from bionemo.models.build import model_class
from bionemo.training.checkpointing import Checkpoints
from bionemo.training.identity import refuse_another_function
from bionemo.training.module import TrainingModule
from bionemo.training.train import Work, train

_SAMPLE = 256  # sequences that tell the head what vectors are like


def fine_tune(cfg: DownstreamConfig, directory: Path) -> None:
    """Train a model, or adapters in it, together with a head.

    Raises:
        UserError: for a model or data that cannot be used, a directory with another result, and whatever ends a run.
    """
    path, saved = saved_model(str(cfg.model.restore_encoder_path))
    kind = model_class(str(saved.config["_target_"]))
    model = _model_config(cfg, model_config(kind, saved.config, path, cfg.model.seq_length))
    refuse_another_function(path, saved.config, asdict(model))
    splits, classes = read_splits(
        cfg.model.data, "model.data", ["train", "val", *(["test"] if cfg.do_testing else [])]
    )
    labelled = LabelledData(splits, cfg.model.data.task_type, kind)
    vocabulary = vocabulary_of(kind, model, saved, path)
    make_head = head_of(cfg.model.downstream_task, cfg.model.data.task_type, model.hidden_size, len(classes))
    head_weights = _head_weights(cfg.model.restore_head_path, make_head, classes)
    run = _run_config(cfg, model, len(splits["train"].texts))
    identity = identity_of_run(cfg, of_model(path, model.max_position_embeddings, vocabulary), splits)
    is_complete(directory, identity)  # refuses the result of another run

    def make(trainer: pl.Trainer, precision: Precision, start: Path | None) -> Work:
        data = SequenceData(model, run.trainer, vocabulary, labelled)
        at_once = model.micro_batch_size * (run.trainer.accumulate_grad_batches or 1)
        at_once *= trainer.world_size // model.tensor_model_parallel_size
        updates = max(1, len(splits["train"].texts) // at_once)  # of an epoch; what is left comes first in the next
        if run.trainer.max_steps < 0:
            run.trainer.max_steps = trainer.fit_loop.epoch_loop.max_steps = updates * (run.trainer.max_epochs or 1)
        if isinstance(run.trainer.val_check_interval, float):  # of an epoch, where Lightning sees one of all epochs
            trainer.val_check_interval = max(1, round(updates * run.trainer.val_check_interval))
            trainer.check_val_every_n_epoch = None
        sample = list(_batches(data, "train", _SAMPLE)) if head_weights is None else []
        build = partial(_build, cfg, kind, model, vocabulary, make_head, saved, sample, head_weights)
        return Work(data, TrainingModule(build, objective, model, run.trainer, precision))

    train(run, make, [Conclusion(cfg, directory, classes, identity)])


def _build(
    cfg: DownstreamConfig, kind: Any, model: ModelConfig, vocabulary: Any, make_head: Callable[[], Head], saved: Model,
    sample: Sequence[PackedBatch], head_weights: Mapping[str, Tensor] | None,
) -> FineTuned:  # fmt: skip
    lora = cfg.model.peft.lora_tuning
    tuning = Tuning(
        cfg.model.freeze_layers, lora.adapter_dim if cfg.model.peft.enabled else None, tuple(lora.target_modules),
        cfg.model.encoder_lr_scale,
    )  # fmt: skip
    return FineTuned(
        kind(model, vocabulary), make_head, saved.weights, cfg.model.data.task_type, tuning, sample, head_weights
    )


def _head_weights(
    path: str | None, make_head: Callable[[], Head], classes: tuple[str, ...]
) -> dict[str, Tensor] | None:
    """Those of the head that a run with a frozen encoder has left.

    The first updates of a whole model under a new head spoil what it knows: a trained one spares it that (Kumar et al.
    2022, "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution", LP-FT).

    Raises:
        UserError: when there is none, or it answers something else.
    """
    if path is None:
        return None
    trained = read_trained_head(Path(path))
    forms = [
        {name: weight.shape for name, weight in head.state_dict().items()} for head in (make_head(), trained.head)
    ]
    if trained.classes != classes or forms[0] != forms[1]:
        answers = f"answers {', '.join(trained.classes[:8]) or 'a number'}"
        raise UserError(
            f"model.restore_head_path={path}: it {answers}, or is of another size: give the head of a run on this "
            "task and this model, with the same model.downstream_task"
        )
    return trained.head.state_dict()


def _model_config(cfg: DownstreamConfig, found: ModelConfig) -> ModelConfig:
    """The model as it was trained, with what this run says of batches, devices and the optimizer.

    Raises:
        UserError: when it has not as many layers.
    """
    config, told = cfg.model, cfg.model.data
    if abs(config.freeze_layers) > found.num_layers:
        raise UserError(f"model.freeze_layers={config.freeze_layers}: the model has {found.num_layers} layers")
    data = replace(
        found.data, packing=False, dynamic_padding=True, shuffle=told.shuffle, drop_last=False,
        train=replace(found.data.train, use_upsampling=True, seed=config.seed, num_workers=0),
    )  # fmt: skip
    return replace(
        found, data=data, optim=config.finetuning_optim, seed=config.seed, micro_batch_size=config.micro_batch_size,
        global_batch_size=config.global_batch_size, sequence_parallel=config.sequence_parallel,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
    )  # fmt: skip


def _run_config(cfg: DownstreamConfig, model: ModelConfig, sequences: int) -> RunConfig:
    """A run like those of pretraining, of so many sequences an epoch.

    Raises:
        UserError: when its values contradict each other.
    """
    if model.pipeline_model_parallel_size > 1:
        raise UserError(
            "model.pipeline_model_parallel_size: a task needs the whole depth of the model on a device: set it to 1, "
            "and model.tensor_model_parallel_size instead"
        )
    if cfg.trainer.max_steps < 0 and not cfg.trainer.max_epochs:
        raise UserError("trainer.max_epochs=null: give it, or trainer.max_steps, so that training ends")
    here = LocalConfig(_target_="bionemo.launch.local.Local", env_vars={})
    run = RunConfig(
        name=cfg.name, do_preprocessing=False, do_training=True, do_testing=False, restore_from_path=None,
        trainer=cfg.trainer, exp_manager=cfg.exp_manager, model=model, cluster=here,
    )  # fmt: skip
    steps = cfg.trainer.max_steps
    if steps < 0:  # as many as one process would make
        steps = (cfg.trainer.max_epochs or 1) * max(1, sequences // max(1, model.micro_batch_size))
    if problems := check(replace(run, trainer=replace(cfg.trainer, max_steps=steps))):
        raise UserError("; ".join(problems).replace("model.optim.", "model.finetuning_optim."))
    return run


class Conclusion(pl.Callback):
    """Collects figures, and in the end tests the best checkpoint and reports.

    Every process answers for the whole test split: nothing has to be gathered, and all come to the same.

    Args:
        cfg: of the run.
        directory: of the run.
        classes: names of the classes.
        identity: of the run.
    """

    def __init__(self, cfg: DownstreamConfig, directory: Path, classes: tuple[str, ...], identity: str) -> None:
        self.cfg, self.directory, self.classes, self.identity = cfg, directory, classes, identity
        self.history: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """The figures so far."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with those of the checkpoint."""
        self.history = state_dict["history"]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Note what a validation told."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        epochs = pl_module.position.consumed_samples / len(self._data(trainer).samples("train").records)
        loss, _ = pl_module.loss_and_norm()
        told = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
        self.history.append({"epoch": epochs, "step": float(trainer.global_step), "train_loss": loss, **told})

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Test and report, unless the run was told to leave and will go on."""
        checkpoints = next(each for each in trainer.callbacks if isinstance(each, Checkpoints))  # type: ignore[attr-defined]
        if checkpoints.leaving:
            return
        checkpoints.save(trainer, pl_module)  # unless it has
        path, best = self._take_the_best(trainer, pl_module, checkpoints)
        test = answers_of(pl_module, self._data(trainer), "test") if self.cfg.do_testing else None
        if not trainer.is_global_zero:
            return
        model: FineTuned = pl_module.model
        sizes = {parameter: math.prod(place.shape) for parameter, place in pl_module.parallel.places.items()}
        learning = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
        head = sum(parameter.numel() for parameter in model.head.parameters() if parameter.requires_grad)
        more = {"parameters": sum(sizes.values()), "parameters_that_learn": learning, "parameters_of_the_head": head}
        outcome = Outcome(path, model.head, best, self.history, test, self.identity, more)
        keep(outcome, self.cfg, self.directory, self.classes)

    def _take_the_best(self, trainer: pl.Trainer, module: Any, checkpoints: Checkpoints) -> tuple[Path, int]:
        """Go back to the best checkpoint, where there are any; its path, and its number in the history from 1."""
        strategy: Any = trainer.strategy
        strategy.saver.wait()
        strategy.barrier("saved")
        path = checkpoints.best()
        if path is None:
            return Path(str(self.cfg.model.restore_encoder_path)), len(self.history)
        load_weights(module.parallel.places, checkpoint.Checkpoint(path))
        step = checkpoint.manifest_of(path)["step"]
        steps = [figures["step"] for figures in self.history]
        return path, steps.index(step) + 1 if step in steps else len(steps)

    @staticmethod
    def _data(trainer: pl.Trainer) -> SequenceData:
        data: SequenceData = trainer.datamodule  # type: ignore[attr-defined]
        return data


def _batches(data: SequenceData, name: Any, most: int | None = None) -> Iterator[PackedBatch]:
    """Sequences of a split as batches, each once, in their order: all, or so many, evenly spread."""
    samples, rows = data.samples(name), data.config.micro_batch_size
    collate = Collator(samples, rows, data.vocabulary.pad_id, compact=True)
    records = samples.records
    if most is not None and len(records) > most:
        records = records[np.linspace(0, len(records) - 1, most).astype(np.int64)]
    for begin in range(0, len(records), rows):
        some = records[begin : begin + rows]
        yield collate([(np.zeros(len(some), np.int64), some)])


@torch.no_grad()
def answers_of(module: TrainingModule, data: SequenceData, name: Any) -> tuple[Tensor, Tensor]:
    """What the model says of a split where it is asked, [R, C], and what it should say, [R]."""
    model: Any = module.model
    model.eval()
    answers, targets = [], []
    for batch in (each.to(module.device) for each in _batches(data, name)):
        with module.precision.autocast(module.device):
            answers.append(model(batch).float())
        targets.append(targets_of(batch, model.kind))
    return torch.cat(answers), torch.cat(targets)
