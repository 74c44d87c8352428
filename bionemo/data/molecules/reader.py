# SPDX-License-Identifier: Apache-2.0
"""The SMILES of records, and what should be known of them before training: too long, unknown tokens, no molecule."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.data.dataset import Sequences
from bionemo.data.molecules.smiles import read
from bionemo.data.shards.source import SequenceSource
from bionemo.tokenizers import SmilesTokenizer

_AT_A_TIME = 10_000
_TOKENISED = 50_000  # records looked at, spread evenly; a tenth of a second
_PARSED = 2_000  # of those, half a second


class MoleculeTexts:
    """Reads records as SMILES: one for a molecule, or input and target of a reaction.

    Attributes:
        sizes: integer [n], bytes of each record, of the longer side; as many tokens or fewer.
        empty: bool [n], records that lack a SMILES, on either side.
    """

    def __init__(self, source: SequenceSource, sides: tuple[str, str] | None, where: str) -> None:
        """`sides`: names of the fields with input and target (all are read once); None: the text is a molecule."""
        self._source, self._sides, self._where = source, sides, where
        self.sizes: NDArray[np.integer] = source.lengths
        self.empty: NDArray[np.bool_] = source.lengths == 0
        if sides:
            parts = [np.arange(at, min(at + _AT_A_TIME, len(source))) for at in range(0, len(source), _AT_A_TIME)]
            pairs = (pair for part in parts for pair in zip(*self(part), strict=True))
            sizes = np.array([[len(text.encode()) for text in pair] for pair in pairs], np.int32).reshape(-1, 2)
            self.sizes, self.empty = sizes.max(axis=1), sizes.min(axis=1) == 0

    def __call__(self, records: NDArray[np.int64]) -> list[list[str]]:
        """Give the SMILES of records [N]: one list of N, or one for each side of the reactions.

        Raises:
            UserError: there is no such side.
        """
        if self._sides:
            return [list(side) for side in zip(*map(self._pair, records.tolist()), strict=True)] or [[], []]
        counts = self._source.lengths[records].astype(np.int64)
        stops = counts.cumsum()
        data = bytearray(int(counts.sum()))
        out = np.frombuffer(data, np.uint8)
        self._source.gather(records, np.zeros_like(counts), counts, out, stops - counts)  # ten times as fast as `text`
        bounds = zip((stops - counts).tolist(), stops.tolist(), strict=True)
        return [[data[begin:stop].decode().strip() for begin, stop in bounds]]

    def _pair(self, record: int) -> tuple[str, ...]:
        assert self._sides
        try:
            fields = self._source.fields(record)
            return tuple(fields[name].strip() for name in self._sides)
        except KeyError as error:
            raise UserError(
                f"{self._where}: there is no field {error}, only {', '.join(fields)}: name the fields of "
                "model.data.input_name and model.data.target_name in data_fields"
            ) from error


def fitting(
    texts: MoleculeTexts, tokenizer: SmilesTokenizer, room: int, policy: str, where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Apply the policy for SMILES of more than `room` tokens: `truncate`, `drop` or `error`.

    Returns:
        The records that take part, those that are too long, both int64, and a line saying what happened to how many
        ("" when all fit).

    Raises:
        UserError: when the policy is `error` and there are such SMILES, or when none is left.
    """
    total = len(texts.sizes)
    records = np.arange(total)
    suspects = np.flatnonzero(texts.sizes > room)
    tokens = np.zeros(len(suspects), np.int64)
    for at in range(0, len(suspects), _AT_A_TIME):
        part = slice(at, at + _AT_A_TIME)
        tokens[part] = np.max([tokenizer.encode_all(side)[1] for side in texts(suspects[part])], axis=0)
    long, tokens = suspects[tokens > room], tokens[tokens > room]
    if policy == "error" and len(long):
        raise UserError(
            f"{where}: {len(long):,} of {total:,} SMILES are longer than {room} tokens (the first is record "
            f"{long[0]:,} with {tokens[0]:,}): raise model.seq_length, or set model.data.long_sequences to truncate "
            "or drop"
        )
    if policy == "drop":
        records = np.delete(records, long)
    if not len(records):
        raise UserError(
            f"{where}: no SMILES of at most {room} tokens is left: raise model.seq_length, or set "
            "model.data.long_sequences to truncate"
        )
    done = "left out" if policy == "drop" else "cut at their end"
    share = f"{len(long):,} of {total:,} SMILES ({len(long) / total:.1%})"
    line = f"{where}: {share} are longer than {room} tokens and are {done}" if len(long) else ""
    return records, long, line


