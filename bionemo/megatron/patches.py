# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron-Core for process groups of CPUs; `groups.initialize` applies and `groups.destroy` removes them.

All were verified with megatron-core 0.16.1 to 0.19.2. If a release needs others, training on CPUs fails in the tests.
`megatron/__init__.py` has two others, active while it imports Megatron-Core on any host: wandb cannot be imported, and
`torch.compile` returns its argument.

* The global `torch` of `MODULES`: they allocate on the CUDA device and synchronize with it.
* `forward` and `backward` of `AUTOGRAD_FUNCTIONS`: decorated for CUDA autocast; on a CPU, backward would mix dtypes.
"""

from types import ModuleType
from typing import Any

import torch
from megatron.core import utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings

MODULES = (layers, mappings, param_and_grad_buffer, p2p_communication, schedules, utils)
AUTOGRAD_FUNCTIONS = (layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication)
_originals: list[tuple[Any, str, Any]] = []  # owner, attribute, value before patching


def apply() -> None:
    """Apply the patches; do nothing if they are applied already."""
    if _originals:
        return
    cpu_torch = _torch_without_cuda()
    for module in MODULES:
        _replace(module, "torch", cpu_torch)
    for function in AUTOGRAD_FUNCTIONS:
        for name, bind in (("forward", torch.amp.custom_fwd), ("backward", torch.amp.custom_bwd)):
            unbound = getattr(function, name).__wrapped__
            _replace(function, name, staticmethod(bind(unbound, device_type="cpu")))


def undo() -> None:
    """Restore what `apply` replaced."""
    while _originals:
        setattr(*_originals.pop())


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def _torch_without_cuda() -> ModuleType:
    """Return a copy of the namespace of torch in which the current CUDA device is the CPU."""

    def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)

    cuda: Any = _copy(torch.cuda)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = torch.cpu.current_stream
    cuda.synchronize = lambda: None
    copy: Any = _copy(torch)
    copy.cuda, copy.zeros = cuda, zeros
    return copy


def _copy(module: ModuleType) -> ModuleType:
    copy = ModuleType(module.__name__)
    vars(copy).update(vars(module))
    return copy
