# SPDX-License-Identifier: Apache-2.0
"""Collate tokenized samples into micro-batches.

`Collator` makes compact NumPy batches, which worker processes send as they are. `CompactBatch.unpack` adds what can be
computed from them (position ids, segment ids, cumulative lengths) and converts to tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.common.random_stream import RandomBits, draw
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import Dataset, TokenSequences
from bionemo.data.sampler import SampleIds

_SOURCE_KEY = 1 << 32  # counter of the draw that gives the encoder's dropout key; more than tokens in a sequence
_TOKEN_MULTIPLE = 64  # dynamic padding rounds up to it, so that tensor-parallel ranks can divide the tokens
_EMPTY = np.zeros(0, np.int64)


class PackedTokens(NamedTuple):
    """N concatenated sequences, followed by padding."""

    ids: NDArray[np.integer[Any]]  # [T] tokens and padding, any integer type
    lengths: NDArray[np.int64]  # [N], tokens of each sequence
    max_length: int  # upper bound of the length of a sequence; longer padding is divided into segments of this length
    dropout_keys: RandomBits | None = None  # [N] uint64; None: zeros
    # [N] int64, position id of each sequence's first token; None: zeros
    first_positions: NDArray[np.int64] | None = None

    @property
    def padding_segments(self) -> int:
        """Number of padding segments."""
        return -(-(len(self.ids) - int(self.lengths.sum())) // self.max_length)


class CompactBatch(NamedTuple):
    """A micro-batch in about a tenth of the bytes of a `PackedBatch`; see there for the attributes."""

    inputs: PackedTokens
    target_positions: NDArray[np.int64] = _EMPTY
    target_ids: NDArray[np.integer[Any]] = _EMPTY
    unknown_tokens: int = 0
    source: PackedTokens | None = None

    def unpack(self) -> PackedBatch:
        """Convert to tensors."""
        streams = [stream for stream in (self.inputs, self.source) if stream is not None]
        padding_segments = max(stream.padding_segments for stream in streams)
        source = None if self.source is None else CompactBatch(self.source)._unpack(padding_segments, None)
        return self._unpack(padding_segments, source)

    def _unpack(self, padding_segments: int, source: PackedBatch | None) -> PackedBatch:
        ids, lengths, max_length, keys, first_positions = self.inputs
        number, used, total = len(lengths), int(lengths.sum()), len(ids)
        padding = np.clip(total - used - max_length * np.arange(padding_segments), 0, max_length)
        sizes = np.concatenate([lengths, padding]).astype(np.int32)
        cu_seqlens = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=cu_seqlens[1:])
        segments = np.minimum(np.arange(len(sizes), dtype=np.int32), number)
        starts = cu_seqlens[:-1].copy()
        if first_positions is not None:
            starts[:number] -= first_positions.astype(np.int32)
        position_ids = np.arange(total, dtype=np.int32) - np.repeat(starts, sizes)
        position_ids[used:] = 0
        dropout_keys = np.zeros(number + 1, np.uint64)
        if keys is not None:
            dropout_keys[:number] = keys
        return PackedBatch(
            tokens=torch.from_numpy(ids.astype(np.int32)),
            position_ids=torch.from_numpy(position_ids),
            segment_ids=torch.from_numpy(np.repeat(segments, sizes)),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            target_positions=torch.from_numpy(self.target_positions),
            target_ids=torch.from_numpy(self.target_ids.astype(np.int64)),
            dropout_keys=torch.from_numpy(dropout_keys.view(np.int64)),
            lengths=tuple(lengths.tolist()),
            max_length=max_length,
            unknown_tokens=self.unknown_tokens,
            source=source,
        )


@dataclass(frozen=True)
class Collator:
    """Tokenizes samples and concatenates them into micro-batches."""

    dataset: Dataset  # tokenizes the samples
    micro_batch_size: int  # number of rows in a micro-batch
    pad_id: int
    dynamic_padding: bool = False  # pad to the next multiple of 64 tokens, not to micro_batch_size x max_length tokens

    def __call__(self, batches: list[list[SampleIds]]) -> list[CompactBatch]:
        """Collate several micro-batches in one call, which takes little longer than one of them.

        `batches` contains, for each micro-batch, the samples of each row. A micro-batch with fewer than
        `micro_batch_size` rows is padded.
        """
        rows = [row for batch in batches for row in batch]
        epochs = np.concatenate([_EMPTY, *(epochs for epochs, _ in rows)])
        records = np.concatenate([_EMPTY, *(records for _, records in rows)])
        tokenized = self.dataset.tokenize(epochs, records)
        max_lengths = self.dataset.max_lengths

        bounds = _bounds([sum(len(records) for _, records in batch) for batch in batches])  # of sequences
        if tokenized.sequences_per_sample is not None:
            bounds = _bounds(tokenized.sequences_per_sample)[bounds]
        inputs = _split(tokenized.inputs, bounds)
        sources = None if tokenized.source is None else _split(tokenized.source, bounds)
        token_bounds = _bounds([len(part.ids) for part in inputs])
        target_bounds = np.searchsorted(tokenized.target_positions, token_bounds)

        compact = []
        for i in range(len(batches)):
            sequences, targets = slice(*bounds[i : i + 2]), slice(*target_bounds[i : i + 2])
            keys, first_positions = tokenized.dropout_keys[sequences], tokenized.first_positions
            source = None
            if sources is not None:
                assert max_lengths.source is not None
                source = self._pad(sources[i], max_lengths.source, draw(keys, _SOURCE_KEY))
            compact.append(
                CompactBatch(
                    self._pad(
                        inputs[i],
                        max_lengths.inputs,
                        keys,
                        None if first_positions is None else first_positions[sequences],
                    ),
                    tokenized.target_positions[targets] - token_bounds[i],
                    tokenized.target_ids[targets],
                    int(tokenized.unknown_counts[sequences].sum()),
                    source,
                )
            )
        return compact

    def _pad(
        self,
        tokens: TokenSequences,
        max_length: int,
        keys: RandomBits,
        first_positions: NDArray[np.int64] | None = None,
    ) -> PackedTokens:
        """Append the padding of a micro-batch."""
        ids, total = tokens.ids, self.micro_batch_size * max_length
        if self.dynamic_padding:
            total = -(-max(len(ids), 1) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        padded = np.full(total, self.pad_id, ids.dtype)
        padded[: len(ids)] = ids
        return PackedTokens(padded, tokens.lengths, max_length, keys, first_positions)


def _bounds(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each of N consecutive parts, and the end of the last: [N + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _split(tokens: TokenSequences, bounds: NDArray[np.int64]) -> list[TokenSequences]:
    """Divide token sequences at these bounds, [parts + 1]."""
    starts = _bounds(tokens.lengths)[bounds]
    return [
        TokenSequences(tokens.ids[slice(*starts[i : i + 2])], tokens.lengths[slice(*bounds[i : i + 2])])
        for i in range(len(bounds) - 1)
    ]
