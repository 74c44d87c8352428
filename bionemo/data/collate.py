# SPDX-License-Identifier: Apache-2.0
"""From (epoch, record) pairs to a micro-batch: fetch, crop, tokenise, mask, all on whole packs at a time."""

from dataclasses import dataclass

import numpy as np
import torch

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
        epochs = np.concatenate([epoch for epoch, _ in rows]) if rows else np.zeros(0, np.int64)
        records = np.concatenate([record for _, record in rows]) if rows else np.zeros(0, np.int64)

        residues = self.source.lengths[records].astype(np.int64)
        room = self.seq_length - SPECIAL
        counts = np.minimum(residues, room)
        first = np.zeros_like(counts)
        if self.crop and (long := np.flatnonzero(residues > room)).size:
            keys = sample_keys(purpose_key(self.seed, "crop"), epochs[long], records[long])
            first[long] = below(draw(keys, np.zeros(1, np.int64)), residues[long] - room + 1)  # last window included

        lengths = counts + SPECIAL
        offsets = np.cumsum(lengths) - lengths
        letters = np.empty(int(lengths.sum()), np.uint8)
        letters[offsets], letters[offsets + lengths - 1] = 0, 0
        self.source.gather(records, first, counts, letters, offsets + 1)
        tokens = self.alphabet.table[letters]
        tokens[offsets], tokens[offsets + lengths - 1] = self.alphabet.bos_id, self.alphabet.eos_id
        unknown = int(np.count_nonzero(tokens == self.alphabet.unk_id))
        if unknown > 1:  # a run of unknown letters is one token, as in the predecessor's tokenizers
            keep = self.alphabet.collapse_unknown(tokens, offsets)
            lengths = np.add.reduceat(keep, offsets, dtype=np.int64)
            tokens, offsets = tokens[keep], np.cumsum(lengths) - lengths

        positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(offsets, lengths).astype(np.int32)
        keys = sample_keys(purpose_key(self.seed, "mask"), epochs, records)
        target_index, target_ids = self.masking(tokens, positions, keys, lengths)

        width = -(-int(lengths.max(initial=1)) // 8) * 8 if self.dynamic_padding else self.seq_length
        filler = self.rows * min(width, self.seq_length) - len(tokens)
        pieces = [self.seq_length] * (filler // self.seq_length) + [filler % self.seq_length] * (filler % self.seq_length > 0)
        segment_ids = np.repeat(np.arange(len(lengths)), lengths)
        return PackedBatch(
            tokens=_int32(np.pad(tokens, (0, filler), constant_values=self.alphabet.pad_id)),
            positions=_int32(np.pad(positions, (0, filler))),
            segment_ids=_int32(np.pad(segment_ids, (0, filler), constant_values=len(lengths))),
            boundaries=_int32(np.cumsum([0, *lengths.tolist(), *pieces])),
            target_index=torch.from_numpy(target_index),
            target_ids=torch.from_numpy(target_ids.astype(np.int64)),
            lengths=tuple(lengths.tolist()),
            longest=self.seq_length,
            noise_seed=int(keys[0] >> np.uint64(1)) if len(keys) else 0,
            unknown=unknown,
        )


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


def _int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
