# SPDX-License-Identifier: Apache-2.0
"""Opens the sequences of a split: files, clusters or mock data, after the policies for unusable records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.config.schema import MaskedDataConfig, ProteinDataConfig
from bionemo.data.clusters import Clusters, open_clusters
from bionemo.data.columns import PROTEINS
from bionemo.data.files import SplitName, cluster_members, source_configs, split_files
from bionemo.data.letters import LetterCounts
from bionemo.data.mixture import PERIOD, Mixture, round_shares
from bionemo.data.policies import apply_length_policy, drop_empty
from bionemo.data.proteins import mock
from bionemo.data.proteins.mock import MockSource
from bionemo.data.shards.source import LetterSource, SequenceSource, duplicate_notes, open_shards, read_prefixes
from bionemo.tokenizers import Alphabet

_COUNTED_SEQUENCES = 200_000  # of which the letters are counted
_COUNTED_MOCK_SEQUENCES = 50_000  # they are generated when they are read, which takes longer


@dataclass(frozen=True)
class Split:
    """The sequences of a split."""

    source: LetterSource
    records: NDArray[np.int64]  # [k], numbers of the records in use; with `clusters`, numbers of clusters
    letter_counts: NDArray[np.int64]  # [256], occurrences of each byte in the first 200,000 sequences
    notes: tuple[str, ...]  # messages for the user
    seed: int  # seed of crops and masks
    crop: bool  # cut long sequences at a random position that changes with the epoch; otherwise keep their beginning
    clusters: Clusters | None = None  # selects a record from each cluster; None if a sample is a record
    mixture: Mixture | None = None  # the sources, if there are several

    @property
    def letter_frequencies(self) -> NDArray[np.float64]:
        """Relative frequency of each letter that occurs; upper and lower case are the same residue."""
        upper = np.array([ord(chr(letter).upper()) if letter < 128 else letter for letter in range(256)])
        counts = np.bincount(upper, self.letter_counts)
        frequencies: NDArray[np.float64] = counts[counts > 0] / counts.sum()
        return frequencies

    @property
    def unigram_entropy(self) -> float:
        """Nats per residue: the loss of a model that predicts the letter frequencies."""
        return float(-(self.letter_frequencies * np.log(self.letter_frequencies)).sum())


def open_split(
    config: ProteinDataConfig, name: SplitName, max_residues: int, alphabet: Alphabet, keys: str | None = None
) -> Split:
    """Open a split, apply the policies for long and empty sequences, and count letters.

    `keys` is the prefix of the reader's keys in error messages; None: that of the split.

    Raises:
        UserError: if the data is missing, unreadable or empty, or has sequences of more than `max_residues` letters
            while `long_sequences` is "error".
    """
    split = getattr(config, name)
    members = cluster_members(config) if name == "train" else None
    files = members or split_files(config, name)
    source: SequenceSource
    if split.data_impl == "mock":
        mock = config.mock
        count = mock.num_sequences if name == "train" else mock.num_validation_sequences
        source = MockSource(count, mock.min_length, mock.max_length, mock.seed, name)
    elif members and config.train.uf90:
        source = open_shards(config.train.uf90, files, keys="model.data.train.uf90", expected=PROTEINS)
    else:
        source = open_shards(split, files, keys=keys or f"model.data.{name}", expected=PROTEINS)
    label = f"{name} data"
    if not len(source):
        raise UserError(f"{label} has no sequences: check model.data.dataset.{name}")
    crop = config.long_sequences == "crop" and name == "train"  # validation must use the same residues in every epoch
    policy = "truncate" if config.long_sequences == "crop" and not crop else config.long_sequences
    records, long_note = apply_length_policy(
        source.lengths, max_residues, policy, label, "sequences", "residues", "crop, truncate or drop"
    )
    records, empty_note = drop_empty(source.lengths == 0, records, label, "sequences")
    counts, letters_note = count_letters(source, alphabet)
    clusters = None
    if members:
        clusters = _open_clusters(config, len(source))
        clusters = clusters.only(records) if len(records) < len(source) else clusters
        records = np.flatnonzero(clusters.counts)
    notes = [
        *filter(None, (empty_note, long_note, letters_note and f"{label}: {letters_note}")),
        *duplicate_notes(config, name, files),
    ]
    return Split(source, records, counts, tuple(notes), split.seed, crop, clusters)


class ConcatenatedSource:
    """The records of several sources as one `LetterSource`, numbered consecutively."""

    def __init__(self, sources: Sequence[LetterSource]) -> None:
        self.lengths = np.concatenate([source.lengths for source in sources])
        # number of the first record of each source, and number of all records
        self.starts = np.cumsum([0, *(len(source.lengths) for source in sources)])
        self._sources = tuple(sources)

    def locate(self, records: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each record, and the number of the record in it, int64 [k] each."""
        numbers = np.searchsorted(self.starts, records, "right") - 1
        return numbers, records - self.starts[numbers]

    def gather(
        self,
        records: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        out: NDArray[np.uint8],
        offsets: NDArray[np.int64],
    ) -> None:
        """See LetterSource."""
        numbers, own = self.locate(records)
        for number in np.unique(numbers):
            here = numbers == number
            self._sources[number].gather(own[here], starts[here], counts[here], out, offsets[here])


