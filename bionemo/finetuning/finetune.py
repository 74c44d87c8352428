# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model, or LoRA adapters in it, on a labelled task, with the training loop of pretraining."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from bionemo import checkpoint
from bionemo.checkpoint.tensors import checksum_weights
from bionemo.checkpoint.tools import iterate_weights
from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.config.check import check_config
from bionemo.config.micro_batches import divide_batch
from bionemo.config.schema import DownstreamConfig, LocalConfig, ModelConfig, RunConfig
from bionemo.data.batch import PackedBatch
from bionemo.data.collate import Collator
from bionemo.data.data_module import SequenceData
from bionemo.finetuning.dataset import LabelledData, get_targets
from bionemo.finetuning.heads import Head, head_factory
from bionemo.finetuning.labels import class_name
from bionemo.finetuning.load_head import check_encoder, read_trained_head
from bionemo.finetuning.model import FineTunedModel, lora_ranks
from bionemo.finetuning.results import (
    ADAPTER,
    Results,
    check_results,
    describe_data,
    print_line,
    run_fingerprint,
    write_results,
)
from bionemo.finetuning.task_data import TaskData, read_splits
from bionemo.formats.convert import Model, open_model
from bionemo.formats.hub import base_model, base_name
from bionemo.formats.huggingface.adapter import MergedAdapter, write_adapter
from bionemo.inference.batching import max_tokens
from bionemo.inference.fingerprint import model_fingerprint
from bionemo.inference.load import open_saved_model, read_config, read_vocabulary
from bionemo.megatron.lora import TARGET_MODULES
from bionemo.megatron.precision import Precision
from bionemo.megatron.sharded_state_dict import load_weights
from bionemo.models.language_model import load_model_class, remove_missing_head
from bionemo.training.checkpointing import CheckpointCallback
from bionemo.training.identity import check_same_function
from bionemo.training.module import TrainingModule
from bionemo.training.train import TrainingSetup, train

_SAMPLE_SIZE = 256  # sequences for the statistics of a new head


