# SPDX-License-Identifier: Apache-2.0
"""The host does not wait for the GPU in a training step, and the step has no more operations than documented.

The tensors are on the CPU, but the code takes the path of GPUs: `Tensor.is_cuda` is true, and the kernels of attention
return zeros. The steps have two micro-batches, bf16-mixed precision and no torch.compile.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bionemo.config.compose import load
from bionemo.data.loader import StepBatch
from bionemo.data.sampler import DataPosition
from bionemo.megatron import groups
from bionemo.megatron.precision import Precision
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from bionemo.training.module import TrainingModule
from tests.support.gpu_kernels import gpu_attention
from tests.support.models import batch_of
from tests.support.runs import MODELS, tiny

MEASURED = {  # operations and MB of a step with two layers and hidden size 32: without and with dropout
    "esm2nv": ((444, 20.5), (776, 30.5)),
    "esm1nv": ((386, 19.9), (794, 32.6)),
    "esm1b": ((428, 20.7), (760, 30.6)),
    "prott5nv": ((796, 39.7), (1760, 70.0)),
    "megamolbart": ((788, 51.4), (1752, 81.7)),
    "gpt3": ((350, 26.9), (758, 39.6)),
}
LIKE_ESM2 = "esm1nv", "esm1b"
ATTENTIONS = dict.fromkeys(MODELS, 2) | dict.fromkeys(("prott5nv", "megamolbart"), 6)
aten = torch.ops.aten
NO_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
}  # fmt: skip
# operations whose result, or the shape of it, depends on values
READS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # with a mask, they call nonzero
# functions that read values or copy between devices; on CPU tensors they need no operation
COPIES = {
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__contains__, Tensor.cpu, Tensor.cuda, Tensor.pin_memory,
    Tensor.new_tensor,
}  # fmt: skip
CREATIONS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}


class Operations(TorchDispatchMode):
    """Counts operations that launch kernels, and the bytes of their inputs and outputs; records those that read."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.counts, self.bytes, self._reads = Counter[str](), 0, reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = function.overloadpacket, kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        masked = packet in INDEXING and any(
            x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if x is not None
        )
        if packet in READS or masked:
            self._reads.append(str(packet))
        result = function(*args, **kwargs)
        if function.namespace not in ("prim", "profiler") and not function.is_view and packet not in NO_KERNEL:
            self.counts[str(packet)] += 1
            tensors += [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.itemsize for x in tensors)
        return result


class Copies(TorchFunctionMode):
    """Records calls that read values or copy between host and device."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch.optim moves `grad_scale` to the device of the weights, on which it is.
        optimizer = sys._getframe(1).f_globals["__name__"].startswith("torch.optim.")
        moved = function is Tensor.to and any(isinstance(x, str | torch.device) for x in (*args, *kwargs.values()))
        from_host = function in CREATIONS and not isinstance(args[0], Tensor) and kwargs.get("device") is not None
        if function in COPIES or (moved and not optimizer) or from_host:
            self._reads.append(function.__name__)
        return function(*args, **kwargs)


@contextmanager
def recorded() -> Iterator[tuple[Operations, list[str]]]:
    """Take the path of GPUs, and record operations and the calls for which the host would wait."""
    reads: list[str] = []

    def synchronize(*_: Any) -> None:
        reads.append("synchronize")

    operations = Operations(reads)
    with (
        patch.multiple(Tensor, create=True, is_cuda=True, is_cpu=False),
        patch.object(torch.cuda, "synchronize", synchronize),
        patch.object(schedules.torch.cuda, "synchronize", synchronize),
        operations,
        Copies(reads),
    ):
        yield operations, reads


def measure(name: str, dropout: float, precision: str = "bf16-mixed") -> tuple[Operations, list[str]]:
    """Return what the second training step of a model does."""
    family = MODELS[name]
    overrides = [f"model.hidden_dropout={dropout}", f"model.attention_dropout={dropout}", "model.seq_length=96",
                 "model.compile=False", "trainer.log_every_n_steps=10"]  # fmt: skip
    cfg: Any = load(family.name, tiny(*overrides, model=name), family.directory / "conf")
    model_class = load_model_class(cfg.model._target_)
    vocabulary = load_tokenizer(model_class.tokenizer, cfg.model.tokenizer)
    module: Any = TrainingModule(
        lambda: model_class(cfg.model, vocabulary), cfg.model, cfg.trainer, Precision(precision)
    )
    module._trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=1, datamodule=SimpleNamespace()
    )
    with groups.simulate(1, 1, 0), gpu_attention(zeros=True):
        module.configure_model()
        optimizer = module.configure_optimizers()
        module.optimizers = lambda: SimpleNamespace(
            optimizer=optimizer, param_groups=optimizer.param_groups, step=optimizer.step
        )
        batch = batch_of(module.model, rows=3)
        step = StepBatch([batch, batch], DataPosition())
        module.training_step(step)  # allocates the state of the optimizer
        with recorded() as record:
            module.training_step(step)
    return record


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_ESM2 else []) for name in MEASURED]
)
def test_a_step_reads_no_value_back_and_has_no_more_operations_than_measured(name: str, dropout: float) -> None:
    operations, reads = measure(name, dropout)
    assert not reads
    kernel = "bionemo.packed_attention" if dropout else "torch_attn._varlen_attn"
    for each in (kernel, f"{kernel}_backward"):
        assert operations.counts[each] == 2 * ATTENTIONS[name]
    number, megabytes = MEASURED[name][dropout > 0]
    assert operations.counts.total() <= 1.02 * number
    assert operations.bytes <= 1.05e6 * megabytes


def test_loss_scaling_waits_for_one_value() -> None:
    """Whether the gradients are finite."""
    _, reads = measure("esm2nv", 0.0, "16-mixed")
    assert reads.count("aten._local_scalar_dense") == 1


READING: list[Callable[[Tensor], object]] = [
    lambda x: x.tolist(),
    lambda x: x[0].item(),
    lambda x: float(x[0]),
    lambda x: bool(x.any()),
    lambda x: 1.0 in x,
    lambda x: x.numpy(),
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: x.to(device=torch.device("cpu"), non_blocking=True),
    lambda x: torch.tensor(1.0, device=x.device),
    lambda x: x.new_tensor(1.0),
    lambda x: x[x > 0],
    lambda x: x.index_put_((x > 0,), x[0]),
    lambda x: torch.where(x > 0),
    lambda x: x.unique(),
    lambda x: torch.equal(x, x),
    lambda x: x.repeat_interleave(x.long()),
    lambda x: torch.cuda.synchronize(),
]


def test_the_record_contains_every_way_to_read() -> None:
    for number, read in enumerate(READING):
        x = torch.arange(3.0)
        with recorded() as (_, reads):
            read(x)
        assert reads, number
    with recorded() as (operations, reads):
        (x.view(3, 1) * x.to(torch.float64)).sum()
    assert operations.counts == {"aten._to_copy": 1, "aten.mul": 1, "aten.sum": 1}
    assert operations.bytes == (3 * 4 + 3 * 8) + (3 * 4 + 3 * 8 + 9 * 8) + (9 * 8 + 8)
    assert not reads
