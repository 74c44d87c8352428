# SPDX-License-Identifier: Apache-2.0
"""One training step of this rank: forward and backward of all micro-batches, then reduction of the gradients.

Uses Megatron-Core's gradient buffers (one contiguous fp32 tensor, reduced during the backward pass) and pipeline
schedules. Gradients are sums over target tokens; the optimizer divides them by the number of target tokens in the
global batch, so that every token has the same weight whichever rank and micro-batch it belongs to.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.megatron.sharding import ParameterShard, parameter_shards

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class OptimizerShard:
    """The part of a parameter that this process's optimizer updates: all of it, or a flat slice with ZeRO-1."""

    # parameter of the optimizer: `model_parameter` itself or a flat view of some of its values
    parameter: nn.Parameter
    gradient: Tensor  # view of the gradient buffer, same shape as `parameter`
    model_parameter: nn.Parameter  # parameter of the model
    shard: ParameterShard  # the part of the full tensor that `model_parameter` holds
    start: int  # first updated value in the flattened `model_parameter`


class ParallelModel:
    """A model with Megatron's gradient buffers. Parameters without gradient are not changed.

    Args:
        model: this process's part of the model.
        autocast: context manager for the forward pass.
        zero: shard the optimizer over the data-parallel ranks (ZeRO-1, Rajbhandari et al. 2020): gradients are
            reduce-scattered, each rank updates its share of the weights, then the weights are gathered.
    """

    def __init__(self, model: Any, autocast: Autocast, zero: bool = False) -> None:
        config = model.transformer_config
        model.model_type = ModelType.encoder_or_decoder
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=zero
        )
        self.model, self.autocast, self.zero = model, autocast, zero
        self.ddp = DistributedDataParallel(config, ddp_config, model)
        self.shards = parameter_shards(model)
        self.optimizer_shards = list(_zero_shards(self.ddp, self.shards) if zero else _whole_shards(self.shards))
        self._totals, self._loss_scale = torch.zeros(2), 1.0  # summed loss and number of target tokens
        config.no_sync_func = self.ddp.no_sync
        config.finalize_model_grads_func = self._finalize_gradients

    def forward_backward(self, micro_batches: list[PackedBatch], loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the global batch in the `.grad` of each optimizer shard.

        It is a sum over the target tokens, times `loss_scale`; see `gradient_scale`.

        Args:
            micro_batches: micro-batches of this rank.
            loss_scale: factor of the loss in the backward pass.

        Returns:
            Summed loss and number of target tokens over all ranks, on the device and without synchronization.
        """
        self.ddp.zero_grad_buffer()
        self._loss_scale = loss_scale
        self._run_schedule(micro_batches)
        for each in self.optimizer_shards:
            each.parameter.grad = each.gradient
        return self._totals[0], self._totals[1]

    def try_micro_batch(self, micro_batch: PackedBatch) -> None:
        """Run the forward and backward pass of a micro-batch without pipeline and communication between replicas."""
        with self.ddp.no_sync(), torch.autocast(micro_batch.tokens.device.type, enabled=False):
            with self.autocast():
                loss, _ = self.model.compute_loss(micro_batch)
            loss.backward()

    @torch.no_grad()
    def evaluate(self, micro_batches: list[PackedBatch]) -> Tensor:
        """Return summed loss and number of target tokens of this rank's micro-batches, [2], on all pipeline stages."""
        self._run_schedule(micro_batches, backward=False)
        return groups.sum_over_pipeline(self._totals)

    def _run_schedule(self, micro_batches: list[PackedBatch], backward: bool = True) -> None:
        device = next(self.model.parameters()).device
        self._totals = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

        def forward(batches: Any, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            with self.autocast():
                output = torch.stack(self.model.compute_loss(batch)) if groups.is_last_stage() else model(batch)

            def loss(output: Tensor) -> Any:  # called on the last stage
                self._totals += output.detach()
                return output[0] * self._loss_scale, output[1].detach().int(), {}

            return output, loss

        # A disabled outer autocast keeps the half-precision copies of the weights until all micro-batches are done.
        # With recomputation, which saves memory, they are cast again.
        recomputed = self.model.config.activations_checkpoint_granularity == "full"
        with nullcontext() if recomputed else torch.autocast(device.type, enabled=False):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micro_batches),
                model=[self.ddp],
                num_microbatches=len(micro_batches),
                seq_length=len(micro_batches[0].tokens),  # pipeline stages send [seq_length, 1, hidden size]
                micro_batch_size=1,  # Megatron's batch dimension; the rows are concatenated along the sequence
                forward_only=not backward,
            )

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the mean gradient of the full model, a scalar on the device."""
        owned = [each.gradient for each in self.optimizer_shards if each.shard.is_owner]
        # A CPU sums sequentially: in fp32 the sum of a large tensor would depend on how it is sharded.
        squares = torch.stack(torch._foreach_norm(owned, dtype=self._totals.dtype)).square().sum() if owned else 0.0
        squares = torch.as_tensor(squares, dtype=self._totals.dtype, device=self._totals.device)
        squares = groups.sum_over_model_ranks(squares)
        return (groups.sum_over_data_ranks(squares) if self.zero else squares).sqrt() / self._divisor()

    def gradient_scale(self, norm: Tensor, max_norm: float | None = None) -> Tensor:
        """Return the number by which the optimizer must divide the gradients, a scalar on the device.

        The fused optimizers of torch divide by their attribute `grad_scale` in the pass in which they update.

        Args:
            norm: result of `gradient_norm`.
            max_norm: scale the mean gradient down to this norm; None: do not clip.
        """
        scale = self._divisor()
        return (scale if max_norm is None else scale * ((norm + 1e-6) / max_norm).clamp(min=1.0)).float()

    def _divisor(self) -> Tensor:
        return self._totals[1].clamp_min(1) * self._loss_scale

    def finish_update(self) -> None:
        """Gather the updated weights and reset `.grad`, to which autograd would otherwise add a second time."""
        if self.zero:
            self.ddp.start_param_sync(force_sync=True)
        for each in self.optimizer_shards:
            each.parameter.grad = None

    def _finalize_gradients(self, models: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Reduce gradients and totals over the ranks."""
        finalize_model_grads(models, None, **options)
        groups.sum_over_data_ranks(groups.sum_over_pipeline(self._totals))


def _whole_shards(shards: dict[nn.Parameter, ParameterShard]) -> Iterator[OptimizerShard]:
    for parameter, shard in shards.items():
        if parameter.requires_grad:
            gradient: Tensor = vars(parameter)["main_grad"]
            yield OptimizerShard(parameter, gradient, parameter, shard, 0)


def _zero_shards(ddp: DistributedDataParallel, shards: dict[nn.Parameter, ParameterShard]) -> Iterator[OptimizerShard]:
    """Yield this data-parallel rank's share of each of Megatron's buckets, whose borders may lie inside parameters."""
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            size = len(bucket.grad_data) // groups.data_size()
            first = bucket.offset + groups.data_rank() * size
            for parameter in bucket.params_list:
                begin, end, _ = buffer.param_index_map[parameter]
                low, high = max(begin, first), min(end, first + size)
                if low < high:
                    values = nn.Parameter(buffer.param_data[low:high])
                    yield OptimizerShard(values, buffer.grad_data[low:high], parameter, shards[parameter], low - begin)
