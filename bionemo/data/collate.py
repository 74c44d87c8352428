# SPDX-License-Identifier: Apache-2.0
"""From (epoch, record) pairs to a micro-batch: fetch, crop, tokenise, mask, all on whole packs at a time."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bionemo.data.batch import PackedBatch
from bionemo.data.masking import Masking
from bionemo.data.random_stream import below, draw, purpose_key, sample_keys
from bionemo.data.sampler import Samples
from bionemo.data.source import SequenceSource
from bionemo.errors import UserError
from bionemo.tokenizers import Alphabet

SPECIAL = 2  # a begin and an end token around every sequence


@dataclass(frozen=True)
class Collator:
    """Builds micro-batches of `rows` rows of `seq_length` tokens.

    Attributes:
        source: where the letters come from.
        alphabet: turns letters into ids.
        masking: hides residues.
        seed: of crops and masks; with the epoch and the record it decides both.
        seq_length: tokens of a row, and the most that one sequence may have, its two special tokens included.
        rows: rows of a micro-batch.
        crop: cut long sequences at a random place; otherwise keep their beginning.
        dynamic_padding: without packing: rows only as long as the longest sequence of the micro-batch.
    """

    source: SequenceSource
    alphabet: Alphabet
    masking: Masking
    seed: int
    seq_length: int
    rows: int
    crop: bool
    dynamic_padding: bool = False

    def __call__(self, rows: list[Samples]) -> PackedBatch:
        """Pack the sequences of `rows` end to end; with fewer rows than a micro-batch has, the rest is filler."""
        return self.build([rows])[0]

    def build(self, batches: list[list[Samples]]) -> list[PackedBatch]:
        """Build several micro-batches, each from its rows, for little more than one costs: calls outweigh tokens."""
        samples = [sample for rows in batches for sample in rows]
        none = np.zeros(0, np.int64)
        epochs = np.concatenate([none, *(epochs for epochs, _ in samples)])
        records = np.concatenate([none, *(records for _, records in samples)])
        tokens, lengths, unknown = self._tokens(epochs, records)
        mask_keys = sample_keys(purpose_key(self.seed, "mask"), epochs, records)
        index, answers = self.masking(tokens, mask_keys, lengths)
        keys = sample_keys(purpose_key(self.seed, "dropout"), epochs, records)

        sequences = np.cumsum([0, *(sum(len(records) for _, records in rows) for rows in batches)])
        ends = np.concatenate([none, [0], lengths.cumsum()])[sequences]
        asked = np.searchsorted(index, ends)
        built = []
        spans = zip(*(pairwise(bounds.tolist()) for bounds in (sequences, ends, asked)), strict=True)
        for (first, last), (begin, end), (low, high) in spans:
            ids = np.full(self.rows * self._width(lengths[first:last]), self.alphabet.pad_id, np.uint8)
            ids[: end - begin] = tokens[begin:end]
            targets = index[low:high] - begin, answers[low:high]
            outside = int(unknown[first:last].sum())
            built.append(assemble(ids, lengths[first:last], *targets, keys[first:last], self.seq_length, outside))
        return built

    def _tokens(
        self, epochs: NDArray[np.int64], records: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Fetch, crop and tokenise: ids end to end [n], and of each sequence [N] its tokens and unknown letters."""
        residues = self.source.lengths[records].astype(np.int64)
        room = self.seq_length - SPECIAL
        counts = np.minimum(residues, room)
        first = np.zeros_like(counts)
        if self.crop and (long := np.flatnonzero(residues > room)).size:
            keys = sample_keys(purpose_key(self.seed, "crop"), epochs[long], records[long])
            first[long] = below(draw(keys), residues[long] - room + 1)  # the last window is one of them

        lengths = counts + SPECIAL
        ends = lengths.cumsum()
        starts = ends - lengths
        text = bytearray(int(lengths.sum()))
        self.source.gather(records, first, counts, np.frombuffer(text, np.uint8), starts + 1)
        tokens = np.frombuffer(text.translate(self._table), np.uint8)  # thrice as fast as indexing
        tokens[starts], tokens[ends - 1] = self.alphabet.bos_id, self.alphabet.eos_id

        space = tokens == self.alphabet.pad_id
        unknown = np.add.reduceat(tokens == self.alphabet.unk_id, starts, dtype=np.int64)
        if unknown.any() or space.any():  # a run of unknown letters is one token, as in the predecessor's tokenizers
            keep = self.alphabet.collapse_unknown(tokens, starts) & ~space
            tokens, lengths = tokens[keep], np.add.reduceat(keep, starts, dtype=np.int64)
        return tokens, lengths, unknown

    @cached_property
    def _table(self) -> bytes:
        return letter_ids(self.alphabet).tobytes()

    def _width(self, lengths: NDArray[np.int64]) -> int:
        """Tokens of a row."""
        if not self.dynamic_padding:
            return self.seq_length
        return min(-(-int(lengths.max(initial=1)) // 8) * 8, self.seq_length)


def letter_ids(alphabet: Alphabet) -> NDArray[np.uint8]:
    """Id of every byte, uint8 [256], as in the alphabet's table, but that white space which it skips is `pad_id`."""
    table = alphabet.table.copy()
    if alphabet.skips_space:
        table[list(b" \t\n\v\f\r\x1c\x1d\x1e\x1f")] = alphabet.pad_id
    return table


def assemble(
    ids: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    target_index: NDArray[np.int64],
    answers: NDArray[np.uint8],
    keys: NDArray[np.uint64],
    longest: int,
    unknown: int,
) -> PackedBatch:
    """Make a batch from what nothing else tells of it: a tenth of its bytes.

    Args:
        ids: [T] masked tokens and filler.
        lengths: [N] tokens of each sequence.
        target_index: [M] which tokens are asked.
        answers: [M] their original ids.
        keys: [N] for dropout, one for each sequence.
        longest: the most tokens a sequence may have; a longer stretch of filler is cut into pieces.
        unknown: see PackedBatch.
    """
    filled, total = int(lengths.sum()), len(ids)
    fillers = [min(longest, total - at) for at in range(filled, total, longest)]
    sizes = np.array([*lengths.tolist(), *fillers], np.int32)
    boundaries = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=boundaries[1:])
    numbers = np.minimum(np.arange(len(sizes), dtype=np.int32), len(lengths))
    positions = np.arange(total, dtype=np.int32) - np.repeat(boundaries[:-1], sizes)
    positions[filled:] = 0
    return PackedBatch(
        tokens=torch.from_numpy(ids.astype(np.int32)),
        positions=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(np.repeat(numbers, sizes)),
        boundaries=torch.from_numpy(boundaries),
        target_index=torch.from_numpy(target_index),
        target_ids=torch.from_numpy(answers.astype(np.int64)),
        segment_keys=torch.from_numpy(np.append(keys, np.uint64(0)).view(np.int64)),
        lengths=tuple(lengths.tolist()),
        longest=longest,
        unknown=unknown,
    )


def disassemble(batch: PackedBatch) -> tuple[Any, ...]:
    """Give what `assemble` makes the batch from."""
    ids, answers = (tensor.numpy().astype(np.uint8) for tensor in (batch.tokens, batch.target_ids))
    index, lengths = batch.target_index.numpy(), np.array(batch.lengths, np.int64)
    keys = batch.segment_keys[:-1].numpy().view(np.uint64)
    return ids, lengths, index, answers, keys, batch.longest, batch.unknown


def long_records(lengths: np.ndarray, seq_length: int, policy: str, where: str) -> tuple[np.ndarray, str]:
    """Apply the policy for sequences that do not fit: `crop`, `truncate`, `drop` or `error`.

    Returns:
        The records that take part, int64, and a line saying what happened to how many ("" when all fit).

    Raises:
        UserError: when the policy is `error` and there are such sequences, or when none is left.
    """
    room = seq_length - SPECIAL
    long = np.flatnonzero(lengths > room)
    records = np.flatnonzero(lengths <= room) if policy == "drop" else np.arange(len(lengths))
    if policy == "error" and len(long):
        raise UserError(
            f"{where}: {len(long):,} of {len(lengths):,} sequences are longer than {room} residues "
            f"(the first is record {long[0]:,} with {lengths[long[0]]:,}): raise model.seq_length, or set "
            "model.data.long_sequences to crop, truncate or drop"
        )
    if not len(records):
        raise UserError(
            f"{where}: no sequence of at most {room} residues is left: raise model.seq_length, or set "
            "model.data.long_sequences to crop or truncate"
        )
    done = {"crop": "cut at a random place", "truncate": "cut at their end", "drop": "left out"}.get(policy, "")
    share = f"{len(long):,} of {len(lengths):,} sequences ({len(long) / len(lengths):.1%})"
    return records, f"{where}: {share} are longer than {room} residues and are {done}" if len(long) else ""
