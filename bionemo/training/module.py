# SPDX-License-Identifier: Apache-2.0
"""The training step, as a LightningModule: the trainer calls it, this file says what one update is."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from bionemo.checkpoint import Checkpoint, TensorSource
from bionemo.common.errors import UserError
from bionemo.common.redaction import redact_tree
from bionemo.config.schema import ModelConfig, TrainerConfig
from bionemo.data.data_module import TrainStep
from bionemo.data.sampler import Position
from bionemo.megatron import groups
from bionemo.megatron.precision import LossScaler, Precision
from bionemo.megatron.sharded_state_dict import load_weights, optimizer_slots, refuse_other_weights
from bionemo.megatron.sharding import materialise, placements
from bionemo.megatron.train_step import Objective, ParallelModel
from bionemo.models.trainable import Trainable
from bionemo.training.divergence import diverged, refuse_not_finite
from bionemo.training.identity import note_other_settings, refuse_another_function, refuse_another_model
from bionemo.training.loop_state import loops_at
from bionemo.training.optimizers import build_optimizer
from bionemo.training.schedules import build_schedule
from bionemo.training.throughput import Throughput

_LARGEST_EXPONENT = 88.0  # exp(88) is finite in fp32


class TrainingModule(pl.LightningModule):
    """Forward, backward, clip, update, report.

    Optimization is manual: a step is one update from all its micro-batches, and this file alone says what that means.
    """

    def __init__(
        self,
        build_model: Callable[[], Trainable],
        objective: Objective,
        config: ModelConfig,
        trainer_config: TrainerConfig,
        precision: Precision,
        initial_weights: TensorSource | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._build_model, self._objective, self._initial_weights = build_model, objective, initial_weights
        self.config, self.trainer_config, self.precision = config, trainer_config, precision
        self.schedule = build_schedule(config.optim.sched, config.optim.lr, trainer_config.max_steps)
        self.schedule_step = 0  # updates made: one that fp16 skipped is not counted
        self.scaler = LossScaler(config.native_amp_init_scale, config.native_amp_growth_interval, config.hysteresis)
        self.position = Position()  # in the data; moves when a step is done, not when it is loaded
        self.throughput = Throughput()
        self._loss_and_norm = torch.zeros(2)  # of the last step, on the device
        self.report: dict[str, float] = {}  # what was logged last, for the progress bar and the loss curve
        self.saved: Callable[[], list[Path]] = list  # checkpoints, newest first; training/checkpointing.py sets it
        self.record: dict[str, Any] = {}  # what else a checkpoint holds, weights alone or not; set there too
        self.model: Trainable | None = None

    def configure_model(self) -> None:
        """Build the model once the process groups are there, directly on this rank's device."""
        if self.model is not None:
            return
        model = self._on_meta()
        materialise(model, self.trainer.strategy.root_device)
        model.initialise(self.config.seed)
        if self._initial_weights is not None:
            load_weights(placements(model), self._initial_weights, to_train=True)
        if self.config.compile:
            for layer in (layer for block in model.blocks() for layer in block.layers):
                layer.compile()
        self.model = model
        self.parallel = ParallelModel(model, sharded=self.config.optim.name == "distributed_fused_adam")

    def check_start(self, start: Path | None) -> None:
        """Compare this model with what the run starts from, before the run writes anything.

        Args:
            start: the checkpoint to go on from; None: the weights that a new run starts with, if any.

        Raises:
            UserError: when its weights belong to another model, or the run cannot go on from it.
        """
        source = self._initial_weights if start is None else Checkpoint(start)
        if source is None:
            return
        model, config = self._on_meta(), asdict(self.config)
        if isinstance(source, Checkpoint):
            known = source.state.get("model")
            refuse_another_model(known if isinstance(known, dict) else {}, model)
        refuse_other_weights(placements(model), source)
        refuse_another_function(source.path, source.config, config)
        if start is not None:
            optimizer_slots(source)
            note_other_settings(start, source.config, config)

    def _on_meta(self) -> Trainable:
        with torch.device("meta"):
            return self._build_model()

    def _built(self) -> Trainable:
        assert self.model is not None
        return self.model

    def num_parameters(self) -> int:
        """Parameters of the model, counted without making any."""
        return sum(parameter.numel() for parameter in self._on_meta().parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer; its schedule is ours to step."""
        return build_optimizer(self.config.optim, self.parallel.parts, self._built().rate_of)

    def on_train_start(self) -> None:
        """Start the clock."""
        self.throughput.start(self.position.consumed_tokens)

    def training_step(self, step: TrainStep) -> None:
        """One update from all micro-batches of a step."""
        optimizer: Any = self.optimizers()
        scale = self.scaler.scale if self.precision.needs_scaling else 1.0
        autocast = partial(self.precision.autocast, self.device)
        loss_sum, count = self.parallel.forward_backward(step.micro_batches, self._objective, autocast, scale)

        norm = self.parallel.norm()
        if (limit := self.trainer_config.gradient_clip_val) is not None:
            self.parallel.scale_gradients((limit / (norm + 1e-6)).clamp(max=1.0))
        rate = self.schedule(self.schedule_step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        self._update(optimizer, norm)
        self.parallel.after_update()

        self.position = step.after
        self.throughput.step()
        self._loss_and_norm = torch.stack((loss_sum / count.clamp_min(1), norm.to(loss_sum.dtype)))
        if self.trainer.global_step % self.trainer_config.log_every_n_steps == 0:
            self._log(rate)

    def _update(self, optimizer: Any, norm: Tensor) -> None:
        """Step the optimizer and the schedule; under fp16 an overflow makes both stand still."""
        if self.precision.needs_scaling:
            overflow = not torch.isfinite(norm).item()  # the one wait a step that loss scaling cannot do without
            optimizer.optimizer.found_inf = torch.tensor(float(overflow), device=self.device)
            self.scaler.update(overflow)
            self.schedule_step += not overflow
        else:
            self.schedule_step += 1
        optimizer.step()
        if self.scaler.exhausted:
            skipped = f"the last {self.scaler.skipped} updates were skipped for gradients that are not finite"
            raise diverged(self, f"{skipped}, and the loss scale is at its minimum of {self.scaler.scale:g}")

    def loss_and_norm(self) -> tuple[float, float]:
        """Read the loss and the gradient norm of the last step, the only wait for the device.

        Raises:
            UserError: when one is not a finite number; with loss scaling the norm may be infinite.
        """
        refuse_not_finite(self, self._figures(), state=False)
        loss, norm = self._loss_and_norm.tolist()
        return loss, norm

    def refuse_not_finite(self, metrics: Mapping[str, float] | None = None) -> None:
        """See that the state that would be saved now, and the given metrics, are finite; all ranks call it.

        Raises:
            UserError: naming what is not finite, and the checkpoint that is left.
        """
        refuse_not_finite(self, self._figures() | dict(metrics or {}))

    def _figures(self) -> dict[str, float]:
        """What has to be finite after a step; with loss scaling the norm may be infinite, that step was skipped."""
        loss, norm = self._loss_and_norm.tolist()
        return {"the loss": loss} if self.precision.needs_scaling else {"the loss": loss, "the gradient norm": norm}

    def _log(self, rate: float) -> None:
        """Hand the step's figures to the loggers."""
        loss_value, norm_value = self.loss_and_norm()
        tokens_per_second, seconds = self.throughput.read(self.position.consumed_tokens)
        self.report = {
            "reduced_train_loss": loss_value,
            "grad_norm": norm_value,
            "lr": rate,
            "tokens_per_second": tokens_per_second,
            "train_step_timing in s": seconds,
            "consumed_samples": float(self.position.consumed_samples),
            "global_step": float(self.trainer.global_step),
        }
        if self.precision.needs_scaling:
            self.report["loss_scale"] = self.scaler.scale
        self._to_loggers(self.report)

    def _to_loggers(self, metrics: dict[str, float]) -> None:
        """Log at the step that was just made; Lightning would count batches from the start of the process."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        self._sums: dict[str, list[Tensor]] = {"loss": []}

    def validation_step(self, step: TrainStep) -> None:
        """Add up loss and asked tokens, and whatever else the model can tell."""
        autocast = partial(self.precision.autocast, self.device)
        self._sums["loss"].append(self.parallel.evaluate(step.micro_batches, self._objective, autocast).float())
        for batch in step.micro_batches:
            with autocast():
                for name, sums in self._built().evaluate(batch).items():
                    self._sums.setdefault(name, []).append(sums)

    def on_validation_epoch_end(self) -> None:
        """Report the means over every rank."""
        self._report_mean("val")

    def on_test_epoch_start(self) -> None:
        """As validation."""
        self.on_validation_epoch_start()

    def test_step(self, step: TrainStep) -> None:
        """As validation."""
        self.validation_step(step)

    def on_test_epoch_end(self) -> None:
        """As validation."""
        self._report_mean("test")

    def _report_mean(self, stage: str) -> None:
        sums = torch.stack([sum(each, torch.zeros(2, device=self.device)) for each in self._sums.values()])
        pairs = zip(self._sums, groups.sum_over_data(sums).tolist(), strict=True)
        means = {name: total / count for name, (total, count) in pairs if count}
        if "loss" not in means:
            if self.trainer.sanity_checking:  # a few batches
                return
            raise UserError(
                f"the {stage} data asks for no prediction, so there is no {stage}_loss: check "
                f"model.data.dataset.{stage} and the masking settings of model.data"
            )
        if self._built().perplexity:
            # of a larger loss it would be infinite in fp32
            means = {"loss": means["loss"], "perplexity": math.exp(min(means["loss"], _LARGEST_EXPONENT)), **means}
        metrics = {f"{stage}_{name}": mean for name, mean in means.items()}
        refuse_not_finite(self, self._figures() | metrics, state=False)
        self.log_dict(metrics, logger=False)  # for callbacks: early stopping, checkpoints
        if not self.trainer.sanity_checking:
            self._to_loggers(metrics)

    def on_validation_start(self) -> None:
        """Validation is not training time."""
        self._pause = self.throughput.paused()
        self._pause.__enter__()

    def on_validation_end(self) -> None:
        """Training time goes on."""
        self._pause.__exit__(None, None, None)

    def on_save_checkpoint(self, state: dict[str, Any]) -> None:
        """Keep what a step depends on; Lightning's own counters follow from the step (training/position.py)."""
        del state["loops"]
        state["epoch"] = 0
        state |= self.record
        state["schedule_step"] = self.schedule_step
        state["model"] = self._built().identity
        state["config"] = redact_tree(asdict(self.config))
        state["loss_scaler"] = self.scaler.state_dict()

    def on_load_checkpoint(self, state: dict[str, Any]) -> None:
        """Take it back; `check_start` has compared the models."""
        state["loops"] = loops_at(self.trainer, state["global_step"])
        self.schedule_step = state["schedule_step"]
        self.scaler.load_state_dict(state["loss_scaler"])
