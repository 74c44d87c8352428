# SPDX-License-Identifier: Apache-2.0
"""Prediction heads for downstream tasks, with the same architecture as in BioNeMo v1.

Shapes: N sequences, M tokens of all of them, R rows (sequences or tokens), D hidden size, C outputs: classes, labels
or numbers. The random numbers of dropout are functions of a key for each sequence (megatron/dropout.py); without keys
there is no dropout.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bionemo.config.schema.data import TaskType
from bionemo.config.schema.downstream import HeadConfig
from bionemo.megatron.dropout import TASK_HEAD, dropout, token_dropout_keys

_RADIUS = 3  # residues on either side in a convolution
_STATISTICS_ROWS = 1 << 12  # number of rows read at once; 170 MB in fp64 for the widest model


class Head(nn.Module):
    """Maps vectors to predictions.

    Attributes:
        per_token: rows are tokens, not sequences.
        outputs: C.
        mean: [D] fp32, subtracted from the vectors; set by `fit_statistics`, not trained.
        scale: [D] fp32, then multiplied with the vectors.
    """

    per_token: bool

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.mean = nn.Parameter(torch.zeros(hidden_size), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(hidden_size), requires_grad=False)

    @torch.no_grad()
    def fit_statistics(self, vectors: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """Set the statistics with which the head standardizes its input, and for regression its output.

        Embeddings of a protein and of its single variants differ by a thousandth of their norm, too little for a head
        to learn from. Dimensions with less than a thousandth of the largest standard deviation contain only rounding
        errors, so their deviation is not scaled to 1.

        Args:
            vectors: [R, D], which may be larger than the memory.
            targets: [R] or [R, C] fp32 numbers, NaN without a label; classes are ignored.
        """
        if not len(vectors):
            return
        origin, sums, squares = vectors[0].astype(np.float64), np.float64(0), np.float64(0)
        for begin in range(0, len(vectors), _STATISTICS_ROWS):
            part = vectors[begin : begin + _STATISTICS_ROWS] - origin
            sums, squares = sums + part.sum(0), squares + np.square(part).sum(0)
        mean = sums / len(vectors)
        deviation = np.sqrt(np.maximum(squares / len(vectors) - mean**2, 0))
        floor = deviation.max(initial=0) / 1000
        scale = 1 / np.maximum(deviation, floor) if floor else np.ones_like(deviation)
        self.mean.copy_(torch.from_numpy(mean + origin))
        self.scale.copy_(torch.from_numpy(scale))

    @property
    def loss_scale(self) -> Tensor | float:
        """Return the unit of the squared errors of numbers: 1, or [C] so that several targets count alike."""
        scale: Tensor | float = getattr(self, "target_scale", 1.0)
        return scale if self.outputs > 1 else 1.0

    def standardize(self, vectors_RD: Tensor) -> Tensor:
        """Apply the statistics."""
        return (vectors_RD - self.mean) * self.scale

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """Return logits or numbers, [R, C].

        Args:
            vectors_RD: vectors of the tokens of all sequences, or of the sequences.
            lengths: N numbers of tokens, on the host, so that it need not wait for the device.
            keys_N: int64, dropout key of each sequence; None: no dropout.
        """
        raise NotImplementedError


class TokenHead(Head):
    """Two convolutions of 7 residues along the sequence: D -> `width` -> ReLU -> dropout -> C.

    It is ProtTrans' ConvNet (Elnaggar et al. 2021) as a one-dimensional convolution.
    """

    per_token = True

    def __init__(self, hidden_size: int, classes: int, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__(hidden_size, classes)
        self.first = nn.Conv1d(hidden_size, width, 2 * _RADIUS + 1, padding=_RADIUS)
        self.second = nn.Conv1d(width, classes, 2 * _RADIUS + 1, padding=_RADIUS)
        self.dropout = dropout

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """See `Head`; R = M."""
        device, sizes = vectors_RD.device, np.asarray(lengths, np.int64)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        separated = np.arange(len(numbers)) + _RADIUS * numbers  # no convolution covers two sequences
        size = int(separated[-1]) + 1 if len(separated) else 1  # a rank may have no sequences
        index = torch.from_numpy(separated).to(device, non_blocking=True)
        vectors_RD = self.standardize(vectors_RD)
        spread = vectors_RD.new_zeros(size, vectors_RD.shape[1]).index_copy(0, index, vectors_RD)
        inner_MW = torch.relu(self.first(spread.T[None]))[0].T.index_select(0, index)
        if keys_N is not None and self.dropout:
            positions = np.arange(len(numbers)) - np.repeat(sizes.cumsum() - sizes, sizes)
            places = torch.from_numpy(np.stack([numbers, positions])).to(device, non_blocking=True)
            inner_MW = dropout(inner_MW, token_dropout_keys(keys_N, places[0], places[1]), TASK_HEAD, self.dropout)
        spread = inner_MW.new_zeros(size, inner_MW.shape[1]).index_copy(0, index, inner_MW)
        logits: Tensor = self.second(spread.T[None])[0].T
        return logits.index_select(0, index)


class SequenceHead(Head):
    """Layer norm, then D -> `sizes` -> C with ReLU and dropout in between.

    Attributes:
        target_mean: [C] fp32, means of the targets of a regression; set by `fit_statistics`, so that one learning
            rate suits targets in all units.
        target_scale: [C] fp32, their standard deviations.
    """

    def __init__(
        self, hidden_size: int, outputs: int, sizes: tuple[int, ...] = (256,), dropout: float = 0.1,
        per_token: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, outputs)
        self.per_token = per_token
        layers: list[nn.Module] = [nn.LayerNorm(hidden_size)]
        for size, following in pairwise((hidden_size, *sizes)):
            layers += [nn.Linear(size, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1] if sizes else hidden_size, outputs))
        self.dropout = dropout
        self.target_mean = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        self.target_scale = nn.Parameter(torch.ones(outputs), requires_grad=False)

    @torch.no_grad()
    def fit_statistics(self, vectors: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """See `Head`."""
        super().fit_statistics(vectors, targets)
        if len(targets) and targets.dtype == np.float32:
            numbers = np.ma.masked_invalid(targets.reshape(len(targets), -1).astype(np.float64))
            self.target_mean.copy_(torch.from_numpy(numbers.mean(0).filled(0)))
            scale = numbers.std(0).filled(0)
            self.target_scale.copy_(torch.from_numpy(np.where(scale > 0, scale, 1)))

    def forward(self, vectors_RD: Tensor, lengths: Sequence[int], keys_N: Tensor | None = None) -> Tensor:
        """See `Head`; only heads without hidden layers have tokens as rows."""
        vectors_RD = self.standardize(vectors_RD)
        for depth, layer in enumerate(self.layers):
            vectors_RD = layer(vectors_RD)
            if isinstance(layer, nn.ReLU) and keys_N is not None and self.dropout:
                vectors_RD = dropout(vectors_RD, keys_N + depth, TASK_HEAD, self.dropout)
        if vectors_RD.requires_grad:
            # Divide the gradient of the squared error by the variance of the targets, unless the loss is divided by
            # it, so that weight decay and gradient clipping do not depend on their unit.
            variance = (self.target_scale / self.loss_scale).square()
            vectors_RD.register_hook(lambda gradient: gradient / variance)
        return vectors_RD * self.target_scale + self.target_mean


def head_factory(config: HeadConfig, task_type: TaskType, hidden_size: int, classes: int) -> Callable[[], Head]:
    """Return a function that creates heads for a task; `classes` is the number of outputs, or 0 for one number.

    A number per residue has a linear head.
    """
    if task_type == "token-level-classification":
        return partial(TokenHead, hidden_size, classes, config.cnn_dim, config.dropout)
    width = config.hidden_layer_size
    sizes = (width,) if isinstance(width, int) else tuple(width)
    per_token = task_type == "token-level-regression"
    return partial(SequenceHead, hidden_size, max(classes, 1), () if per_token else sizes, config.dropout, per_token)
