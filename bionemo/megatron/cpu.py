# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core 0.16 needs on a host without CUDA. Does nothing where CUDA is present."""

import logging
import warnings
from typing import Any

import torch


class _TorchOnCpu:
    """`torch` for Megatron's pipeline schedules, which write `device="cuda"` literally when they make zeros."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)


def adapt_to_cpu() -> None:
    """Replace the few CUDA calls that Megatron-Core makes unconditionally by what they mean on a CPU."""
    # Megatron announces each accelerator library it does not find; they are optional, and here expected to be absent.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    if torch.cuda.is_available() or isinstance(torch.cuda.current_device, _Constant):
        return

    cuda: Any = torch.cuda
    cuda.current_device = _Constant(torch.device("cpu"))  # buffers are made on "the current device"
    cuda.synchronize = _Constant(None)
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # the tensor-parallel random state tracker
    cuda.manual_seed = torch.manual_seed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.tensor_parallel.random as tensor_parallel_random
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import layers

    tensor_parallel_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    schedules.torch = _TorchOnCpu()
    # Its linear layers are bound to the autocast of "cuda": under that of a CPU, backward would mix bf16 and fp32.
    for linear in (layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication):
        forward, backward = linear.forward.__wrapped__, linear.backward.__wrapped__
        linear.forward = staticmethod(torch.amp.custom_fwd(forward, device_type="cpu"))
        linear.backward = staticmethod(torch.amp.custom_bwd(backward, device_type="cpu"))


class _Constant:
    """A function of anything that returns one value; its type marks an adapted host."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.value
