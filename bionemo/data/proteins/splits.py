# SPDX-License-Identifier: Apache-2.0
"""From the configuration of a split to its sequences."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema import ProteinDataConfig, SplitConfig
from bionemo.data.clusters import Clusters, open_clusters
from bionemo.data.files import SplitName, cluster_members, split_files, training_files
from bionemo.data.proteins.mistakes import likely_mistakes
from bionemo.data.proteins.mock import MockSource
from bionemo.data.shards.columns import PROTEINS
from bionemo.data.shards.duplicates import duplicate_notices
from bionemo.data.shards.source import SequenceSource, open_shards
from bionemo.tokenizers import Alphabet

_WHITE_SPACE = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"
_COUNTED = 50_000  # sequences read to count unknown letters before a run


@dataclass(frozen=True)
class Split:
    """The sequences of a split, those of them that take part, and what the user should know of them."""

    source: SequenceSource
    records: np.ndarray  # int64, records that take part, or clusters
    letters: np.ndarray  # int64 [256], how often each byte occurs
    notices: tuple[str, ...]
    clusters: Clusters | None = None  # of the source's records, where a sample is one of a cluster

    @property
    def shares(self) -> NDArray[np.float64]:
        """How often each letter that occurs does, of all."""
        shares: NDArray[np.float64] = self.letters[self.letters > 0] / self.letters.sum()
        return shares

    @property
    def unigram_entropy(self) -> float:
        """Nats per residue: the loss of a model that knows nothing but the residues' frequencies."""
        return float(-(self.shares * np.log(self.shares)).sum())


def open_split(config: ProteinDataConfig, name: SplitName, room: int, alphabet: Alphabet) -> Split:
    """Open a split, apply the policy for sequences of more than `room` residues, and count letters.

    Raises:
        UserError: for missing, unreadable or empty data, and for long sequences where these are an error.
    """
    split: SplitConfig = getattr(config, name)
    members = cluster_members(config) if name == "train" else None
    files = members or split_files(config, name)
    if split.data_impl == "mock":
        source = _mock(config, name)
    elif members and config.train.uf90:
        source = open_shards(config.train.uf90, files, keys="model.data.train.uf90", kind=PROTEINS)
    else:
        source = open_shards(split, files, keys=f"model.data.{name}", kind=PROTEINS)
    label = f"{name} data"
    if not len(source):
        raise UserError(f"{label} holds no sequence: check model.data.dataset.{name}")
    # only training sees another part of a long sequence in every epoch: a validation asks the same each time
    policy = "truncate" if config.long_sequences == "crop" and name != "train" else config.long_sequences
    records, long = long_records(source.lengths, room, policy, label)
    records, empty = without_empty(source.lengths, records, label)
    letters = count_letters(source)
    if letters.sum() == letters[list(_WHITE_SPACE)].sum():
        raise UserError(f"{label}: the sequences hold nothing but white space: check the files and their columns")
    clusters = None
    if members:
        clusters = _clusters(config, len(source))
        clusters = clusters.only(records) if len(records) < len(source) else clusters
        records = np.flatnonzero(clusters.counts)
    capitals = letters.copy()
    capitals[ord("a") : ord("z") + 1] = 0  # likely_mistakes says what becomes of lower case
    notices = [
        *filter(None, (empty, long, unknown_letters(capitals, alphabet, label))),
        *likely_mistakes(source, letters, alphabet, label),
        *duplicate_notices(name, files, training_files(config) if name != "train" else []),
    ]
    return Split(source, records, letters, tuple(notices), clusters)


def _clusters(config: ProteinDataConfig, members: int) -> Clusters:
    """The clusters of the shards that are chosen, which must be the first ones: clusters are numbered through them."""
    files = split_files(config, "train")
    there = sorted(files[0].parent.glob("*.csv"))
    if files != there[: len(files)]:
        raise UserError(
            f"model.data.dataset.train: clusters are numbered through all shards of {files[0].parent}: choose a range "
            f"that begins with {there[0].stem}"
        )
    wanted = None
    if len(files) < len(there):
        wanted = len(open_shards(config.train, files, keys="model.data.train", kind=None))
    return open_clusters(files[0].parent, config.train.seed, wanted, members)


def _mock(config: ProteinDataConfig, name: SplitName) -> SequenceSource:
    mock = config.mock
    number = mock.num_sequences if name == "train" else mock.num_validation_sequences
    return MockSource(number, mock.min_length, mock.max_length, mock.seed, name)


def count_letters(source: SequenceSource) -> np.ndarray:
    """How often each byte occurs in all sequences, or in the first 50,000: int64 [256]."""
    seen = min(len(source), _COUNTED)
    histogram = np.zeros(256, np.int64)
    for start in range(0, seen, 4096):
        records = np.arange(start, min(start + 4096, seen))
        counts = source.lengths[records].astype(np.int64)
        ends = np.cumsum(counts)
        letters = np.empty(int(ends[-1]), np.uint8)
        source.gather(records, np.zeros_like(counts), counts, letters, ends - counts)
        histogram += np.bincount(letters, minlength=256)
    return histogram


def unknown_letters(letters: np.ndarray, alphabet: Alphabet, label: str) -> str:
    """Say how many letters the alphabet does not have, "" when it has all."""
    outside = np.flatnonzero(letters * (letter_ids(alphabet) == alphabet.unk_id))
    if not len(outside):
        return ""
    names = " ".join(repr(chr(letter)) for letter in outside[:8])
    return f"{label}: {int(letters[outside].sum()):,} letters are outside the alphabet and count as unknown ({names})"


def letter_ids(alphabet: Alphabet) -> np.ndarray:
    """Id of every byte, uint8 [256], as in the alphabet's table, but that white space which it skips is `pad_id`."""
    table = alphabet.table.copy()
    if alphabet.skips_space:
        table[list(_WHITE_SPACE)] = alphabet.pad_id
    return table


def long_records(lengths: np.ndarray, room: int, policy: str, where: str) -> tuple[np.ndarray, str]:
    """Apply the policy for sequences of more than `room` residues: `crop`, `truncate`, `drop` or `error`.

    Returns:
        The records that take part, int64, and a line saying what happened to how many ("" when all fit).

    Raises:
        UserError: when the policy is `error` and there are such sequences, or when none is left.
    """
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


def without_empty(
    lengths: NDArray[np.integer[Any]], records: NDArray[np.int64], where: str
) -> tuple[NDArray[np.int64], str]:
    """Leave out records whose sequence is empty.

    Args:
        lengths: integer [n], letters of every record.
        records: int64 [k], those that take part.
        where: names the data in messages.

    Returns:
        The records that are left, and a line saying how many are not ("" when none is empty).

    Raises:
        UserError: when all are empty.
    """
    kept = records[lengths[records] > 0]
    empty = len(records) - len(kept)
    if not empty:
        return records, ""
    if not len(kept):
        raise UserError(f"{where}: all {empty:,} sequences are empty: check the files and the column of the sequence")
    return kept, f"{where}: {empty:,} of {len(records):,} sequences are empty and are left out"
