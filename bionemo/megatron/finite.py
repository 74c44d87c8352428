# SPDX-License-Identifier: Apache-2.0
"""Check of tensors for NaN and infinity."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no value is NaN or infinite; synchronizes with the device once."""
    # Minimum or maximum is NaN or infinite exactly if a value is. A sum could overflow.
    extremes = [torch.stack(tensor.detach().aminmax()) for tensor in tensors if tensor.numel()]
    return not extremes or bool(torch.cat(extremes).isfinite().all())


def find_non_finite(tensors: Mapping[str, Iterable[Tensor]], device: torch.device) -> list[str]:
    """Return the keys under which any rank holds NaN or infinity; all ranks must call it with the same keys."""
    flags = torch.tensor([not all_finite(each) for each in tensors.values()], dtype=torch.int32, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]
