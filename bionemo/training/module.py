# SPDX-License-Identifier: Apache-2.0
"""LightningModule with manual optimization: one training step is one update from all its micro-batches."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from bionemo.checkpoint import Checkpoint, TensorSource
from bionemo.common.errors import UserError
from bionemo.common.gpus import match_device
from bionemo.common.redaction import redact_tree
from bionemo.config.saved_model import add_defaults
from bionemo.config.schema import ModelConfig, TrainerConfig
from bionemo.data.data_module import SequenceData
from bionemo.data.loader import StepBatch
from bionemo.formats.hub import base_name
from bionemo.megatron import groups
from bionemo.megatron.attention import gpu_kernel
from bionemo.megatron.precision import LossScaler, Precision
from bionemo.megatron.sharded_state_dict import check_weight_shapes, load_weights
from bionemo.megatron.sharding import materialize, parameter_shards
from bionemo.megatron.train_step import ParallelModel
from bionemo.models.trainable import Trainable
from bionemo.training.compilation import compile_layers, is_compiled
from bionemo.training.divergence import check_finite, divergence_error
from bionemo.training.identity import check_same_function, check_same_model
from bionemo.training.micro_batches import fit_micro_batches
from bionemo.training.optimizers import build_optimizer
from bionemo.training.patches import loop_state_at_step
from bionemo.training.schedules import build_schedule
from bionemo.training.throughput import Throughput

log = logging.getLogger(__name__)
_MAX_EXPONENT = 88.0  # exp(88) is finite in fp32


class TrainingModule(pl.LightningModule):
    """Training, validation and test steps, logging, and the state in checkpoints.

    Args:
        build_model: builds the model on torch's default device.
        config: configuration of the model.
        trainer_config: configuration of the trainer.
        precision: precision of the forward pass.
        initial_weights: weights with which a new run starts, instead of random ones.

    Attributes:
        base_model: ORG/NAME@COMMIT on the hub, or name, of the model that the training started from; "": no model.
        schedule_step: number of updates so far, without those that fp16 loss scaling skipped.
        parallel: the model with gradient buffers; set by `configure_model`.
        logged_metrics: last logged training metrics, for progress bar and loss curve.
        list_checkpoints: returns the checkpoints of this run, newest first; set by the checkpoint callback.
        checkpoint_metadata: additional entries of the next checkpoint; set by the checkpoint callback.
    """

    def __init__(
        self,
        build_model: Callable[[], Trainable],
        config: ModelConfig,
        trainer_config: TrainerConfig,
        precision: Precision,
        initial_weights: TensorSource | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._build_model, self.initial_weights = build_model, initial_weights
        self.base_model = base_name(initial_weights.path) if initial_weights else ""
        self.config, self.trainer_config, self.precision = config, trainer_config, precision
        self.schedule = build_schedule(config.optim.sched, config.optim.lr, trainer_config.max_steps)
        self.schedule_step = 0
        self.scaler = LossScaler(config.native_amp_init_scale, config.native_amp_growth_interval, config.hysteresis)
        self.throughput = Throughput()
        self._loss_and_norm = torch.zeros(2)  # of the last step, on the device
        self.logged_metrics: dict[str, float] = {}
        self.list_checkpoints: Callable[[], list[Path]] = list
        self.checkpoint_metadata: dict[str, Any] = {}
        self.model: Trainable | None = None

    @property
    def _data(self) -> SequenceData:
        data: SequenceData = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def configure_model(self) -> None:
        """Build and initialize the model on this rank's device; the process groups must exist."""
        if self.model is not None:
            return
        model = self.build_on_meta()
        materialize(model, self.trainer.strategy.root_device)
        with torch.device("cpu"):  # Lightning makes the GPU the default device of this method
            model.initialize_weights(self.config.seed)
            if self.initial_weights is not None:
                load_weights(parameter_shards(model), self.initial_weights, to_train=True)
        if self.trainer.strategy.root_device.type == "cuda":  # measure before torch.compile traces the layers
            gpu_kernel(self.config.head_size, half=self.precision.name != "32", exact=False)
        if is_compiled(self.config.compile, self.on_gpu):
            compile_layers(model)
        self.model = model
        autocast = partial(self.precision.autocast, self.trainer.strategy.root_device)
        zero = self.config.optim.name == "distributed_fused_adam"
        self.parallel = ParallelModel(model, autocast, zero)

    def check_weights(self, weights: TensorSource | None, model: Trainable) -> None:
        """Check that a model can load weights and computes the same function with them.

        Args:
            weights: the initial weights, or the checkpoint to resume from; None: random weights.
            model: the whole model, from `build_on_meta`.

        Raises:
            UserError: if the weights belong to another model.
        """
        if weights is None:
            return
        if isinstance(weights, Checkpoint):
            check_same_model(weights.state.get("model", {}), model)
        check_weight_shapes(parameter_shards(model), weights)
        check_same_function(weights.path, add_defaults(weights.config, self.config._target_), asdict(self.config))

    def build_on_meta(self) -> Trainable:
        """Build the model, or this rank's part once the process groups exist, without memory for its parameters."""
        with torch.device("meta"):
            return self._build_model()

    @cached_property
    def _peak_flops(self) -> float | None:
        """FLOP/s of the GPUs of a model replica, from the data sheet; None: unknown, or a CPU."""
        if not self.on_gpu:
            return None
        gpu = torch.cuda.get_device_properties(0)
        found = match_device(gpu.name, gpu.total_memory >> 20)
        if found is None:
            return None
        return (
            1e12
            * self.config.model_parallel_size
            * (found.half if self.precision.dtype.itemsize == 2 else found.single)
        )

    def _count_flops(self, step: StepBatch) -> float:
        return sum(self._get_model().count_flops(batch) for batch in step.micro_batches)

    def _get_model(self) -> Trainable:
        assert self.model is not None
        return self.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer; `training_step` applies the schedule."""
        return build_optimizer(
            self.config.optim, self.parallel.optimizer_shards, self._get_model().learning_rate_factor
        )

    @property
    def on_gpu(self) -> bool:
        """Whether this process trains on a GPU."""
        return bool(self.trainer.strategy.root_device.type == "cuda")

    def on_fit_start(self) -> None:
        """With automatic micro-batches on a GPU, use micro-batches that fit on every rank."""
        # with model parallelism, a trial would communicate with other ranks
        if self.config.micro_batch_size == "auto" and self.on_gpu and self.config.model_parallel_size == 1:
            found = fit_micro_batches(self.parallel, self._data, self.device)
            smallest = self.trainer.strategy.reduce(torch.tensor(found.size, device=self.device), reduce_op="min")
            self._data.micro_batches = found = found.limit(int(smallest))
            log.warning("micro-batches of %d rows, %d per step (model.micro_batch_size=auto)", found.size, found.count)

    def on_train_start(self) -> None:
        """Start measuring the throughput."""
        self.throughput.start(self._data.position.consumed_tokens)

    def training_step(self, step: StepBatch) -> None:
        """Make one update from all micro-batches of a step."""
        optimizer: Any = self.optimizers()
        scale = self.scaler.scale if self.precision.needs_scaling else 1.0
        loss_sum, count = self.parallel.forward_backward(step.micro_batches, scale)
        norm = self.parallel.gradient_norm()
        optimizer.optimizer.grad_scale = self.parallel.gradient_scale(norm, self.trainer_config.gradient_clip_val)
        learning_rate = self.schedule(self.schedule_step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["rate"]
        self._update(optimizer, norm)
        self.parallel.finish_update()

        self._data.position = step.next_position
        self.throughput.count_step(self._count_flops(step) if self._peak_flops else 0.0)
        self._loss_and_norm = torch.stack((loss_sum / count.clamp_min(1), norm.to(loss_sum.dtype)))
        if self.trainer.global_step % self.trainer_config.log_every_n_steps == 0:
            self._log_training(learning_rate)

    def _update(self, optimizer: Any, norm: Tensor) -> None:
        """Step optimizer and schedule; with fp16, skip both if the gradients overflow."""
        if self.precision.needs_scaling:
            overflow = not torch.isfinite(norm).item()  # loss scaling must synchronize with the device here
            optimizer.optimizer.found_inf = torch.full((), float(overflow), device=self.device)
            self.scaler.update(overflow)
            self.schedule_step += not overflow
        else:
            self.schedule_step += 1
        optimizer.step()
        if self.scaler.exhausted:
            raise divergence_error(
                self,
                f"the gradients of the last {self.scaler.skipped} updates are not finite, and the loss scale is at "
                f"its minimum of {self.scaler.scale:g}",
            )

    def loss_and_norm(self) -> tuple[float, float]:
        """Return loss and gradient norm of the last step; synchronizes with the device.

        Raises:
            UserError: if one of them is not finite. With loss scaling the norm may be infinite.
        """
        loss, norm = self._loss_and_norm.tolist()
        check_finite(self, self._named(loss, norm), state=False)
        return loss, norm

    def check_finite(self, metrics: Mapping[str, float] | None = None) -> None:
        """Raise a UserError if a metric, weight or optimizer state is not finite; all ranks must call it.

        It names the value and the newest checkpoint.
        """
        check_finite(self, self._last_loss_and_norm() | dict(metrics or {}))

    def _last_loss_and_norm(self) -> dict[str, float]:
        """Return the values of the last step that must be finite; loss scaling skips steps with infinite norm."""
        return self._named(*self._loss_and_norm.tolist())

    def _named(self, loss: float, norm: float) -> dict[str, float]:
        return {"the loss": loss} if self.precision.needs_scaling else {"the loss": loss, "the gradient norm": norm}

    def _log_training(self, learning_rate: float) -> None:
        loss, norm = self.loss_and_norm()
        position = self._data.position
        speed = self.throughput.read(position.consumed_tokens)
        self.logged_metrics = {
            "reduced_train_loss": loss,
            "grad_norm": norm,
            "lr": learning_rate,
            "tokens_per_second": speed.tokens_per_second,
            "train_step_timing in s": speed.seconds_per_step,
            "consumed_samples": float(position.consumed_samples),
            "global_step": float(self.trainer.global_step),
        }
        if self._peak_flops and speed.flops_per_second:
            self.logged_metrics["mfu"] = speed.flops_per_second / self._peak_flops
        if self.precision.needs_scaling:
            self.logged_metrics["loss_scale"] = self.scaler.scale
        self._log_metrics(self.logged_metrics)

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        """Log at the global step; Lightning would count batches since the start of the process."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics."""
        names = ["loss", *(f"loss/{source}" for source in self._data.source_names)]
        self._sums: dict[str, list[Tensor]] = {name: [] for name in names}  # of each batch: sum and count

    def validation_step(self, step: StepBatch, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        """Collect loss and metrics of a batch; the loader gives its source."""
        loss = self.parallel.evaluate(step.micro_batches).float()
        for name in ("loss", *(f"loss/{each}" for each in self._data.source_names[dataloader_idx:][:1])):
            self._sums[name].append(loss)
        for batch in step.micro_batches:
            with self.parallel.autocast():
                for name, sums in self._get_model().compute_metrics(batch).items():
                    self._sums.setdefault(name, []).append(sums)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all ranks."""
        self._log_evaluation("val")

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        """Log the means over all ranks."""
        self._log_evaluation("test")

    def _log_evaluation(self, split: str) -> None:
        sums = torch.stack([sum(each, torch.zeros(2, device=self.device)) for each in self._sums.values()])
        totals = zip(self._sums, groups.sum_over_data_ranks(sums).tolist(), strict=True)
        means = {name: total / count for name, (total, count) in totals if count}
        if "loss" not in means:
            if self.trainer.sanity_checking:  # on a few batches only
                return
            raise UserError(
                f"the {split} data has no target tokens, so there is no {split}_loss: check "
                f"model.data.dataset.{split} and the masking settings of model.data"
            )
        if self._get_model().has_perplexity:
            perplexity = math.exp(min(means["loss"], _MAX_EXPONENT))
            means = {"loss": means["loss"], "perplexity": perplexity, **means}
        metrics = {f"{split}_{name}": mean for name, mean in means.items()}
        check_finite(self, self._last_loss_and_norm() | metrics, state=False)
        self.log_dict(metrics, logger=False)  # for callbacks: early stopping, checkpoints
        if not self.trainer.sanity_checking:
            self._log_metrics(metrics)

    def on_validation_start(self) -> None:
        """Exclude the validation from the throughput."""
        self._pause = self.throughput.paused()
        self._pause.__enter__()

    def on_validation_end(self) -> None:
        """Continue measuring the throughput."""
        self._pause.__exit__(None, None, None)

    def on_save_checkpoint(self, state: dict[str, Any]) -> None:
        """Add the state of this module; Lightning's counters are derived from the step, see patches.py."""
        del state["loops"]
        state["epoch"] = 0
        state |= self.checkpoint_metadata
        state["base_model"] = self.base_model
        state["schedule_step"] = self.schedule_step
        state["model"] = self._get_model().identity
        state["config"] = redact_tree(asdict(self.config))
        state["loss_scaler"] = self.scaler.state_dict()

    def on_load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restore the state of this module; `check_resumable` has checked it."""
        state["loops"] = loop_state_at_step(self.trainer, state["global_step"])
        self.base_model = state.get("base_model", "")
        self.schedule_step = state["schedule_step"]
        self.scaler.load_state_dict(state["loss_scaler"])
