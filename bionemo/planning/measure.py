# SPDX-License-Identifier: Apache-2.0
"""Measure a training step of one rank on fake tensors, which have shapes but no data.

The step is that of a run, with the class of its model, so nothing here depends on the model family. Fake tensors are
on the CPU; attention and dropout are replaced by functions that allocate and save as many bytes as their GPU versions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet, finalize

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bionemo.common.errors import UserError
from bionemo.config.schema import ModelConfig
from bionemo.data.batch import PackedBatch
from bionemo.megatron import attention, dropout, groups
from bionemo.megatron.train_step import ParallelModel
from bionemo.models.language_model import LanguageModel, load_model_class
from bionemo.planning.layouts import Layout
from bionemo.planning.lengths import Tokens
from bionemo.tokenizers import load_tokenizer


@dataclass(frozen=True)
class Step:
    """What determines a step, apart from its parallel layout."""

    model: ModelConfig  # configuration of the model
    tokens: tuple[Tokens, ...]  # tokens of a row, for each transformer block
    half: bool  # matrix products are in bf16 or fp16
    deterministic: bool = False  # deterministic algorithms are required
    triton: bool = True  # the GPU supports Triton and FlashAttention

    def build(self) -> LanguageModel:
        """Build this rank's part of the model on torch's default device."""
        model_class = load_model_class(self.model._target_)
        return model_class(self.model, load_tokenizer(model_class.tokenizer, self.model.tokenizer)).train()


@dataclass(frozen=True)
class Costs:
    """Costs of `micro_batches` micro-batches on one rank."""

    micro_batches: int
    parameters: int
    peak: int  # bytes of activations, half-precision copies of weights and temporary tensors at the peak
    written: int  # bytes of the results of all operations
    kernels: int  # operations that allocate memory, an estimate of the number of kernels
    sent: int  # bytes communicated between ranks of a model replica, an all-reduce counted twice
    flops: float  # FLOPs of matrix products, convolutions and attention, recomputation included
    attention_flops: float  # those of attention
    scores: float  # attention scores, counted in the forward pass once and in the backward pass twice


def measure_step(step: Step, layout: Layout, rank: int) -> Costs:
    """Measure as many micro-batches as a pipeline stage holds at once, and another one.

    Args:
        step: the step.
        layout: parallel layout of the run.
        rank: rank in a model replica.

    Raises:
        UserError: if the model class is not found or reads values of tensors.
    """
    count = min(layout.micro_batches.count, layout.pipeline + 1)
    with _fake_rank(step, layout.tensor, layout.pipeline, rank):
        model = step.build()
        autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=step.half)
        parallel = ParallelModel(model, autocast)
        for group in parallel.ddp.bucket_groups:  # fake tensors do not support the all-reduce over replicas
            group.start_grad_sync = group.finish_grad_sync = lambda *_, **__: None
        batch = _fake_batch(step.tokens, layout.micro_batches.size, layout.tensor)
        with _Meter(step, batch) as meter:
            parallel.forward_backward([batch] * count)
        parameters = _count(model)
    return Costs(
        count, parameters, meter.peak, meter.written, meter.kernels, meter.sent, meter.flops, meter.attention_flops,
        meter.scores,
    )  # fmt: skip


def estimate_step(step: Step, layout: Layout, rank: int) -> Costs:
    """Extrapolate the costs of `measure_step` from stages with two and three layers, which needs less time.

    Costs grow by the same amount with every layer. With recomputation, memory does not: there may be another peak.
    """
    models = [replace(step.model, num_layers=number * layout.pipeline) for number in (2, 3)]
    two, three = (astuple(measure_step(replace(step, model=model), layout, rank)) for model in models)
    more = step.model.num_layers // layout.pipeline - 2
    return Costs(*(low + more * (high - low) for low, high in zip(two, three, strict=True)))


def measure_model(step: Step, rows: int) -> tuple[dict[str, int], float]:
    """Return the number of parameters of the whole model, by part, and the FLOPs of the forward pass of some rows."""
    whole = replace(step.model, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, sequence_parallel=False)
    step = replace(step, model=whole)
    with _fake_rank(step, tensor=1, pipeline=1, rank=0), torch.no_grad():
        model, batch = step.build(), _fake_batch(step.tokens, rows, 1)
        with _Meter(step, batch) as meter:
            model.compute_loss(batch)
        parameters = {name.replace("_", " "): _count(child) for name, child in model.named_children()}
    return parameters, meter.flops


@contextmanager
def _fake_rank(step: Step, tensor: int, pipeline: int, rank: int) -> Iterator[None]:
    """Act as one rank of a model replica, on fake tensors, without computing dropout."""
    try:
        with (
            groups.simulate(tensor, pipeline, rank),
            FakeTensorMode(),
            patch.multiple(dropout, _apply_mask=lambda x, *_: torch.empty_like(x), mix=lambda bits: bits),
        ):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"bionemo plan cannot measure {step.model._target_}: {error.func} depends on values of a tensor, "
            "but a plan has only shapes: use an operation whose output shape depends on input shapes only"
        ) from error


class _Meter(TorchDispatchMode):
    """Counts FLOPs, kernels, communicated bytes, and the bytes of storages that operations allocate and free.

    Attention is replaced by a function that allocates as much as on a GPU, and adds its FLOPs and scores.
    """

    def __init__(self, step: Step, batch: PackedBatch) -> None:
        super().__init__()
        self.now = self.peak = self.written = self.kernels = self.sent = 0
        self.flops = self.attention_flops = self.scores = 0.0
        self._known: WeakSet[UntypedStorage] = WeakSet()
        self._attend = patch.object(attention, "attend", _fake_attention(step, batch, self))

    def __enter__(self) -> "_Meter":
        self._attend.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attend.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf.untyped_storage() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self._known.update(inputs)
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":
            return result
        packet = function.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif function.namespace == "c10d":
            factor = 2 if packet is torch.ops.c10d.allreduce_ else 1
            self.sent += factor * max((storage.nbytes() for storage in inputs), default=0)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.kernels += 1
                self.written += storage.nbytes()
                self._add(storage.nbytes())
                finalize(storage, self._add, -storage.nbytes())
        return result

    def count_scores(self, number: float, head_size: int) -> None:
        """Count scores and the FLOPs of their two products: of queries and keys, and of probabilities and values."""
        self.scores += number
        self.attention_flops += 4 * head_size * number
        self.flops += 4 * head_size * number

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fake_batch(tokens: tuple[Tokens, ...], rows: int, divisor: int) -> PackedBatch:
    """Return a micro-batch, each side as one sequence; `divisor` divides the number of its tokens."""
    sides = []
    for side in tokens:
        size = -(-side.count(rows) // divisor) * divisor
        shapes = {"tokens": size, "position_ids": size, "segment_ids": size, "cu_seqlens": 2}
        ints: dict[str, Any] = {name: torch.zeros(length, dtype=torch.int32) for name, length in shapes.items()}
        targets, keys = torch.zeros(round(side.targets(rows)), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        sides.append(
            PackedBatch(
                **ints, target_positions=targets, target_ids=targets, dropout_keys=keys, lengths=(size,),
                max_length=side.max_length,
            )
        )  # fmt: skip
    return replace(sides[-1], source=sides[0] if len(sides) > 1 else None)


def _fake_attention(step: Step, batch: PackedBatch, meter: _Meter) -> Callable[..., Tensor]:
    """Return a substitute of `attend` of megatron/attention.py: saves as many bytes as on a GPU and counts FLOPs."""
    exact = step.model.attention_dropout > 0 or step.deterministic
    kernel = attention.select_gpu_kernel(step.model.head_size, step.half, exact, flash=step.triton, triton=step.triton)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sequences: Any, scale: float, dropout: Any = None, causal: bool = False
    ) -> Tensor:
        tokens, cross = step.tokens[0 if sequences.cu_seqlens is not batch.cu_seqlens else -1], sequences.context
        attended = tokens.attended if cross is None else tokens.cross_attended
        unpadded, heads = len(q) * tokens.filled, q.shape[1]
        saved = 4.0 * heads * len(q)  # the log-sum-exp of each query
        if kernel == "sequences":
            saved = q.dtype.itemsize * q.numel()  # outputs of the sequences, before they are concatenated
            if step.model.attention_dropout > 0:  # probabilities (4 bytes), mask (1) and product of both
                saved += (5 + q.dtype.itemsize) * heads * unpadded * attended
        scores = heads * unpadded * ((attended + 1) / 2 if causal else attended)
        out: Tensor = _Attention.apply(q, k, v, round(saved), scores, meter)
        return out

    return attend


class _Attention(torch.autograd.Function):
    """Allocates what attention allocates and saves, without computing it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, saved: int, scores: float, meter: _Meter) -> Tensor:
        out, intermediates = torch.empty(q.shape, dtype=q.dtype), torch.empty(saved, dtype=torch.uint8)
        ctx.save_for_backward(q, k, v, out, intermediates)
        ctx.scores, ctx.meter = scores, meter
        meter.count_scores(scores, q.shape[2])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.meter.count_scores(2 * ctx.scores, q.shape[2])
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None
