# SPDX-License-Identifier: Apache-2.0
"""Collate samples into micro-batches: tokens, padding and targets, as NumPy arrays that workers send as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bionemo.common.random_stream import draw
from bionemo.data.dataset import Dataset, TokenizedBatch, TokenSequences
from bionemo.data.sampler import SampleIds

_SOURCE_KEY = 1 << 32  # counter of the draw that gives the encoder's dropout key; more than tokens in a sequence
_TOKEN_MULTIPLE = 64  # dynamic padding rounds up to it, so that tensor-parallel ranks can divide the tokens
_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Collator:
    """Tokenizes samples and concatenates them into micro-batches."""

    dataset: Dataset  # tokenizes the samples
    micro_batch_size: int  # number of rows in a micro-batch
    pad_id: int
    dynamic_padding: bool = False  # pad to the next multiple of 64 tokens, not to micro_batch_size x max_length tokens

    def __call__(self, batches: list[list[SampleIds]]) -> list[TokenizedBatch]:
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
        inputs = self._split(tokenized.inputs, bounds, max_lengths.inputs)
        sources: Sequence[TokenSequences | None] = [None] * len(batches)
        if tokenized.source is not None:
            assert max_lengths.source is not None and tokenized.inputs.dropout_keys is not None
            source = replace(tokenized.source, dropout_keys=draw(tokenized.inputs.dropout_keys, _SOURCE_KEY))
            sources = self._split(source, bounds, max_lengths.source)
        token_bounds = _bounds(tokenized.inputs.lengths)[bounds]
        target_bounds = np.searchsorted(tokenized.target_positions, token_bounds)

        collated = []
        for i, (part, source_part) in enumerate(zip(inputs, sources, strict=True)):
            targets = slice(*target_bounds[i : i + 2])
            positions = tokenized.target_positions[targets] - token_bounds[i]
            unknown = tokenized.unknown_counts[slice(*bounds[i : i + 2])]
            collated.append(TokenizedBatch(part, positions, tokenized.target_ids[targets], unknown, source_part))
        return collated

    def _split(self, tokens: TokenSequences, bounds: NDArray[np.int64], max_length: int) -> list[TokenSequences]:
        """Divide token sequences at these bounds, [parts + 1]; append the padding of a micro-batch to each part."""
        starts, keys, positions = _bounds(tokens.lengths)[bounds], tokens.dropout_keys, tokens.first_positions
        parts = []
        for i in range(len(bounds) - 1):
            sequences, ids = slice(*bounds[i : i + 2]), tokens.ids[slice(*starts[i : i + 2])]
            total = self.micro_batch_size * max_length
            if self.dynamic_padding:
                total = -(-max(len(ids), 1) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
            padded = np.full(total, self.pad_id, ids.dtype)
            padded[: len(ids)] = ids
            part_keys = None if keys is None else keys[sequences]
            part_positions = None if positions is None else positions[sequences]
            parts.append(TokenSequences(padded, tokens.lengths[sequences], max_length, part_keys, part_positions))
        return parts


def _bounds(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each of N consecutive parts, and the end of the last: [N + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
