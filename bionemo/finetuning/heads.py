# SPDX-License-Identifier: Apache-2.0
"""What answers a task from a trained model's vectors; of the predecessor's form and size.

Shapes: N sequences, M tokens of all of them, R rows (a sequence's or a token's), D hidden size, C classes, or 1 for a
number. Dropout is addressed by a key of each sequence (megatron/dropout.py); without keys nothing is dropped.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bionemo.megatron.dropout import TASK_HEAD, dropout, token_keys

_REACH = 3  # residues to either side that a convolution sees
_ROWS_AT_ONCE = 1 << 12  # 170 MB in fp64 of the widest model


class Head(nn.Module):
    """Answers from vectors.

    Attributes:
        per_token: its rows are tokens, not sequences.
        mean: [D] fp32, subtracted from what it reads; told, not learned.
        scale: [D] fp32, by which that is multiplied.
    """

    per_token: bool

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(hidden_size), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(hidden_size), requires_grad=False)

    @torch.no_grad()
    def standardise(self, vectors: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """Read vectors from here on by how they differ from these, and answer numbers as these are spread.

        The means over a protein and over its single variants differ by a thousandth of their length, which no head
        learns to see. Where vectors hardly differ there is nothing but rounding: it is not made larger than the rest.

        Args:
            vectors: [R, D], which need not fit into memory.
            targets: [R] fp32 of numbers; of classes nothing is taken.
        """
        if not len(vectors):
            return
        origin, sums, squares = vectors[0].astype(np.float64), np.float64(0), np.float64(0)
        for begin in range(0, len(vectors), _ROWS_AT_ONCE):
            part = vectors[begin : begin + _ROWS_AT_ONCE] - origin
            sums, squares = sums + part.sum(0), squares + np.square(part).sum(0)
        mean = sums / len(vectors)
        deviation = np.sqrt(np.maximum(squares / len(vectors) - mean**2, 0))
        least = deviation.max(initial=0) / 1000
        scale = 1 / np.maximum(deviation, least) if least else np.ones_like(deviation)
        self.mean.copy_(torch.from_numpy(mean + origin))
        self.scale.copy_(torch.from_numpy(scale))

    def standard(self, vectors_RD: Tensor) -> Tensor:
        """Vectors as it reads them."""
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
        super().__init__(hidden_size)
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
    """Layer norm, then D -> `sizes` -> C with ReLU and dropout between.

    Attributes:
        answer_mean: scalar fp32, of the numbers that it answers; told, not learned: temperatures in degrees would
            else be out of reach of a rate that suits energies.
        answer_scale: scalar fp32, their standard deviation.
    """

    per_token = False

    def __init__(self, hidden_size: int, outputs: int, sizes: tuple[int, ...] = (256,), dropout: float = 0.1) -> None:
        super().__init__(hidden_size)
        layers: list[nn.Module] = [nn.LayerNorm(hidden_size)]
        for size, following in pairwise((hidden_size, *sizes)):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1] if sizes else hidden_size, outputs))
        self.dropout = dropout
        self.answer_mean = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.answer_scale = nn.Parameter(torch.ones(()), requires_grad=False)

    @torch.no_grad()
    def standardise(self, vectors: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """See Head."""
        super().standardise(vectors, targets)
        if len(targets) and targets.dtype == np.float32:
            self.answer_mean.fill_(float(targets.mean(dtype=np.float64)))
            self.answer_scale.fill_(float(targets.std(dtype=np.float64)) or 1.0)

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """See Head; R = N."""
        vectors_RD = self.standard(vectors_RD)
        for depth, layer in enumerate(self.layers):
            vectors_RD = layer(vectors_RD)
            if isinstance(layer, nn.ReLU) and keys_N is not None and self.dropout:
                vectors_RD = dropout(vectors_RD, keys_N + depth, TASK_HEAD, self.dropout)
        return vectors_RD * self.answer_scale + self.answer_mean
