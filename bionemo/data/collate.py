# SPDX-License-Identifier: Apache-2.0
"""From rows of (epoch, record) pairs to micro-batches, whatever the samples are: built, cut, filled up."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.common.random_stream import Words, draw
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import Samples, Sequences
from bionemo.data.sampler import Row

_SOURCE = 1 << 32  # draw of a sequence's key that is the key of what its encoder reads; no token draws that far
_GRAIN = 64  # tokens of a compact batch come in multiples of it, which tensor ranks can share


@dataclass(frozen=True)
class Collator:
    """Builds micro-batches.

    Attributes:
        samples: what the rows name.
        rows: rows of a micro-batch.
        pad_id: token that fills up.
        compact: a micro-batch has no more tokens than its sequences need, instead of room for `rows` full rows.
    """

    samples: Samples
    rows: int
    pad_id: int
    compact: bool = False

    def __call__(self, rows: list[Row]) -> PackedBatch:
        """Pack the sequences of `rows` end to end; with fewer rows than a micro-batch has, the rest is filler."""
        return self.build([rows])[0]

    def build(self, batches: list[list[Row]]) -> list[PackedBatch]:
        """Build several micro-batches, each from its rows, for little more than one costs: calls outweigh tokens."""
        rows = [row for batch in batches for row in batch]
        none = np.zeros(0, np.int64)
        epochs = np.concatenate([none, *(epochs for epochs, _ in rows)])
        records = np.concatenate([none, *(records for _, records in rows)])
        built = self.samples.build(epochs, records)

        first = np.cumsum([0, *(sum(len(records) for _, records in batch) for batch in batches)])
        if built.counts is not None:
            first = _edges(built.counts)[first]
        edges = _edges(built.inputs.lengths)
        bounds = np.stack([first, edges[first], np.searchsorted(built.target_index, edges[first])], 1)
        sources = _edges(built.source.lengths) if built.source is not None else None
        found = []
        for (low, start, asked), (high, _, answered) in pairwise(bounds.tolist()):
            source = None
            if built.source is not None and sources is not None:
                assert self.samples.row.source is not None
                keys = draw(built.keys[low:high], _SOURCE)
                source = self._stream(built.source, sources, low, high, keys, None, self.samples.row.source)
            offsets = None if built.offsets is None else built.offsets[low:high]
            parts = Parts(
                self._stream(built.inputs, edges, low, high, built.keys[low:high], offsets, self.samples.row.inputs),
                built.target_index[asked:answered] - start,
                built.target_ids[asked:answered],
                int(built.unknown[low:high].sum()),
                source,
            )
            found.append(assemble(parts))
        return found

    def _stream(
        self,
        sequences: Sequences,
        edges: NDArray[np.int64],
        low: int,
        high: int,
        keys: Words,
        offsets: NDArray[np.int64] | None,
        row: int,
    ) -> "Stream":
        """Cut sequences [low, high) out, and fill up."""
        text = sequences.ids[edges[low] : edges[high]]
        total = self.rows * row
        if self.compact:
            total = -(-max(len(text), 1) // _GRAIN) * _GRAIN
        ids = np.full(total, self.pad_id, text.dtype)
        ids[: len(text)] = text
        return Stream(ids, sequences.lengths[low:high], keys, row, offsets)


class Stream(NamedTuple):
    """Packed sequences in as few bytes as tell of them.

    Attributes:
        ids: [T] tokens and filler.
        lengths: [N] tokens of each sequence.
        keys: [N] for dropout.
        longest: the most tokens a sequence may have; a longer stretch of filler is cut into pieces.
        offsets: [N] position of each sequence's first token; None: 0.
    """

    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int64]
    keys: Words
    longest: int
    offsets: NDArray[np.int64] | None = None

    @property
    def fillers(self) -> int:
        """Pieces of filler."""
        return -(-(len(self.ids) - int(self.lengths.sum())) // self.longest)


class Parts(NamedTuple):
    """All that tells of a batch, a tenth of its bytes.

    Attributes:
        inputs: what the model reads.
        target_index: [M] which tokens are asked.
        target_ids: [M] what the model should say.
        unknown: see PackedBatch.
        source: what an encoder reads.
    """

    inputs: Stream
    target_index: NDArray[np.int64]
    target_ids: NDArray[np.integer[Any]]
    unknown: int = 0
    source: Stream | None = None


def assemble(parts: Parts) -> PackedBatch:
    """Make a batch from what tells of it."""
    fillers = max(stream.fillers for stream in (parts.inputs, parts.source) if stream is not None)
    none = np.zeros(0, np.int64)
    source = None if parts.source is None else _packed(parts.source, fillers, none, none, 0, None)
    return _packed(parts.inputs, fillers, parts.target_index, parts.target_ids, parts.unknown, source)


def _packed(
    stream: Stream,
    fillers: int,
    index: NDArray[np.int64],
    answers: NDArray[np.integer[Any]],
    unknown: int,
    source: PackedBatch | None,
) -> PackedBatch:
    ids, lengths, longest = stream.ids, stream.lengths, stream.longest
    filled, total = int(lengths.sum()), len(ids)
    rest = np.clip(total - filled - longest * np.arange(fillers), 0, longest)
    sizes = np.concatenate([lengths, rest]).astype(np.int32)
    boundaries = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=boundaries[1:])
    numbers = np.minimum(np.arange(len(sizes), dtype=np.int32), len(lengths))
    starts = boundaries[:-1].copy()
    if stream.offsets is not None:
        starts[: len(lengths)] -= stream.offsets.astype(np.int32)
    positions = np.arange(total, dtype=np.int32) - np.repeat(starts, sizes)
    positions[filled:] = 0
    return PackedBatch(
        tokens=torch.from_numpy(ids.astype(np.int32)),
        positions=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(np.repeat(numbers, sizes)),
        boundaries=torch.from_numpy(boundaries),
        target_index=torch.from_numpy(index),
        target_ids=torch.from_numpy(answers.astype(np.int64)),
        segment_keys=torch.from_numpy(np.append(stream.keys, np.uint64(0)).view(np.int64)),
        lengths=tuple(lengths.tolist()),
        longest=longest,
        unknown=unknown,
        source=source,
    )


def disassemble(batch: PackedBatch) -> Parts:
    """Give what `assemble` makes the batch from."""
    source = None if batch.source is None else _stream_of(batch.source)
    answers = _small(batch.target_ids.numpy())
    return Parts(_stream_of(batch), batch.target_index.numpy(), answers, batch.unknown, source)


def _stream_of(batch: PackedBatch) -> Stream:
    lengths = np.array(batch.lengths, np.int64)
    keys = batch.segment_keys[:-1].numpy().view(np.uint64)
    held = lengths > 0
    offsets = np.zeros(len(lengths), np.int64)
    offsets[held] = batch.positions.numpy()[(lengths.cumsum() - lengths)[held]]
    return Stream(_small(batch.tokens.numpy()), lengths, keys, batch.longest, offsets if offsets.any() else None)


def _small(ids: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """The same numbers in the smallest type that holds them all."""
    return ids.astype(np.min_scalar_type(int(ids.max(initial=0))))


def _edges(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each sequence begins, and the last one ends: [N + 1]."""
    return np.concatenate([[0], lengths.cumsum()])
