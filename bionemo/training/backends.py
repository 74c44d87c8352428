# SPDX-License-Identifier: Apache-2.0
"""Optional back ends of GPUs: other implementations of FlashAttention, and float8 products in the linear layers.

All are off by default. A run that requests one which cannot be used continues without it.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bionemo.config.schema import ModelConfig, RunConfig
from bionemo.megatron.attention import PackedSequences, attend_on_gpu, gpu_kernel
from bionemo.megatron.linear import Linear
from bionemo.megatron.precision import Precision
from bionemo.models.trainable import Trainable

_TOLERANCE = 2e-2  # relative difference between two implementations in 16 bits
_FLOAT8_MULTIPLE = 16  # of the dimensions of matrices that GPUs multiply in float8


class _Implementation(NamedTuple):
    """Kernels that replace those of FlashAttention 2 in PyTorch."""

    name: str  # in PyTorch's registry
    package: str
    module: str  # of the package; its import makes the name known


# PyTorch 2.13 contains calls of cuDNN in varlen_attn, but never selects them, and its backward call does not match the
# operator; `use_gpu` keeps 2.15 from selecting them. NVIDIA's package registers kernels of its own.
_IMPLEMENTATIONS = {
    "flash4": _Implementation("FA4", "flash-attn-4", "flash_attn.cute.interface"),
    "cudnn": _Implementation("CUDNN", "nvidia-cudnn-frontend", "cudnn.torch"),
}


class Backends(NamedTuple):
    """What a run uses."""

    attention: str | None  # on a GPU: a value of `model.gpu_attention`, "triton" or "sequences"
    float8: bool
    notes: tuple[str, ...]  # one line for each requested back end that is not used


def select_backends(cfg: RunConfig, precision: Precision, device: torch.device) -> Backends:
    """Activate the attention of `model.gpu_attention` in this process, and return what the run uses."""
    model, notes, attention = cfg.model, [], None
    if device.type == "cuda":
        attention, problem = _select_attention(cfg, precision, device)
        if problem:
            notes.append(f"model.gpu_attention={model.gpu_attention} is not used: {problem}")
    problem = float8_problem(model, precision, device.type == "cuda") if model.float8 else None
    if problem:
        notes.append(f"model.float8=True is not used: {problem}")
    return Backends(attention, model.float8 and problem is None, tuple(notes))


def _select_attention(cfg: RunConfig, precision: Precision, device: torch.device) -> tuple[str, str | None]:
    """Return the attention of the run, and why the requested one is not used."""
    option, size = cfg.model.gpu_attention, cfg.model.head_size
    exact = cfg.model.attention_dropout > 0 or torch.are_deterministic_algorithms_enabled()  # set by the trainer
    kernel = gpu_kernel(size, precision.name != "32", exact)
    problem = activate_flash_attention(option if kernel == "flash" else "flash2", size, precision, device)
    if kernel != "flash":
        reason = "attention dropout, determinism, precision, head size or the GPU excludes FlashAttention"
        return kernel, None if option == "flash2" else reason
    return "flash2" if problem else option, problem


def activate_flash_attention(option: str, size: int, precision: Precision, device: torch.device) -> str | None:
    """Let PyTorch's `varlen_attn` use an implementation, if it gives the results of FlashAttention 2 on this GPU.

    Args:
        option: a value of `model.gpu_attention`.
        size: size of a head.
        precision: precision of the forward pass, in 16 bits.
        device: the GPU.

    Returns:
        Why FlashAttention 2 is used instead; None if there is no problem.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # 2.11 refuses every backward pass of `flash4`
        return None if option == "flash2" else f"it needs torch 2.13, not {torch.__version__}"
    from torch.nn import attention as registry

    def restore() -> None:
        if registry.current_flash_attention_impl() is not None:
            registry.restore_flash_attention_impl()

    restore()  # an earlier run of a sweep may have activated another one
    if option == "flash2":
        return None
    name, package, module = _IMPLEMENTATIONS[option]
    try:
        import_module(module)
        with torch.cuda.device(device):
            expected = list(_sample_results(size, precision, device))
            registry.activate_flash_attention_impl(name)
            found = list(_sample_results(size, precision, device))
        if all((x - y).norm() <= _TOLERANCE * y.norm() for x, y in zip(found, expected, strict=True)):
            return None
        problem = "its results differ from those of FlashAttention 2"
    except ImportError as error:
        problem = f"{package} is not installed or cannot be imported ({_first_line(error)})"
    except Exception as error:  # the package compiles its kernels here, for this GPU and size of heads
        problem = f"{package} fails with {type(error).__name__}: {_first_line(error)}"
    restore()
    return problem


def _sample_results(size: int, precision: Precision, device: torch.device) -> Iterator[Tensor]:
    """Yield outputs and gradients of cross-attention and of causal self-attention, computed as in a training."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float16 if precision.needs_scaling else torch.bfloat16
    queries, keys = (
        PackedSequences(lengths, torch.tensor([0, *ends], dtype=torch.int32, device=device), max(lengths))
        for lengths, ends in (((150, 0, 106), (150, 150, 256)), ((90, 0, 140), (90, 90, 230)))
    )
    for sequences, tokens, causal in ((queries.with_context(keys), 230, False), (queries, 256, True)):
        q, k, v = (
            torch.randn(number, 2, size, generator=generator, device=device, dtype=dtype).requires_grad_()
            for number in (256, tokens, tokens)
        )
        output = attend_on_gpu(q, k, v, sequences, size**-0.5, causal=causal)
        gradients = torch.autograd.grad(output.float().square().sum(), (q, k, v))
        yield from (x.detach().float() for x in (output, *gradients))


def float8_problem(model: ModelConfig, precision: Precision, gpu: bool) -> str | None:
    """Return why the linear layers cannot multiply in float8; None if they can."""
    if not gpu:
        return "it needs a GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.9"
    if precision.name != "bf16-mixed":
        return f"it needs trainer.precision=bf16-mixed, not {precision.name}"
    if model.tensor_model_parallel_size > 1:
        return "it does not support tensor parallelism"
    try:
        import_module("torchao.float8")
    except Exception as error:  # another version of torch may also cause other errors
        return f"torchao is not installed or cannot be imported ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def convert_linear_layers(model: Trainable) -> None:
    """Let the linear layers of the transformer blocks multiply in float8, with a scale for each tensor.

    Layers with adapters or other sizes than multiples of 16 stay as they are. So do all parameters and their names.
    The layers must not be compiled yet.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # On a CPU, in tests, the products are emulated. The gradient of a weight is a product over tokens, whose number
    # need not be a multiple of 16.
    config = Float8LinearConfig(emulate=not next(model.parameters()).is_cuda, pad_inner_dim=True)
    for block in model.blocks():
        names = {name for name, module in block.named_modules() if isinstance(module, Linear) and _fits(module)}
        convert_to_float8_training(block, config=config, module_filter_fn=lambda _, name, names=names: name in names)
        for name in names:
            block.get_submodule(name).register_forward_hook(_without_bias)


def _fits(module: Linear) -> bool:
    adapted = next(module.children(), None) is not None  # torchao's module would lack the adapter
    return not adapted and not any(size % _FLOAT8_MULTIPLE for size in module.weight.shape)


def _without_bias(module: nn.Module, inputs: Any, output: Tensor) -> tuple[Tensor, None]:
    """Return what Megatron expects of a linear module, see `Linear`; torchao's modules return the product only."""
    return output, None