def without_empty(texts: MoleculeTexts, records: NDArray[np.int64], where: str) -> tuple[NDArray[np.int64], str]:
    """Leave out records that lack a SMILES.

    Args:
        texts: SMILES of records.
        records: int64 [k], those that take part.
        where: names the data in messages.

    Returns:
        The records that are left, int64, and a line saying how many are not ("" when none is empty).

    Raises:
        UserError: when all are empty.
    """
    kept = records[~texts.empty[records]]
    empty = len(records) - len(kept)
    if not len(kept):
        raise UserError(f"{where}: all {empty:,} SMILES are empty: check the files and the columns of the SMILES")
    line = f"{where}: {empty:,} of {len(records):,} records have an empty SMILES and are left out" if empty else ""
    return kept, line


def unknown_tokens(
    texts: MoleculeTexts, records: NDArray[np.int64], tokenizer: SmilesTokenizer, policy: str, where: str
) -> list[str]:
    """Look at some of the records for tokens outside the vocabulary, and say what becomes of them.

    Raises:
        UserError: when the policy is `error` and there are some.
    """
    looked = evenly(records, _TOKENISED)
    strange, found = 0, Counter[str]()
    for at in range(0, len(looked), _AT_A_TIME):
        sides = texts(looked[at : at + _AT_A_TIME])
        unknown = [unknown_in_each(Sequences(*tokenizer.encode_all(side)), tokenizer.unk_id) for side in sides]
        bad = np.flatnonzero(np.any(unknown, axis=0))
        strange += len(bad)
        found.update(piece for side in sides for i in bad for piece in tokenizer.unknown(side[i]))
    if not strange:
        return []
    named = ", ".join(shown(piece) for piece, _ in found.most_common(5)) + (" ..." if len(found) > 5 else "")
    problem = f"{where}: {found.total():,} tokens in {strange:,} of {len(looked):,} records are outside the vocabulary"
    if policy == "error":
        raise UserError(f"{problem} ({named}): mend them, or set model.data.on_unknown to skip or keep")
    return [f"{problem} and {'their records are left out' if policy == 'skip' else 'count as unknown'} ({named})"]


def refused_molecules(
    texts: MoleculeTexts,
    records: NDArray[np.int64],
    long: NDArray[np.int64],
    sides: list[int],
    policy: str,
    where: str,
) -> list[str]:
    """Look at some of the records for SMILES that RDKit refuses, and say what becomes of them.

    Args:
        texts: SMILES of records.
        records: int64 [k], those that take part.
        long: int64, those too long to be given to RDKit.
        sides: which sides of a record RDKit is needed for.
        policy: `skip`, `keep` or `error`.
        where: names the data in messages.

    Raises:
        UserError: when the policy is `error` and there are some.
    """
    looked = np.setdiff1d(evenly(records, _PARSED), long)
    stored = texts(looked)
    refused = [(i, side) for i in range(len(looked)) for side in sides if not read(stored[side][i])]
    if not refused:
        return []
    i, side = refused[0]
    first = f"(the first is record {looked[i]:,}, {shown(stored[side][i])})"
    problem = f"{where}: RDKit cannot read {len(refused):,} of {len(sides) * len(looked):,} SMILES {first}"
    if policy == "error":
        raise UserError(f"{problem}: mend them, or set model.data.on_invalid to skip or keep")
    return [f"{problem}; {'their records are left out' if policy == 'skip' else 'they are taken as they stand'}"]


def unknown_in_each(sequences: Sequences, unk_id: int) -> NDArray[np.int64]:
    """Number of unknown tokens in each of the sequences [N], int64 [N]."""
    places = np.flatnonzero(sequences.ids == unk_id)
    return np.diff(places.searchsorted(sequences.lengths.cumsum()), prepend=0)


def shown(text: str) -> str:
    """Quote a text in a message, shortened."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def evenly(records: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Give at most `count` of the records, spread evenly."""
    return records[np.arange(min(count, len(records))) * len(records) // min(count, len(records))]
