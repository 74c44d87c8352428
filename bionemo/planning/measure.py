# SPDX-License-Identifier: Apache-2.0
"""Profile a training step of one rank on fake tensors (shapes without data), with two layers per transformer block.

The profiled model is the class that a run trains, so nothing here depends on the model family. Fake tensors are on the
CPU; attention and dropout are replaced by functions that allocate and save as many bytes as their GPU versions.

Activations, FLOPs and communication are proportional to the number of tokens; weights, their copies and their
gradients do not depend on it. The profiled micro-batch has so many tokens that every tensor of the first kind is
larger than every tensor of the second kind. The result is then scaled to any micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
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
from bionemo.megatron.vocabulary import language_model_loss
from bionemo.models.language_model import LanguageModel, load_model_class
from bionemo.planning.layouts import Layout, Stage
from bionemo.planning.lengths import Tokens
from bionemo.tokenizers import Vocabulary, load_tokenizer

DEPTH = 2  # profiled layers of a transformer block; the first one may allocate buffers that all layers share
_TOKENS = 2**40  # tokens of the profiled micro-batch
_PROPORTIONAL = "activations", "input", "flops", "attention", "masked", "sent"  # attributes of Segment
_PART_NAMES = {
    "word_embeddings": "word table",
    "position_embeddings": "positions",
    "embedding_layernorm": "embedding norm",
    "lm_head": "head",
}


@dataclass
class Segment:
    """Part of a step. A new one begins where a pass enters or leaves the last layer of a transformer block."""

    # "pre_forward", until the last layer; "forward", in this layer; "post_forward", from there to the last layer of
    # the next block or to the loss; "loss", loss and backward pass of the head; "backward", in the last layer;
    # "post_backward", from there to the previous block or to the end
    phase: str
    stack: int  # index of the transformer block
    activations: float  # bytes per micro-batch, in use when the segment begins, that are proportional to the tokens
    gradients: float  # other bytes in use when the segment begins: gradients of weights
    copies: float  # bytes of weights cast by autocast, in use when the segment begins
    input: float = 0  # bytes of the layer's input ("forward" only)
    flops: float = 0  # FLOPs of matrix products and convolutions
    attention: float = 0  # FLOPs of attention, without masked pairs, forward pass only
    masked: float = 0  # FLOPs for pairs that a causal mask hides and the attention kernel computes, forward pass only
    sent: float = 0  # bytes communicated between tensor ranks, an all-reduce counted twice
    kernels: int = 0  # operations that allocate memory, an estimate of the number of kernels
    # candidates for the peak: bytes added since the segment began, (proportional to the tokens, constant)
    peaks: list[tuple[float, float]] = field(default_factory=lambda: [(0, 0)])

    def scale(self, factor: float) -> "Segment":
        """Return the segment for a micro-batch with a multiple of the tokens."""
        scaled = {name: getattr(self, name) * factor for name in _PROPORTIONAL}
        return replace(self, **scaled, peaks=[(size * factor, constant) for size, constant in self.peaks])

    @property
    def working(self) -> float:
        """Bytes that the peak of the segment adds."""
        return max(map(sum, self.peaks))


@dataclass(frozen=True)
class StepProfile:
    """Costs of a step on one rank."""

    parameters: dict[str, int]  # number of parameters of the rank, by part of the model
    segments: list[Segment]  # the segments of the step, in order
    # mean number of tokens that a token attends to, for each transformer block and attention of a layer
    attended: dict[str, list[float]]

    def count_parameters(self, layers: int) -> dict[str, int]:
        """Return the number of parameters of the rank with `layers` layers per block, by part."""
        return {
            name: count * layers // DEPTH if name.removesuffix(" layers") in self.attended else count
            for name, count in self.parameters.items()
        }

    @cached_property
    def layers(self) -> list[Segment]:
        """Forward pass of a layer of each block; `activations` and `copies` are those kept for the backward pass."""
        return [
            replace(layer, activations=after.activations - layer.activations, copies=after.copies - layer.copies)
            for layer, after in pairwise(self.segments)
            if layer.phase == "forward"
        ]

    def total(self, quantity: str, layers: int, phases: tuple[str, ...] = ()) -> float:
        """Return the sum of an attribute of the segments for `layers` layers per block, in all or in some phases."""
        repeats = {"forward": layers - DEPTH + 1, "backward": layers - DEPTH + 1}
        segments = [each for each in self.segments if not phases or each.phase in phases]
        return sum(repeats.get(each.phase, 1) * getattr(each, quantity) for each in segments)


@dataclass(frozen=True)
class StepProfiler:
    """Profiles the steps of a run on the ranks of any layout."""

    model: ModelConfig  # configuration of the model
    tokens: tuple[Tokens, ...]  # tokens of a row, for each transformer block
    half: bool  # matrix products are in bf16 or fp16
    deterministic: bool = False  # deterministic algorithms are required
    triton: bool = True  # the GPU supports Triton and FlashAttention
    _profiles: dict[Any, StepProfile] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def rows(self) -> int:
        """Rows of the profiled micro-batch."""
        return round(_TOKENS / self.tokens[0].row)

    @cached_property
    def model_class(self) -> type[LanguageModel]:
        """Class of the model."""
        return load_model_class(self.model._target_)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the model."""
        return load_tokenizer(self.model_class.tokenizer, self.model.tokenizer)

    @property
    def table_rows(self) -> int:
        """Rows of the word embedding, padding included."""
        return self.vocabulary.padded_vocab_size(self.model.make_vocab_size_divisible_by)

    @property
    def kernel(self) -> str:
        """Implementation of attention on a GPU; `probabilities`: `sequences` that keeps them for their dropout."""
        dropout = self.model.attention_dropout > 0
        kernel = attention.select_gpu_kernel(
            self.model.head_size, self.half, dropout or self.deterministic, flash=self.triton, triton=self.triton
        )
        return "probabilities" if kernel == "sequences" and dropout else kernel

    def largest_tokens(self, rows: int) -> tuple[Tokens, ...]:
        """Return the tokens of the largest micro-batch of a run; micro-batches differ with dynamic padding."""
        return tuple(each.with_largest_micro_batch(rows) for each in self.tokens)

    def profile(self, layout: Layout, stage: Stage | None = None, largest: bool = False) -> StepProfile:
        """Return the profile of one rank, without recomputation of whole layers.

        The ranks of a tensor-parallel group have equal costs, so one of them is profiled.

        Args:
            layout: parallel layout; its rows, tensor parallelism and selective recomputation are used.
            stage: pipeline stage; None: without pipeline parallelism.
            largest: use the largest micro-batch of the run instead of an average one.

        Raises:
            UserError: if the model class is not found or reads values of tensors.
        """
        first, last = (stage.first, stage.last) if stage else (True, True)
        key = layout.tensor, layout.sequence_parallel, layout.recompute == "selective", first, last
        if key not in self._profiles:
            try:
                self._profiles[key] = _profile_rank(self, *key)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UserError(
                    f"bionemo plan cannot measure {self.model._target_}: {error.func} depends on values of a tensor, "
                    "but a plan has only shapes: use an operation whose output shape depends on input shapes only"
                ) from error
        tokens = self.largest_tokens(layout.micro_batch_size) if largest else self.tokens
        profiled = sum(each.count(self.rows) for each in self.tokens)
        factor = sum(each.count(layout.micro_batch_size) for each in tokens) / profiled
        profile = self._profiles[key]
        return replace(profile, segments=[segment.scale(factor) for segment in profile.segments])


