# SPDX-License-Identifier: Apache-2.0
"""One training step on this rank: micro-batches forward and backward, gradients reduced over all ranks.

Megatron-Core's pieces do it: its gradient buffers (one contiguous fp32 tensor that all gradients are views of, reduced
while the backward pass still runs) and its schedules. Gradients are sums over tokens; at the end they are divided by
the number of asked tokens of all ranks and micro-batches, so every token counts the same wherever it was.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from bionemo.data.batch import PackedBatch

Objective = Callable[[nn.Module, PackedBatch], tuple[Tensor, Tensor]]


class ParallelModel:
    """A model in Megatron's gradient buffers, ready for training steps."""

    def __init__(self, model: Any) -> None:
        config = model.encoder.config
        model.model_type = ModelType.encoder_or_decoder
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        self.model = model
        self.buffers = DistributedDataParallel(config, buffers, model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._totals, self._loss_scale = torch.zeros(2), 1.0
        config.no_sync_func = self.buffers.no_sync
        config.finalize_model_grads_func = self._finalise

    def forward_backward(
        self,
        micro_batches: list[PackedBatch],
        objective: Objective,
        autocast: Callable[[], AbstractContextManager[Any]],
        loss_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Leave the mean gradient of the global batch in each parameter's `.grad`.

        Args:
            micro_batches: of this rank.
            objective: gives the summed loss and the number of asked tokens of a micro-batch.
            autocast: context for the forward pass.
            loss_scale: the backward pass runs on the loss times this; gradients come out unscaled.

        Returns:
            Summed loss and number of asked tokens, over all ranks; on the device, nothing waits for them.
        """
        self.buffers.zero_grad_buffer()
        self._loss_scale = loss_scale
        device = self.parameters[0].device
        sums = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

        def forward(batches: Any, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            torch.manual_seed(batch.noise_seed)  # dropout belongs to the batch: the same wherever and whenever it runs
            with autocast():
                loss, count = objective(model, batch)
            sums.add_(torch.stack((loss.detach(), count.detach())))
            return loss * loss_scale, lambda output: (output, count.int(), {})

        self._totals = sums
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[self.buffers],
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes matter to pipelines only
            micro_batch_size=1,
            forward_only=False,
        )
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad
        return self._totals[0], self._totals[1]

    def drop_gradients(self) -> None:
        """Forget `.grad` after the update; autograd would add the next gradients into the buffers a second time."""
        for parameter in self.parameters:
            parameter.grad = None

    def _finalise(self, models: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Reduce gradients and totals over the ranks, then turn sums into means without reading the count."""
        finalize_model_grads(models, None, **options)
        torch.distributed.all_reduce(self._totals, group=parallel_state.get_data_parallel_group())
        self.buffers.scale_gradients(1.0 / (self._totals[1].clamp_min(1) * self._loss_scale))


def reduce_over_ranks(values: Tensor) -> Tensor:
    """Sum over the data-parallel ranks, in place."""
    torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values
