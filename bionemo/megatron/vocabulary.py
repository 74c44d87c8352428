# SPDX-License-Identifier: Apache-2.0
"""Both ends of a language model, where the table of words may be divided by rows over the tensor ranks.

Shapes: T tokens, D hidden size, M asked positions, V words of this rank, padding rows included.
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
    set_tensor_model_parallel_attributes,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

from bionemo.megatron import groups

_UNFILLED = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)


def word_table(rows: int, hidden_size: int) -> nn.Module:
    """Embedding of words, `rows` in all; the weight is [V, D]."""
    if groups.tensor_size() == 1:
        table: nn.Module = nn.Embedding(rows, hidden_size)
    else:
        table = VocabParallelEmbedding(
            rows, hidden_size, init_method=nn.init.zeros_, config=_UNFILLED, tp_group=groups.collection().tp
        )
        set_tensor_model_parallel_attributes(table.weight, True, 0, 1)
    # With a pipeline the first and the last stage have a copy each, whose gradients must be added up.
    vars(table.weight)["shared_embedding"] = groups.stages() > 1
    return table


def over_sequence(x_TBD: Tensor) -> Tensor:
    """Keep this tensor rank's stretch of the tokens, [T / ranks, B, D]."""
    stretch: Tensor = scatter_to_sequence_parallel_region(x_TBD)
    return stretch.clone()  # a view would keep the whole alive


def whole_sequence(x_TBD: Tensor) -> Tensor:
    """Gather the stretches, [T, B, D]; every rank goes on with the same, so gradients are cut, not added."""
    whole: Tensor = gather_from_sequence_parallel_region(x_TBD, tensor_parallel_output_grad=False)
    return whole


class VocabularyProjection(nn.Module):
    """Product with a word table, plus a bias for each word.

    Args:
        rows: of the table, over all ranks, padding included.
        words: without padding.
        bias: whether there is one.
        hidden_size: of a table of its own; None: `forward` is given that of the embedding.
    """

    def __init__(self, rows: int, words: int, *, bias: bool = True, hidden_size: int | None = None) -> None:
        super().__init__()
        self.words, self.rows = words, rows // groups.tensor_size()
        self.weight = nn.Parameter(torch.zeros(self.rows, hidden_size)) if hidden_size else None
        self.bias = nn.Parameter(torch.zeros(self.rows)) if bias else None
        for parameter in self.parameters(recurse=False):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(self, x_MD: Tensor, table_VD: Tensor | None = None) -> Tensor:
        """Logits: [M, words] undivided, else [M, V] with minus infinity where a row only pads the table."""
        table_VD = self.weight if table_VD is None else table_VD
        assert table_VD is not None
        if groups.tensor_size() == 1:
            return F.linear(x_MD, table_VD[: self.words], None if self.bias is None else self.bias[: self.words])
        logits_MV = F.linear(copy_to_tensor_model_parallel_region(x_MD), table_VD, self.bias)
        first = groups.tensor_rank() * self.rows
        padding = torch.arange(first, first + self.rows, device=x_MD.device) >= self.words
        return logits_MV.masked_fill(padding, -torch.inf)


def whole_vocabulary(logits: Tensor) -> Tensor:
    """Logits of all words, [M, V], where tensor ranks have a part of them each."""
    whole: Tensor = logits if groups.tensor_size() == 1 else gather_from_tensor_model_parallel_region(logits)
    return whole


def cross_entropy(logits: Tensor, answers_M: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the asked positions, in fp32; logits as from VocabularyProjection."""
    if groups.tensor_size() == 1:
        return F.cross_entropy(logits.float(), answers_M, reduction="sum")
    return vocab_parallel_cross_entropy(logits.float(), answers_M).sum()