def open_mixture(config: MaskedDataConfig, name: SplitName, max_residues: int, alphabet: Alphabet) -> Split:
    """Open a split of all sources of `model.data.mixture` as one split; see `open_split`.

    Raises:
        UserError: as `open_split`; names the source.
    """
    splits: dict[str, Split] = {}
    for source, of_source in source_configs(config).items():
        try:
            splits[source] = open_split(of_source, name, max_residues, alphabet, f"model.data.mixture.{source}")
        except UserError as error:
            raise UserError(f"model.data.mixture.{source}: {error}") from error
    combined = ConcatenatedSource([split.source for split in splits.values()])
    starts = dict(zip(splits, combined.starts[:-1].tolist(), strict=True))
    records = np.concatenate([split.records + starts[source] for source, split in splits.items()])
    parts = np.split(records, np.cumsum([len(split.records) for split in splits.values()])[:-1])
    notes = [f"{source}: {note}" for source, split in splits.items() for note in split.notes]
    weights = {source: each.weight for source, each in sorted((config.mixture or {}).items())}
    quotas = round_shares(weights)
    shares = [PERIOD * weight / sum(weights.values()) for weight in weights.values()]
    if name == "train" and not np.allclose([*quotas.values()], shares, rtol=0, atol=1e-6):
        rounded = ", ".join(f"{source} {quota / PERIOD:g}" for source, quota in quotas.items())
        notes.append(f"model.data.mixture: the shares are rounded to multiples of 1/{PERIOD:,}: {rounded}")
    return Split(
        combined, records, np.sum([split.letter_counts for split in splits.values()], axis=0),
        tuple(notes), splits[source].seed, splits[source].crop,
        mixture=Mixture(dict(zip(splits, parts, strict=True)), quotas),
    )  # fmt: skip


def _open_clusters(config: ProteinDataConfig, members: int) -> Clusters:
    """Open the clusters of the selected shards, which must be the first ones: clusters are numbered across shards."""
    files = split_files(config, "train")
    shards = sorted(files[0].parent.glob("*.csv"))
    if files != shards[: len(files)]:
        raise UserError(
            f"model.data.dataset.train: clusters are numbered through all shards of {files[0].parent}: select a range "
            f"that begins with {shards[0].stem}"
        )
    count = None
    if len(files) < len(shards):
        count = len(open_shards(config.train, files, keys="model.data.train", expected=None))
    return open_clusters(files[0].parent, config.train.seed, count, members)


def count_letters(source: SequenceSource, alphabet: Alphabet) -> tuple[NDArray[np.int64], str | None]:
    """Return the occurrences of each byte in the first 200,000 sequences, int64 [256], and a note about them.

    Of mock data, 50,000 sequences are counted.
    """
    total = min(len(source), _COUNTED_MOCK_SEQUENCES if isinstance(source, mock.MockSource) else _COUNTED_SEQUENCES)
    histogram, found = np.zeros(256, np.int64), LetterCounts(alphabet)
    for start in range(0, total, 4096):
        records = np.arange(start, min(start + 4096, total))
        letters, _ = read_prefixes(source, records)
        histogram += np.bincount(letters, minlength=256)
        if not isinstance(source, mock.MockSource):
            found.add_letters(letters, source.lengths[records])
    return histogram, found.note("record {:,}".format)
