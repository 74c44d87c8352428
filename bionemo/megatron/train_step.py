# SPDX-License-Identifier: Apache-2.0
"""One training step on this rank: micro-batches forward and backward, gradients reduced over all ranks.

Megatron-Core's pieces do it: its gradient buffers (one contiguous fp32 tensor that all gradients are views of, reduced
while the backward pass still runs) and its schedules. Gradients are sums over tokens; at the end they are divided by
the number of asked tokens of all ranks and micro-batches, so every token counts the same wherever it was.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.megatron.sharding import Placement, placements

Objective = Callable[[Tensor, PackedBatch], tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Part:
    """What the optimizer of this process updates of a parameter: all of it, or a flat stretch when it is sharded.

    Attributes:
        parameter: the optimizer's: the parameter itself, or a view [stop - start] of its values.
        gradient: view of the gradient buffer, of the same shape.
        model_parameter: what the part is of.
        place: of the whole parameter.
        start: where the part begins in the flattened parameter.
    """

    parameter: nn.Parameter
    gradient: Tensor
    model_parameter: nn.Parameter
    place: Placement
    start: int


class ParallelModel:
    """A model in Megatron's gradient buffers, ready for training steps; what requires no gradient stays as it is.

    Args:
        model: this process's part of it.
        sharded: give each data-parallel rank a share of the optimizer (ZeRO-1, Rajbhandari et al. 2020): gradients are
            reduce-scattered, each rank updates its share of the weights and gathers the others.
    """

    def __init__(self, model: Any, sharded: bool = False) -> None:
        config = model.transformer_config
        model.model_type = ModelType.encoder_or_decoder
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=sharded
        )
        self.model, self.sharded = model, sharded
        self.buffers = DistributedDataParallel(config, buffers, model)
        self.places = placements(model)
        self.parts = list(_shares(self.buffers, self.places)) if sharded else list(_wholes(self.places))
        self._totals, self._loss_scale = torch.zeros(2), 1.0
        config.no_sync_func = self.buffers.no_sync
        config.finalize_model_grads_func = self._finalise

    def forward_backward(
        self, micro_batches: list[PackedBatch], objective: Objective, autocast: Autocast, loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Leave the mean gradient of the global batch in the `.grad` of each part.

        Args:
            micro_batches: of this rank.
            objective: gives the summed loss and the number of asked tokens from a micro-batch's logits.
            autocast: context for the forward pass.
            loss_scale: the backward pass runs on the loss times this; gradients come out unscaled.

        Returns:
            Summed loss and number of asked tokens, over all ranks; on the device, nothing waits for them.
        """
        self.buffers.zero_grad_buffer()
        self._loss_scale = loss_scale
        self._run(micro_batches, objective, autocast)
        for part in self.parts:
            part.parameter.grad = part.gradient
        return self._totals[0], self._totals[1]

    @torch.no_grad()
    def evaluate(self, micro_batches: list[PackedBatch], objective: Objective, autocast: Autocast) -> Tensor:
        """Summed loss and number of asked tokens of this rank's micro-batches, [2]; all stages know them."""
        self._run(micro_batches, objective, autocast, backward=False)
        return groups.sum_over_stages(self._totals)

    def _run(
        self, micro_batches: list[PackedBatch], objective: Objective, autocast: Autocast, backward: bool = True
    ) -> None:
        """Send the micro-batches through Megatron's schedule."""
        device = next(self.model.parameters()).device
        self._totals = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

        def forward(batches: Any, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            with autocast():
                output = model(batch)

            def loss(logits: Tensor) -> Any:  # called on the last stage
                with autocast():
                    total, count = objective(logits, batch)
                self._totals += torch.stack((total.detach(), count.detach()))
                return total * self._loss_scale, count.int(), {}

            return output, loss

        tokens = len(micro_batches[0].tokens)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[self.buffers],
            num_microbatches=len(micro_batches),
            seq_length=tokens,  # pipelines send [tokens, 1, hidden size]
            micro_batch_size=1,
            forward_only=not backward,
        )

    def norm(self) -> Tensor:
        """Euclidean norm of all gradients of the whole model, each counted once; a scalar on the device."""
        ours = [part.gradient for part in self.parts if part.place.ours]
        # a CPU adds up one after the other: in fp32 a large table's sum would depend on how it is divided
        squares = torch.stack(torch._foreach_norm(ours, dtype=self._totals.dtype)).square().sum() if ours else 0.0
        squares = groups.sum_over_model(torch.as_tensor(squares, dtype=self._totals.dtype, device=self._totals.device))
        return (groups.sum_over_data(squares) if self.sharded else squares).sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients."""
        torch._foreach_mul_([part.gradient for part in self.parts], factor.float())

    def after_update(self) -> None:
        """Gather the shares of the weights, and forget `.grad`: autograd would add into the buffers a second time."""
        if self.sharded:
            self.buffers.start_param_sync(force_sync=True)
        for part in self.parts:
            part.parameter.grad = None

    def _finalise(self, models: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Reduce gradients and totals over the ranks, then turn sums into means without reading the count."""
        finalize_model_grads(models, None, **options)
        groups.sum_over_data(groups.sum_over_stages(self._totals))
        self.buffers.scale_gradients(1.0 / (self._totals[1].clamp_min(1) * self._loss_scale))


def _wholes(places: dict[nn.Parameter, Placement]) -> Iterator[Part]:
    for parameter, place in places.items():
        if parameter.requires_grad:
            gradient: Tensor = vars(parameter)["main_grad"]
            yield Part(parameter, gradient, parameter, place, 0)


def _shares(model: DistributedDataParallel, places: dict[nn.Parameter, Placement]) -> Iterator[Part]:
    """Cut this data-parallel rank's share out of each of Megatron's buckets; parameters may be cut anywhere."""
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            size = len(bucket.grad_data) // groups.data_size()
            first = bucket.offset + groups.data_rank() * size
            for parameter in bucket.params_list:
                begin, end, _ = buffer.param_index_map[parameter]
                low, high = max(begin, first), min(end, first + size)
                if low < high:
                    values = nn.Parameter(buffer.param_data[low:high])
                    yield Part(values, buffer.grad_data[low:high], parameter, places[parameter], low - begin)
