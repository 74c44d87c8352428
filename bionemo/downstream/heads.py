# SPDX-License-Identifier: Apache-2.0
"""What answers a task from a trained model's vectors; of the predecessor's form and size.

Shapes: N sequences, M tokens of all of them, R rows (a sequence's or a token's), D hidden size, C classes, or 1 for a
number. Dropout is addressed by a key of each sequence (megatron/dropout.py); without keys nothing is dropped.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from bionemo.megatron.dropout import TASK_HEAD, dropout, token_keys

_REACH = 3  # residues to either side that a convolution sees


class Head(nn.Module):
    """Answers from vectors.

    Attributes:
        per_token: its rows are tokens, not sequences.
        mean: [D] fp32, subtracted from what it reads; None: nothing is.
        scale: [D] fp32, by which that is multiplied.
    """

    per_token: bool
    mean: Tensor | None
    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("scale", None)

    def standardise(self, mean_D: Tensor, scale_D: Tensor) -> None:
        """Read vectors by how they differ from those that it learns from; part of its state from then on.

        The means over a protein and over its single variants differ by a thousandth of their length, which no head
        learns to see.
        """
        self.mean, self.scale = mean_D, scale_D

    def standard(self, vectors_RD: Tensor) -> Tensor:
        """Vectors as it reads them."""
        if self.mean is None or self.scale is None:
            return vectors_RD
        return (vectors_RD - self.mean) * self.scale

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """Logits or numbers, [R, C].

        Args:
            vectors_RD: of the tokens, sequence after sequence, or of the sequences.
            lengths: N numbers of tokens, known to the host: nothing waits for a device.
            keys_N: int64, of each sequence, when it is trained.
        """
        raise NotImplementedError


class TokenHead(Head):
    """Two convolutions along the sequence, of 7 residues each: D -> `width` -> ReLU -> dropout -> C.

    After ProtTrans' ConvNet (Elnaggar et al. 2021), whose two dimensions are one of length 1 here.
    """

    per_token = True

    def __init__(self, hidden_size: int, classes: int, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__()
        self.first = nn.Conv1d(hidden_size, width, 2 * _REACH + 1, padding=_REACH)
        self.second = nn.Conv1d(width, classes, 2 * _REACH + 1, padding=_REACH)
        self.dropout = dropout

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """See Head; R = M."""
        device, sizes = vectors_RD.device, np.asarray(lengths, np.int64)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        apart = np.arange(len(numbers)) + _REACH * numbers  # so far that no convolution sees two sequences
        size = int(apart[-1]) + 1 if len(apart) else 1  # a rank may have no sequences
        index = torch.from_numpy(apart).to(device, non_blocking=True)
        vectors_RD = self.standard(vectors_RD)
        spread = vectors_RD.new_zeros(size, vectors_RD.shape[1]).index_copy(0, index, vectors_RD)
        inner_MW = torch.relu(self.first(spread.T[None]))[0].T.index_select(0, index)
        if keys_N is not None and self.dropout:
            positions = np.arange(len(numbers)) - np.repeat(sizes.cumsum() - sizes, sizes)
            places = torch.from_numpy(np.stack([numbers, positions])).to(device, non_blocking=True)
            inner_MW = dropout(inner_MW, token_keys(keys_N, places[0], places[1]), TASK_HEAD, self.dropout)
        spread = inner_MW.new_zeros(size, inner_MW.shape[1]).index_copy(0, index, inner_MW)  # between them is nothing
        logits: Tensor = self.second(spread.T[None])[0].T
        return logits.index_select(0, index)


class SequenceHead(Head):
    """Layer norm, then D -> `sizes` -> C with ReLU and dropout between."""

    per_token = False

    def __init__(self, hidden_size: int, outputs: int, sizes: tuple[int, ...] = (256,), dropout: float = 0.1) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.LayerNorm(hidden_size)]
        for size, following in pairwise((hidden_size, *sizes)):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1] if sizes else hidden_size, outputs))
        self.dropout = dropout

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """See Head; R = N."""
        vectors_RD = self.standard(vectors_RD)
        for depth, layer in enumerate(self.layers):
            vectors_RD = layer(vectors_RD)
            if isinstance(layer, nn.ReLU) and keys_N is not None and self.dropout:
                vectors_RD = dropout(vectors_RD, keys_N + depth, TASK_HEAD, self.dropout)
        return vectors_RD
