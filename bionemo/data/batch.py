# SPDX-License-Identifier: Apache-2.0
"""What the data side hands to the model: one micro-batch of packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences end to end in T = micro_batch_size x seq_length tokens; what is left at the end is filler.

    With padding instead of packing nothing changes but how few sequences there are: filler tokens stand at the end
    either way, in no sequence. An encoder-decoder has two of these: this one is its decoder's, `source` its encoder's;
    sequence i of one belongs to sequence i of the other, and they have equally many fillers.
    """

    tokens: Tensor  # [T] int32, after masking
    positions: Tensor  # [T] int32, position in the own sequence from 0
    segment_ids: Tensor  # [T] int32, number of the own sequence; filler has the number N
    boundaries: Tensor  # [N + 1 + F] int32, cumulative lengths of the N sequences and F filler segments
    target_index: Tensor  # [M] int64, where the model is asked
    target_ids: Tensor  # [M] int64, what it should say
    segment_keys: Tensor  # [N + 1] int64, random key of each sequence for dropout; the last is the filler's
    lengths: tuple[int, ...]  # N tokens per sequence, with begin and end token
    longest: int  # the longest a sequence may be
    unknown: int = 0  # tokens outside the vocabulary in this batch
    source: PackedBatch | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move every tensor, without waiting for the copies."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """Put every tensor in page-locked memory; torch's loader calls this when told to."""
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
        """Tokens that carry a sequence: filler does not count."""
        return sum(self.lengths)
