# SPDX-License-Identifier: Apache-2.0
"""Whether tensors hold finite numbers only."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is NaN or infinite; waits for the device once.

    The extremes of a tensor are NaN or infinite exactly when one of its values is. A sum could overflow.
    """
    extremes = [torch.stack(tensor.detach().aminmax()) for tensor in tensors if tensor.numel()]
    return not extremes or bool(torch.cat(extremes).isfinite().all())


def not_finite(groups: Mapping[str, Iterable[Tensor]], device: torch.device) -> list[str]:
    """Names of the groups of tensors in which a rank holds a value that is NaN or infinite.

    All ranks call it with the same names, and get the same answer from one reduction.
    """
    flags = torch.tensor([not all_finite(tensors) for tensors in groups.values()], dtype=torch.int32, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [name for name, flag in zip(groups, flags.tolist(), strict=True) if flag]
