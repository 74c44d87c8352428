# SPDX-License-Identifier: Apache-2.0
"""Input of the model: one micro-batch of packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """N concatenated sequences, followed by padding up to T tokens.

    A segment is one of these sequences, or a part of the padding. For an encoder-decoder this is the decoder's input
    and `source` is the encoder's: sequence i of one belongs to sequence i of the other, and both have F padding
    segments.
    """

    tokens: Tensor  # [T] int32, after masking
    position_ids: Tensor  # [T] int32, position within the sequence
    segment_ids: Tensor  # [T] int32, index of the sequence; N for padding
    cu_seqlens: Tensor  # [N + F + 1] int32, cumulative lengths of the sequences and of the padding segments
    target_positions: Tensor  # [M] int64, indices of the tokens at which the loss is computed
    target_ids: Tensor  # [M] int64, expected tokens
    dropout_keys: Tensor  # [N + 1] int64, random key of each sequence; the last is for the padding
    lengths: tuple[int, ...]  # [N] tokens of each sequence, special tokens included
    max_length: int  # upper bound of the length of a sequence or padding segment
    unknown_tokens: int = 0  # number of tokens outside the vocabulary
    source: PackedBatch | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy all tensors to a device without waiting for the copies."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """Copy all tensors to page-locked memory; called by the data loader."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        changed: dict[str, Any] = {
            f.name: function(v) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        if self.source is not None:
            changed["source"] = self.source._map(function)
        return replace(self, **changed)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(self.lengths)