class CostCounter(TorchDispatchMode):
    """Counts FLOPs, kernels, communicated bytes, and the bytes of storages that are in use.

    Args:
        model: its weights are not counted.
        smallest: tensors with fewer bytes are not proportional to the number of tokens.
    """

    def __init__(self, model: LanguageModel, smallest: int) -> None:
        super().__init__()
        self.segments = [Segment("pre_forward", 0, 0, 0, 0)]
        # for each transformer block: tokens that a token attends to, by causal and by cross-attention
        self.attended: list[dict[tuple[bool, bool], float]] = [{} for _ in model.blocks()]
        self._bytes, self._smallest = [0, 0, 0], smallest  # activations, gradients and copies in use
        self._weights = WeakSet(parameter.untyped_storage() for parameter in model.parameters())
        self._known: WeakSet[UntypedStorage] = WeakSet(self._weights)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":
            return result
        segment, packet = self.segments[-1], function.overloadpacket
        inputs = [leaf.untyped_storage() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        self._known.update(inputs)
        if packet in flop_registry:
            segment.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif function.namespace == "c10d":
            factor = 2 if packet is torch.ops.c10d.allreduce_ else 1
            segment.sent += factor * max((storage.nbytes() for storage in inputs), default=0)
        copy = packet is torch.ops.aten._to_copy and inputs[0] in self._weights
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known.add(storage)
                segment.kernels += 1
                kind = 2 if copy else int(storage.nbytes() < self._smallest)
                self._add(kind, storage.nbytes())
                finalize(storage, self._add, kind, -storage.nbytes())
        return result

    def _add(self, kind: int, size: int) -> None:
        self._bytes[kind] += size
        if size > 0:
            self.add_peak()

    def add_peak(self, more: float = 0) -> None:
        """Add the memory now in use, plus `more` bytes, to the candidates for the peak of the segment."""
        segment, (activations, gradients, copies) = self.segments[-1], self._bytes
        proportional = activations - segment.activations
        # Copies that autograd frees are not subtracted: without recomputation, autocast keeps them.
        constant = gradients - segment.gradients + max(copies - segment.copies, 0) + more
        if all(proportional > peak[0] or constant > peak[1] for peak in segment.peaks):
            remaining = [peak for peak in segment.peaks if peak[0] > proportional or peak[1] > constant]
            segment.peaks = [*remaining, (proportional, constant)]

    def begin(self, phase: str, stack: int, input_size: int = 0) -> None:
        """Begin a segment."""
        activations, gradients, copies = self._bytes
        self.segments.append(Segment(phase, stack, activations, gradients, copies, input_size))

    def watch(self, layer: torch.nn.Module, stack: int) -> None:
        """Begin segments where the forward and the backward pass enter and leave a layer."""

        def pre_forward(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            inputs[0].register_hook(lambda _: self.begin("post_backward", stack))
            self.begin("forward", stack, inputs[0].untyped_storage().nbytes())

        def post_forward(_: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self.begin("post_forward", stack)
            output.register_hook(lambda _: self.begin("backward", stack))

        layer.register_forward_pre_hook(pre_forward)
        layer.register_forward_hook(post_forward)


def _profile_rank(
    profiler: StepProfiler, tensor: int, sequence_parallel: bool, selective: bool, first: bool, last: bool
) -> StepProfile:
    """Profile the forward and backward pass of a micro-batch on one rank.

    The rank recomputes attention if `selective`, and computes the embedding if `first` and the loss if `last`.
    """
    stages = 1 + (not first) + (not last)
    config = replace(
        profiler.model, num_layers=stages * DEPTH, tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages, sequence_parallel=sequence_parallel,
        activations_checkpoint_granularity="selective" if selective else None,
    )  # fmt: skip
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=profiler.half)
    with groups.simulate(tensor, stages, 0 if first else tensor), FakeTensorMode():
        model = profiler.model_class(config, profiler.vocabulary).train()
        shards = tensor if sequence_parallel else 1
        batches = [_fake_batch(each, profiler.rows, shards) for each in profiler.tokens]
        batch = replace(batches[-1], source=batches[0] if len(batches) > 1 else None)
        for parameter in model.parameters():  # Megatron adds gradients to its buffer and frees them
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        sizes = [len(each.tokens) // shards for each in batches]
        meter = CostCounter(model, smallest=min([*sizes, len(batch.target_ids)]))
        for stack, block in enumerate(model.blocks()):
            meter.watch(block.layers[-1], stack)
        if not first:
            model.set_input_tensor([torch.empty(sizes[-1], 1, config.hidden_size, requires_grad=True)])
        with (
            patch.multiple(dropout, _apply_mask=lambda x, *_: torch.empty_like(x), mix=lambda bits: bits),
            patch.object(attention, "attend", _fake_attention(profiler, batches, meter)),
            meter,
        ):
            with autocast():
                output = model(batch)
            meter.begin("loss", len(batches) - 1)
            if last:
                with autocast():
                    output, _ = language_model_loss(output, batch)
            output.backward(torch.empty_like(output))
    names = [name for name, module in model.named_children() if module in model.blocks()]
    attended = dict(zip(names, ([*each.values()] for each in meter.attended), strict=True))
    return StepProfile(_count_parameters(model), meter.segments, attended)


def _count_parameters(model: LanguageModel) -> dict[str, int]:
    """Return the number of parameters of each child module; of a transformer block, layers and final norm."""
    parts: dict[str, int] = {}
    for name, child in model.named_children():
        count = _count(child)
        if child in model.blocks():
            parts[f"{name} layers"] = layers = _count(child.layers)
            parts["final norms"] = parts.pop("final norms", 0) + count - layers  # after the last block
        else:
            parts[_PART_NAMES.get(name, name.replace("_", " "))] = count
    return parts


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fake_batch(tokens: Tokens, rows: int, divisor: int) -> PackedBatch:
    """Return the input of a transformer block, as one sequence; `divisor` divides the number of tokens."""
    size, targets = -(-tokens.count(rows) // divisor) * divisor, round(tokens.targets(rows))
    shapes = {"tokens": size, "position_ids": size, "segment_ids": size, "cu_seqlens": 2}
    ints: dict[str, Any] = {name: torch.zeros(length, dtype=torch.int32) for name, length in shapes.items()}
    positions, keys = torch.zeros(targets, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    return PackedBatch(
        **ints, target_positions=positions, target_ids=positions, dropout_keys=keys, lengths=(size,),
        max_length=tokens.max_length,
    )  # fmt: skip


def _fake_attention(profiler: StepProfiler, batches: list[PackedBatch], meter: CostCounter) -> Callable[..., Tensor]:
    """Return a substitute of `attend` of megatron/attention.py: saves as many bytes as on a GPU and counts FLOPs."""
    stacks = {id(batch.cu_seqlens): stack for stack, batch in enumerate(batches)}

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sequences: Any, scale: float, dropout: Any = None, causal: bool = False
    ) -> Tensor:
        stack, cross = stacks[id(sequences.cu_seqlens)], sequences.context is not None
        tokens, segment, element, heads = profiler.tokens[stack], meter.segments[-1], q.dtype.itemsize, q.shape[1]
        unpadded, mean = tokens.unpadded(profiler.rows), tokens.cross_attended if cross else tokens.attended
        meter.attended[stack][causal, cross] = attended = (mean + 1) / 2 if causal else mean
        flops = 4 * heads * q.shape[2] * unpadded  # per token that is attended to
        segment.attention += flops * attended
        saved, working = 4.0 * heads * len(q), 0.0  # saved: the log-sum-exp of each query
        if profiler.kernel == "sequences":
            saved += element * q.numel()  # outputs of the sequences, before they are concatenated
        if profiler.kernel == "probabilities":
            segment.masked += flops * (mean - attended)
            # Probabilities (4 bytes), mask (1) and product of both for all pairs; positions hidden by a causal mask.
            saved = ((5 + element) * heads + causal) * unpadded * mean
            # Of the longest sequence: scores and unscaled probabilities; with autocast also scaled probabilities, and
            # those of the previous sequence.
            longest = tokens.max_length * (profiler.tokens[0] if cross else tokens).max_length
            working = heads * (14 if profiler.half else 8) * longest
        out: Tensor = _AttentionBytes.apply(q, k, v, round(saved))
        meter.add_peak(working)
        return out

    return attend


class _AttentionBytes(torch.autograd.Function):
    """Allocates what attention allocates and saves, without computing it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, saved: int) -> Tensor:
        out, intermediates = torch.empty(q.shape, dtype=q.dtype), torch.empty(saved, dtype=torch.uint8)
        ctx.save_for_backward(q, k, v, out, intermediates)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