def fine_tune(cfg: DownstreamConfig, directory: Path) -> None:
    """Train a model, or adapters in it, together with a head, test the best checkpoint and write the results.

    Raises:
        UserError: if the model or the data cannot be used, the directory holds the results of another run, or training
            fails.
    """
    path, saved = open_saved_model(str(cfg.model.restore_encoder_path))
    cfg.model.restore_encoder_path = str(path)  # the report names it if there are no checkpoints
    model_class = load_model_class(str(saved.config["_target_"]))
    model = _model_config(cfg, read_config(model_class, saved.config, path, cfg.model.seq_length))
    check_same_function(path, saved.config, asdict(model))
    names = ["train", "val", *(["test"] if cfg.do_testing else [])]
    vocabulary = read_vocabulary(model_class, model, saved, path)
    task = read_splits(cfg.model.data, "model.data", names, vocabulary)
    splits, classes, notes, _ = task
    notify(*notes)
    labelled = LabelledData(splits, cfg.model.data.task_type, model_class, max(len(classes), 1))
    weights = checksum_weights(iterate_weights(saved.weights))
    make_head = head_factory(cfg.model.downstream_task, cfg.model.data.task_type, model.hidden_size, len(classes))
    head_weights = _load_head_weights(cfg.model.restore_head_path, make_head, classes, path, weights)
    run = _run_config(cfg, model, len(splits["train"].texts))
    identity = model_fingerprint(weights, model.max_position_embeddings, vocabulary)
    fingerprint = run_fingerprint(cfg, identity, splits)
    check_results(directory, fingerprint)
    initial, adapter, base = _initial_weights(cfg, path, saved, "decoder" if model_class.causal else "encoder")

    def set_up(trainer: pl.Trainer, precision: Precision, start: Path | None) -> TrainingSetup:
        micro_batches = divide_batch(model, run.trainer, trainer.world_size, on_gpu=False)
        data = SequenceData(model, run.trainer, vocabulary, labelled, micro_batches)
        batch_size = data.global_batch_size(trainer.world_size)
        steps = max(1, len(splits["train"].texts) // batch_size)  # per epoch; the next one begins with the rest
        if run.trainer.max_steps < 0:
            run.trainer.max_steps = trainer.fit_loop.epoch_loop.max_steps = steps * (run.trainer.epochs or 1)
        interval = run.trainer.val_check_interval
        if isinstance(interval, float):  # a share of an epoch; Lightning sees a single epoch
            trainer.val_check_interval = max(1, round(steps * interval))
            trainer.check_val_every_n_epoch = None
        last = min(run.trainer.max_steps, steps * (run.trainer.epochs or run.trainer.max_steps))
        if isinstance(interval, int) and interval > last:
            notify(f"trainer.val_check_interval={interval}: the run has {last} steps, and is validated after the last")
            trainer.val_check_interval = last
        sample = list(_iterate_batches(data, "train", _SAMPLE_SIZE)) if head_weights is None else []

        def build() -> FineTunedModel:
            encoder: Any = model_class(model, vocabulary)
            remove_missing_head(encoder, saved.weights)
            return FineTunedModel(encoder, make_head, initial, cfg.model, sample, head_weights, adapter)

        module = TrainingModule(build, model, run.trainer, precision)
        module.base_model = base_name(path)
        return TrainingSetup(data, module)

    train(run, set_up, [ReportCallback(cfg, directory, task, fingerprint, base)])


def _initial_weights(
    cfg: DownstreamConfig, path: Path, saved: Model, stack: str
) -> tuple[checkpoint.TensorSource, dict[str, Tensor], str]:
    """Return the weights of the model, those of an adapter of peft that the training continues, and their base.

    `stack` is the name of the transformer block that is trained. A note says which sizes are used if the configured
    ones differ from those of the adapter.
    """
    if not (cfg.model.peft.enabled and isinstance(saved.weights, MergedAdapter)):
        return saved.weights, {}, (not checkpoint.is_checkpoint(path) and base_model(path)) or str(path)
    adapter = saved.weights.separate(rf"{stack}\.layers\.\d+\.({'|'.join(TARGET_MODULES.values())})")
    tuning, layers = cfg.model.peft.lora_tuning, saved.config["num_layers"]
    if (ranks := lora_ranks(tuning, adapter, layers)) != lora_ranks(tuning, {}, layers):
        sizes = ", ".join(sorted({f"{name.split('.', 2)[2]} {rank}" for name, rank in ranks.items()}))
        notify(f"model.peft.lora_tuning is not used: {path} is continued with its modules and ranks ({sizes})")
    return saved.weights.base, adapter, saved.weights.settings["base_model_name_or_path"]


def _load_head_weights(
    path: str | None, make_head: Callable[[], Head], classes: tuple[str, ...], encoder: Path, weights: str
) -> dict[str, Tensor] | None:
    """Load the weights of the head of a linear probe of an encoder with these weights; None if no path is set.

    Fine-tuning from a trained head distorts the pretrained features less than from a random one (Kumar et al. 2022,
    "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution", LP-FT).
    """
    if path is None:
        return None
    trained = read_trained_head(Path(path))
    expected, found = (
        {name: weight.shape for name, weight in head.state_dict().items()} for head in (make_head(), trained.head)
    )
    if tuple(map(class_name, trained.classes)) != classes or expected != found:
        raise UserError(
            f"model.restore_head_path={path}: it predicts {', '.join(trained.classes[:8]) or 'a number'}, or has "
            "another size: use the head of a run on this task and this model, with the same model.downstream_task"
        )
    check_encoder(trained, encoder, weights)
    return trained.head.state_dict()


def _model_config(cfg: DownstreamConfig, found: ModelConfig) -> ModelConfig:
    """Return the configuration of the pretrained model with the batches, devices and optimizer of this run."""
    config = cfg.model
    if abs(config.freeze_layers) > found.num_layers:
        raise UserError(f"model.freeze_layers={config.freeze_layers}: the model has {found.num_layers} layers")
    data = replace(
        found.data, packing=False, dynamic_padding=True, shuffle=config.data.shuffle, drop_last=False,
        train=replace(found.data.train, use_upsampling=True, seed=config.seed, num_workers=0),
    )  # fmt: skip
    return replace(
        found, data=data, optim=config.finetuning_optim, seed=config.seed, micro_batch_size=config.micro_batch_size,
        global_batch_size=config.global_batch_size, sequence_parallel=config.sequence_parallel,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
    )  # fmt: skip


def _run_config(cfg: DownstreamConfig, model: ModelConfig, sequences: int) -> RunConfig:
    """Return the configuration of a training run with this number of sequences per epoch."""
    if model.pipeline_model_parallel_size > 1:
        raise UserError(
            "model.pipeline_model_parallel_size: fine-tuning does not support pipeline parallelism: set it to 1, and "
            "model.tensor_model_parallel_size instead"
        )
    if cfg.trainer.max_steps < 0 and not cfg.trainer.epochs:
        raise UserError("no stopping condition: set trainer.max_epochs or trainer.max_steps")
    cluster = LocalConfig(_target_="bionemo.launch.local.Local", env_vars={})
    run = RunConfig(
        name=cfg.name, do_preprocessing=False, do_training=True, do_testing=False, restore_from_path=None,
        trainer=cfg.trainer, exp_manager=cfg.exp_manager, model=model, cluster=cluster,
    )  # fmt: skip
    steps = cfg.trainer.max_steps
    if steps < 0:  # with a single process
        steps = (cfg.trainer.epochs or 1) * max(1, sequences // max(1, cfg.model.micro_batch_size))
    if problems := check_config(replace(run, trainer=replace(cfg.trainer, max_steps=steps))):
        raise UserError("; ".join(problems).replace("model.optim.", "model.finetuning_optim."))
    return run


class ReportCallback(pl.Callback):
    """Records the metrics of validations; at the end, tests the best checkpoint and writes the results.

    Every process predicts the whole test split, so nothing has to be gathered. `fingerprint` is that of the run, and
    `base` the model that adapters change.
    """

    def __init__(self, cfg: DownstreamConfig, directory: Path, task: TaskData, fingerprint: str, base: str) -> None:
        self.cfg, self.directory, self.task, self.base = cfg, directory, task, base
        self.fingerprint = fingerprint
        self.history: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the fingerprint."""
        return {"history": self.history, "run": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history.

        Raises:
            UserError: if the checkpoint belongs to a run with another model, other labels or another head.
        """
        if state_dict["run"] != self.fingerprint:
            raise UserError(
                f"{self.directory} has checkpoints of a run with another pretrained model, other labels or another "
                "head: choose another exp_manager.exp_dir"
            )
        self.history = state_dict["history"]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Record the metrics of a validation."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        epochs = _data(trainer).position.consumed_samples / len(_data(trainer).dataset("train").records)
        loss, _ = pl_module.loss_and_norm()
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
        self.history.append({"epoch": epochs, "step": float(trainer.global_step), "train_loss": loss, **values})

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Test and write the results, unless the run was stopped and will resume."""
        checkpoints = next(each for each in trainer.callbacks if isinstance(each, CheckpointCallback))  # type: ignore[attr-defined]
        if checkpoints.stop_signal:
            return
        checkpoints.save(trainer, pl_module)  # if it has not saved this step
        path, best = self._load_best(trainer, pl_module, checkpoints)
        test = predict(pl_module, _data(trainer), "test") if self.cfg.do_testing else None
        if not trainer.is_global_zero:
            return
        model: FineTunedModel = pl_module.model
        sizes = {parameter: math.prod(place.shape) for parameter, place in pl_module.parallel.shards.items()}
        data, opened = describe_data(self.cfg, self.task)["data"], _data(trainer)
        notes = [*data["notes"], *(note for name in data["rows"] for note in opened.dataset(name).notes)]
        details: dict[str, Any] = {
            "parameters": sum(sizes.values()),
            "trainable_parameters": sum(size for parameter, size in sizes.items() if parameter.requires_grad),
            "head_parameters": sum(each.numel() for each in model.head.parameters() if each.requires_grad),
            "data": {**data, "notes": notes},
        }
        is_own = checkpoints.find_newest() is not None  # else nothing holds the weights that the head was trained with
        encoder_weights = checksum_weights(iterate_weights(open_model(path).weights)) if is_own else ""
        results = Results(
            path, encoder_weights, model.head, best, self.history, test, self.task.splits.get("test"),
            max_tokens(model.encoder), self.fingerprint, details,
        )  # fmt: skip
        write_results(results, self.cfg, self.directory, self.task.classes)
        if self.cfg.model.peft.enabled and is_own and write_adapter(self.directory / ADAPTER, path, self.base):
            print_line(f"the adapter, in the format of peft, is in {self.directory / ADAPTER}")

    def _load_best(self, trainer: pl.Trainer, module: Any, checkpoints: CheckpointCallback) -> tuple[Path, int]:
        """Load the best checkpoint, or the newest of a run without validations, if there is one.

        Returns its path, or that of the pretrained model, and its number in the history from 1.
        """
        strategy: Any = trainer.strategy
        strategy.checkpoint_writer.wait()
        strategy.barrier("saved")
        path = checkpoints.find_best() or checkpoints.find_newest()
        if path is None:
            return Path(str(self.cfg.model.restore_encoder_path)), len(self.history)
        load_weights(module.parallel.shards, checkpoint.Checkpoint(path))
        step = checkpoint.load_manifest(path)["step"]
        steps = [values["step"] for values in self.history]
        return path, steps.index(step) + 1 if step in steps else len(steps)


def _data(trainer: pl.Trainer) -> SequenceData:
    data: SequenceData = trainer.datamodule  # type: ignore[attr-defined]
    return data


def _iterate_batches(data: SequenceData, name: Any, count: int | None = None) -> Iterator[PackedBatch]:
    """Yield the sequences of a split in order: all, or `count` evenly spaced ones."""
    dataset, size = data.dataset(name), data.micro_batches.size
    collate = Collator(dataset, size, data.vocabulary.pad_id, dynamic_padding=True)
    records = dataset.records
    if count is not None and len(records) > count:
        records = records[np.linspace(0, len(records) - 1, count).astype(np.int64)]
    for begin in range(0, len(records), size):
        chosen = records[begin : begin + size]
        yield collate([[(np.zeros(len(chosen), np.int64), chosen)]])[0].unpack()


@torch.no_grad()
def predict(module: TrainingModule, data: SequenceData, name: Any) -> tuple[Tensor, Tensor]:
    """Return the predictions [R, C] and the targets, [R] or [R, C], of all labels of a split."""
    model: Any = module.model
    model.eval()
    predictions, targets = [], []
    for batch in (each.to(module.device) for each in _iterate_batches(data, name)):
        with module.precision.autocast(module.device):
            predictions.append(model(batch).float())
        targets.append(get_targets(batch.target_ids, model.task_type, model.head.outputs))
    return torch.cat(predictions), torch.cat(targets)
