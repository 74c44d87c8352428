# SPDX-License-Identifier: Apache-2.0
"""Embedding, output projection and loss of a language model; the vocabulary may be sharded over the tensor ranks.

Shapes: T tokens, D hidden size, M target positions, V vocabulary entries of this rank including padding.
"""

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

from bionemo.data.batch import PackedBatch
from bionemo.megatron import groups
from bionemo.megatron.sharding import mark_sharded

_NO_INITIALIZATION = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)


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
        hidden_size: create a weight of this width; None: pass the embedding's weight to `forward`.
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

    def forward(self, x_MD: Tensor, weight_VD: Tensor | None = None) -> Tensor:
        """Return the logits of this rank's part of the vocabulary, [M, V], -inf for padding."""
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
        return F.linear(x_MD, weight_VD, bias_V)


def gather_vocabulary(logits: Tensor) -> Tensor:
    """Gather the logits of all tensor ranks, [M, padded vocabulary size]."""
    full: Tensor = logits if groups.tensor_size() == 1 else gather_from_tensor_model_parallel_region(logits)
    return full


def language_model_loss(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats, summed over the target positions in fp32, and the number of target positions.

    Both are scalars on the device. `logits` is the output of VocabularyProjection.
    """
    if groups.tensor_size() == 1:
        loss = F.cross_entropy(logits.float(), batch.target_ids, reduction="sum")
    else:
        loss = vocab_parallel_cross_entropy(logits.float(), batch.target_ids).sum()
    return loss, loss.new_full((), len(batch.target_ids))  # new_tensor would wait for a copy to the device
