# SPDX-License-Identifier: Apache-2.0
"""What answers a task from a trained model's vectors; of the predecessor's form and size.

Shapes: N sequences, M tokens of all of them, D hidden size, C classes, or 1 for a number.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

_REACH = 3  # residues to either side that a convolution sees


class TokenHead(nn.Module):
    """Two convolutions along the sequence, of 7 residues each: D -> `width` -> ReLU -> dropout -> C.

    After ProtTrans' ConvNet (Elnaggar et al. 2021), whose two dimensions are one of length 1 here.
    """

    def __init__(self, hidden_size: int, classes: int, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__()
        self.first = nn.Conv1d(hidden_size, width, 2 * _REACH + 1, padding=_REACH)
        self.second = nn.Conv1d(width, classes, 2 * _REACH + 1, padding=_REACH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, vectors_MD: Tensor, lengths_N: Tensor) -> Tensor:
        """Logits of every token, [M, C].

        Args:
            vectors_MD: of the tokens, sequence after sequence.
            lengths_N: tokens of each sequence.
        """
        index = self._places(lengths_N)
        size = int(index[-1]) + 1 if len(index) else 0
        apart = vectors_MD.new_zeros(size, vectors_MD.shape[1]).index_copy(0, index, vectors_MD)
        inner = torch.relu(self.first(apart.T[None]))
        outside = torch.ones(size, dtype=torch.bool, device=inner.device).index_fill(0, index, False)
        inner = self.dropout(inner).masked_fill(outside, 0.0)  # beyond an end there is nothing
        logits: Tensor = self.second(inner)[0].T
        return logits.index_select(0, index)

    @staticmethod
    def _places(lengths_N: Tensor) -> Tensor:
        """Places [M] that keep sequences so far apart that no convolution sees two of them."""
        gaps = torch.arange(len(lengths_N), device=lengths_N.device) * _REACH
        return torch.arange(int(lengths_N.sum()), device=lengths_N.device) + gaps.repeat_interleave(lengths_N)


class SequenceHead(nn.Module):
    """Layer norm, then D -> `sizes` -> C with ReLU and dropout between."""

    def __init__(self, hidden_size: int, outputs: int, sizes: tuple[int, ...] = (256,), dropout: float = 0.1) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.LayerNorm(hidden_size)]
        for size, following in pairwise((hidden_size, *sizes)):
            layers += [nn.Linear(size, following), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1] if sizes else hidden_size, outputs))

    def forward(self, vectors_ND: Tensor) -> Tensor:
        """Logits or numbers of every sequence, [N, C]."""
        outputs: Tensor = self.layers(vectors_ND)
        return outputs
