# SPDX-License-Identifier: Apache-2.0
"""Embedding, output projection and loss of a language model; the vocabulary may be sharded over the tensor ranks.

Shapes: T tokens, D hidden size, M target positions, V vocabulary entries of this rank including padding.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

from bionemo.megatron import groups
from bionemo.megatron.attention import cast_for_autocast
from bionemo.megatron.sharding import mark_sharded

_NO_INITIALIZATION = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)
CHUNK = 2**27  # logits of which the loss holds copies at once, 0.5 GiB in fp32


def vocabulary_embedding(padded_size: int, hidden_size: int) -> nn.Module:
    """Return the token embedding; the weight of this rank is [V, D].

    Args:
        padded_size: vocabulary size over all ranks, including padding.
        hidden_size: D.
    """
    if groups.tensor_size() == 1:
        embedding: nn.Embedding = nn.Embedding(padded_size, hidden_size)
    else:
        embedding = VocabParallelEmbedding(
            padded_size, hidden_size, init_method=nn.init.zeros_, config=_NO_INITIALIZATION,
            tp_group=groups.collection().tp,
        )  # fmt: skip
        mark_sharded(embedding.weight, 0)
    # The first and the last pipeline stage each hold a copy; Megatron sums the gradients of the copies.
    vars(embedding.weight)["shared_embedding"] = groups.pipeline_size() > 1
    return embedding


def scatter_sequence(x_TBD: Tensor) -> Tensor:
    """Return this tensor rank's slice of the tokens, [T / ranks, B, D]."""
    part: Tensor = scatter_to_sequence_parallel_region(x_TBD)
    return part.clone()  # a view would keep the full tensor in memory


def gather_sequence(x_TBD: Tensor) -> Tensor:
    """Gather the slices of all tensor ranks, [T, B, D].

    All ranks continue with equal values, so the backward pass slices the gradients instead of summing them.
    """
    full: Tensor = gather_from_sequence_parallel_region(x_TBD, tensor_parallel_output_grad=False)
    return full


class VocabularyProjection(nn.Module):
    """Linear projection to logits, with the embedding's weight or a weight of its own.

    Args:
        padded_size: vocabulary size over all ranks, including padding.
        vocabulary_size: vocabulary size without padding.
        bias: add a bias per vocabulary entry.
        hidden_size: create a weight of this width; None: pass the embedding's weight to the methods.
    """

    def __init__(
        self, padded_size: int, vocabulary_size: int, *, bias: bool = True, hidden_size: int | None = None
    ) -> None:
        super().__init__()
        self.vocabulary_size, self.shard_size = vocabulary_size, padded_size // groups.tensor_size()
        self.weight = nn.Parameter(torch.zeros(self.shard_size, hidden_size)) if hidden_size else None
        self.bias = nn.Parameter(torch.zeros(self.shard_size)) if bias else None
        for parameter in self.parameters(recurse=False):
            mark_sharded(parameter, 0)

    def transform(self, hidden_MD: Tensor) -> Tensor:
        """Return the input of the projection, [M, D]; subclasses override it."""
        return hidden_MD

    def forward(self, hidden_MD: Tensor, weight_VD: Tensor | None = None) -> Tensor:
        """Return the logits of this rank's part of the vocabulary, [M, V], -inf for padding."""
        return F.linear(*self._operands(hidden_MD, weight_VD))

    def cross_entropy(self, hidden_MD: Tensor, ids_M: Tensor, weight_VD: Tensor | None = None) -> Tensor:
        """Return the cross-entropy in nats, summed over the target positions in fp32, a scalar on the device.

        More than CHUNK logits are computed in chunks, together with their gradients.
        """
        x_MD, weight_VD, bias_V = self._operands(hidden_MD, weight_VD)
        rows = CHUNK // self.shard_size
        if len(ids_M) <= rows:
            return _summed_cross_entropy(F.linear(x_MD, weight_VD, bias_V).float(), ids_M)
        return cast(Tensor, _ChunkedLoss.apply(x_MD, weight_VD, bias_V, ids_M, rows, torch.is_grad_enabled()))

    def _operands(self, hidden_MD: Tensor, weight_VD: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        x_MD = self.transform(hidden_MD)
        weight_VD = self.weight if weight_VD is None else weight_VD
        assert weight_VD is not None
        bias_V: Tensor | None = self.bias
        entries = self.vocabulary_size - groups.tensor_rank() * self.shard_size
        if entries < self.shard_size:
            # A bias masks the padding without another pass over the logits. A product without the padding would have
            # an unaligned number of columns, which is slow on a GPU.
            mask_V = weight_VD.new_zeros(self.shard_size)
            mask_V[max(entries, 0) :] = -torch.inf
            bias_V = mask_V if bias_V is None else bias_V + mask_V
        if groups.tensor_size() > 1:
            x_MD = copy_to_tensor_model_parallel_region(x_MD)
        return x_MD, weight_VD, bias_V


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy of x W^T + b, summed over the rows of x; the forward pass computes the gradients as well.

    In fp16, gradients of logits below 6e-8 underflow: they are computed before the gradient scaler multiplies the
    loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, ids_M: Tensor, rows: int, training: bool
    ) -> Tensor:
        def leaf(x: Tensor, needed: bool) -> Tensor:
            return x.detach().requires_grad_(needed and training)

        x_needed, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        chunks = [leaf(each, x_needed) for each in cast_for_autocast(x_MD).split(rows)]
        weight, bias = leaf(weight_VD, weight_needed), None if bias_V is None else leaf(bias_V, bias_needed)
        losses: list[Tensor] = []
        with torch.set_grad_enabled(training):
            converted = cast_for_autocast(weight)  # once; the gradients of the chunks add up in fp32
            for x_CD, ids_C in zip(chunks, ids_M.split(rows), strict=True):
                loss = _summed_cross_entropy(F.linear(x_CD, converted, bias).float(), ids_C)
                if loss.requires_grad:
                    loss.backward()
                losses.append(loss.detach())
        found = [each.grad for each in chunks if each.grad is not None]
        ctx.gradients = torch.cat(found) if found else None, weight.grad, None if bias is None else bias.grad
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if each is None else each * gradients[0] for each in ctx.gradients), *3 * (None,)


def _summed_cross_entropy(logits_CV: Tensor, ids_C: Tensor) -> Tensor:
    if groups.tensor_size() == 1:
        return F.cross_entropy(logits_CV, ids_C, reduction="sum")
    return cast(Tensor, vocab_parallel_cross_entropy(logits_CV, ids_C).sum())


def gather_vocabulary(logits: Tensor) -> Tensor:
    """Gather the logits of all tensor ranks, [M, padded vocabulary size]."""
    full: Tensor = logits if groups.tensor_size() == 1 else gather_from_tensor_model_parallel_region(logits)
    return full
