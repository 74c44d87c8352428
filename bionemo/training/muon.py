# SPDX-License-Identifier: Apache-2.0
"""The Muon optimizer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial in `orthogonalize`, from Jordan
_ITERATIONS = 5
_SCALE = 0.2  # the root mean square of AdamW's updates, from Liu et al.
_KEY = "use_muon"  # of a parameter group
MOMENTUM = "momentum_buffer"  # optimizer state of a matrix


class Muon(torch.optim.AdamW):
    """Muon for matrices, and AdamW for all other parameters, in one optimizer.

    The update of a matrix is its orthogonalized momentum (Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024), scaled to the size of AdamW's updates, so that learning rates and weight decay have the same
    meaning (Liu et al., "Muon is scalable for LLM training", 2025, equation 4). torch.optim.Muon computes the same
    without the attributes `grad_scale` and `found_inf` of fused optimizers, and one matrix at a time.

    Args:
        matrices: parameter groups of whole matrices.
        others: parameter groups that AdamW updates.
        options: options of AdamW.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, matrices: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = [{**group, _KEY: True} for group in matrices] + [{**group, _KEY: False} for group in others]
        super().__init__(groups, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; `closure`, which Lightning passes, must not compute any."""
        if self.found_inf is not None and self.found_inf.item():  # loss scaling has synchronized with the device
            return None
        for group in self.param_groups:
            if group[_KEY]:
                self._update_matrices(group)
        return super().step(closure)  # it leaves out the matrices, whose gradients are now None

    def _update_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape].append(parameter)
        for (rows, columns), parameters in by_shape.items():
            gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
            if self.grad_scale is not None:
                gradients /= self.grad_scale
            states = [self.state[parameter] for parameter in parameters]
            for state, gradient in zip(states, gradients, strict=True):
                if MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros_like(gradient)
                state[MOMENTUM].lerp_(gradient, 1 - _MOMENTUM)
            # Nesterov momentum
            updates = orthogonalize(gradients.lerp(torch.stack([state[MOMENTUM] for state in states]), _MOMENTUM))
            updates *= -group["lr"] * _SCALE * max(rows, columns) ** 0.5
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update)
                parameter.grad = None


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors and singular values of about 1, by Newton-Schulz iteration.

    The singular values of the result are between 0.6 and 1.3, except for those far below the largest ones.

    Args:
        matrices: fp32 [..., m, n].

    Returns:
        fp32 [..., m, n]; computed in bf16 on GPUs.
    """
    a, b, c = _COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()
